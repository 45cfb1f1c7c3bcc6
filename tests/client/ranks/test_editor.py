"""debugpy in a process, with answers in place of hosts. Real ones are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshgate.errors import JobError
from meshgate.ranks import editor
from meshgate.ranks.editor import debug_in_editor
from meshgate.session.futures import FutureProxy


class Hosts:
    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.stopped = answers, 0
        self.start_debugpy = self

    def spawn_procs(self, name: str) -> Hosts:
        return self

    def spawn(self, name: str, Class: type) -> Hosts:
        return self

    def call(self, *arguments: Any) -> FutureProxy[Any]:
        return FutureProxy.resolved(dict(enumerate(self.answers)))

    def stop(self) -> None:
        self.stopped += 1


class Forwarded:
    port, closed = 4711, False

    def close(self) -> None:
        self.closed = True


def test_the_port_of_the_host_that_has_the_process_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    forwarded = Forwarded()
    monkeypatch.setattr(editor, "forward", lambda hosts, *arguments, **options: (asked.append(arguments), forwarded)[1])
    hosts: Any = Hosts({}, {"port": 5678, "roots": ["/store/v1"]})
    with debug_in_editor(hosts, "procs", 3) as debugging:
        assert asked == [(5678, 1)]
        assert debugging.port == 4711
        configuration = json.loads(str(debugging))
        assert configuration["connect"] == {"host": "127.0.0.1", "port": 4711}
        assert configuration["pathMappings"] == [{"localRoot": "${workspaceFolder}", "remoteRoot": "/store/v1"}]
    assert forwarded.closed
    assert hosts.stopped == 1


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (({}, {}), "no process has rank 3 in a proc mesh named 'procs'"),
        (({"problem": "debugpy is not installed there"},), "cannot debug rank 3 of 'procs': debugpy is not installed"),
    ],
)
def test_a_process_that_cannot_be_debugged_is_an_error(answers: tuple[dict[str, Any], ...], text: str) -> None:
    hosts: Any = Hosts(*answers)
    with pytest.raises(JobError, match=text):
        debug_in_editor(hosts, "procs", 3)
    assert hosts.stopped == 1

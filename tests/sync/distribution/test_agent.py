from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshgate_sync
from meshgate_sync.distribution.agent import VARIABLE, HostAgent, enable_debug_log, main
from meshgate_sync.errors import StoreError
from meshgate_sync.relay.plan import GATEWAY, Routes

SOURCES = str(Path(meshgate_sync.__file__).parent.parent)
PROGRAM = """
import logging
from meshgate_sync.distribution.agent import enable_debug_log
enable_debug_log(); enable_debug_log()
logging.getLogger("meshgate_sync.relay.versions").debug("version=%s", "abc")
logging.getLogger("other").debug("not ours")
"""


def test_an_agent_has_the_address_at_which_others_reach_it(tmp_path: Path) -> None:
    agent = HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home"), advertise="10.1.2.3")
    try:
        assert agent.address[0] == "10.1.2.3"
        with socket.create_connection(("127.0.0.1", agent.address[1]), timeout=10):
            agent.configure(Routes((GATEWAY,), ()), {GATEWAY: ("127.0.0.1", 1)})
    finally:
        agent.stop()
        agent.stop()


def test_an_agent_that_cannot_listen_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home"), port=taken.getsockname()[1])
    assert list((tmp_path / "home" / "work").iterdir()) != []
    HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home")).stop()


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/home"):
        HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "file" / "home"))


def test_the_pins_of_an_agent_end_with_it(tmp_path: Path) -> None:
    agent = HostAgent("h", secret=b"s", owner="driver", home=str(tmp_path / "home"))
    agent._store.snapshots.pin("driver", b"r" * 32)
    agent.stop()
    assert list((tmp_path / "home" / "pins").iterdir()) == []


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    log = logging.getLogger("meshgate_sync")
    before = log.level
    yield
    log.setLevel(before)


def stderr(**environment: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**variables, "PYTHONPATH": SOURCES, **environment},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stderr


def test_a_bare_process_is_silent_unless_debug_is_enabled() -> None:
    assert stderr() == ""
    assert stderr(MESHGATE_LOG_LEVEL="info") == ""


def test_a_bare_process_logs_each_line_once_to_stderr() -> None:
    (line,) = stderr(MESHGATE_LOG_LEVEL="DEBUG").splitlines()
    assert line.endswith(" DEBUG meshgate_sync.relay.versions: version=abc")


def test_a_process_that_configured_its_logging_keeps_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "debug")
    log = logging.getLogger("meshgate_sync")
    assert log.hasHandlers()
    enable_debug_log()
    assert log.handlers == []
    assert log.getEffectiveLevel() == logging.DEBUG


def test_it_answers_each_line_and_ends_with_its_input(tmp_path: Path) -> None:
    first = {"name": "h", "secret": "00", "owner": "o", "home": str(tmp_path / "home")}
    second = {"routes": {"control": [GATEWAY], "stripes": [[GATEWAY]]}, "addresses": {GATEWAY: ["127.0.0.1", 1]}}
    out = io.StringIO()
    main(io.StringIO(f"{json.dumps(first)}\n{json.dumps(second)}\n"), out)
    address, configured = (json.loads(line) for line in out.getvalue().splitlines())
    assert address["address"][0] == "127.0.0.1"
    assert configured == {"configured": True}


def test_an_unused_store_is_closed_when_the_input_ends_early(tmp_path: Path) -> None:
    first = {"name": "h", "secret": "00", "owner": "o", "home": str(tmp_path / "home")}
    for _ in range(2):  # a store that was left open would keep its place from the second
        out = io.StringIO()
        main(io.StringIO(f"{json.dumps(first)}\n"), out)
        assert json.loads(out.getvalue())["home"] == str(tmp_path / "home")

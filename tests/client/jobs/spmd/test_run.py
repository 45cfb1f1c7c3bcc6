"""Restarts of a run, decided without hosts; tests/end_to_end/test_spmd.py runs scripts on hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import SPMDFailed, SupervisionError
from meshgate.jobs.spmd import run
from meshgate.jobs.spmd.torchrun import TorchrunCommand

PROGRAM = run.Program("script", "train.py", ())


class Hosts:
    """Two hosts that are lost until they have been waited for, and for ever if they are not replaced."""

    def __init__(self, events: list[str], *, replaced: bool) -> None:
        self.initialized = SimpleNamespace(get=self._wait)
        self._events, self._replaced = events, replaced

    def __len__(self) -> int:
        return 2

    def _wait(self) -> None:
        self._events.append("waited")
        if not self._replaced:
            raise SupervisionError("host 1 was lost")


def run_twice(monkeypatch: pytest.MonkeyPatch, events: list[str], *, replaced: bool) -> None:
    """Runs a command with one restart. Its first attempt fails."""

    def attempt(hosts: object, processes: int, command: object, program: object, restart: int, *_: object) -> Any:
        events.append(f"attempt {restart}")
        return SPMDFailed("rank 1 was lost", rank=1, host="host 1") if restart == 0 else None

    monkeypatch.setattr(run, "_attempt", attempt)
    command = TorchrunCommand("script", "train.py", max_restarts=1)
    run.run_command(Hosts(events, replaced=replaced), command, PROGRAM)  # type: ignore[arg-type]


def test_a_restart_waits_until_lost_hosts_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    run_twice(monkeypatch, events, replaced=True)
    assert events == ["attempt 0", "waited", "attempt 1"]


def test_a_run_whose_hosts_are_not_replaced_fails_as_its_last_attempt_did(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with pytest.raises(SPMDFailed, match="rank 1 was lost") as failed:
        run_twice(monkeypatch, events, replaced=False)
    assert isinstance(failed.value.__cause__, SupervisionError)
    assert events == ["attempt 0", "waited"]

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from meshgate.jobs.this_machine import process_identity
from meshgate.jobs.this_machine.process_identity import ProcessIdentity, find_marked, identify_process, kill_marked

VARIABLE = "MESHGATE_TEST_MARK"
WAIT = "import sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its input is closed."""
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as process:
        yield process


def identify(pid: int) -> ProcessIdentity:
    process = identify_process(pid)
    assert process is not None
    return process


def test_a_process_keeps_its_identity_while_it_runs(child: subprocess.Popen[bytes]) -> None:
    assert identify(child.pid) == identify(child.pid)
    assert identify(child.pid).alive
    assert identify(child.pid) != identify(os.getpid())


def test_a_zombie_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = identify(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive
    assert identify_process(child.pid) is None
    assert process.wait_ended(0)


def test_a_process_with_a_reused_pid_is_not_signalled(child: subprocess.Popen[bytes]) -> None:
    ended = ProcessIdentity(child.pid, "another boot/1")
    assert not ended.alive
    ended.signal(signal.SIGKILL)
    assert ended.wait_ended(0)
    assert child.poll() is None


def test_waiting_returns_when_the_process_ends(child: subprocess.Popen[bytes]) -> None:
    process = identify(child.pid)
    assert not process.wait_ended(0)
    process.signal(signal.SIGTERM)
    assert process.wait_ended(30)


def test_marked_processes_are_found_and_killed_in_any_session() -> None:
    value = uuid.uuid4().hex
    forker = "import os, sys; os.fork(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", forker],
        stdin=subprocess.PIPE,
        env={**os.environ, VARIABLE: value},
        start_new_session=True,
    ) as process:
        assert process.pid in {each.pid for each in find_marked(VARIABLE, value)}
        assert kill_marked(VARIABLE, value) in (1, 2)  # the fork may not have happened yet
        assert find_marked(VARIABLE, value) == []
    assert find_marked(VARIABLE, "another value") == []


def test_processes_forked_while_the_first_are_killed_are_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as first,
        subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as forked,
    ):
        found = iter([[identify(first.pid)], [identify(forked.pid)], []])
        monkeypatch.setattr(process_identity, "find_marked", lambda variable, value: next(found))
        assert kill_marked(VARIABLE, "any") == 2
        assert (first.wait(), forked.wait()) == (-signal.SIGKILL, -signal.SIGKILL)

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshgate_processes.identity import ProcessIdentity, identify_process

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

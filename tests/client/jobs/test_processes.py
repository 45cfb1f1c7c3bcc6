from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from meshgate.jobs.processes import ProcessName, end_marked, marked, process_name

VARIABLE = "MESHGATE_TEST_MARK"
WAIT = "import sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input."""
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as process:
        yield process


def named(pid: int) -> ProcessName:
    name = process_name(pid)
    assert name is not None
    return name


def test_a_process_keeps_its_name_while_it_lives(child: subprocess.Popen[bytes]) -> None:
    assert named(child.pid) == named(child.pid)
    assert named(child.pid).alive
    assert named(child.pid) != named(os.getpid())


def test_a_zombie_has_ended(child: subprocess.Popen[bytes]) -> None:
    name = named(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not name.alive
    assert process_name(child.pid) is None
    assert name.wait_ended(0)


def test_a_number_in_other_hands_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    stranger = ProcessName(child.pid, "another boot/1")
    assert not stranger.alive
    stranger.signal(signal.SIGKILL)
    assert stranger.wait_ended(0)
    assert child.poll() is None


def test_waiting_is_over_when_the_process_is(child: subprocess.Popen[bytes]) -> None:
    name = named(child.pid)
    assert not name.wait_ended(0)
    name.signal(signal.SIGTERM)
    assert name.wait_ended(30)


def test_the_marked_are_found_and_killed_in_whatever_session() -> None:
    value = uuid.uuid4().hex
    forker = "import os, sys; os.fork(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", forker],
        stdin=subprocess.PIPE,
        env={**os.environ, VARIABLE: value},
        start_new_session=True,
    ) as process:
        assert process.pid in {name.pid for name in marked(VARIABLE, value)}
        assert end_marked(VARIABLE, value) in (1, 2)  # the fork may not have happened yet
        assert marked(VARIABLE, value) == []
    assert marked(VARIABLE, "another value") == []

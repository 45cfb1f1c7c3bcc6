from __future__ import annotations

import os
import subprocess
import sys
import uuid

from meshgate_worker.descendants import COOKIE_VARIABLE, end_descendants


def started(cookie: str, program: str = "import signal; print(flush=True); signal.pause()") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, COOKIE_VARIABLE: cookie},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def finished(process: subprocess.Popen[bytes]) -> int:
    with process:
        return process.wait(20)


def test_who_carries_the_cookie_is_ended_whatever_its_session() -> None:
    cookie = uuid.uuid4().hex
    processes = [started(cookie) for _ in range(3)]
    assert end_descendants(cookie, 20) == 0
    assert [finished(process) for process in processes] == [-15] * 3


def test_who_does_not_heed_sigterm_is_killed() -> None:
    cookie = uuid.uuid4().hex
    stubborn = started(
        cookie, "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile 1: signal.pause()"
    )
    assert end_descendants(cookie, 0.05) == 1
    assert finished(stubborn) == -9


def test_others_are_left_alone() -> None:
    other = started(uuid.uuid4().hex)
    assert end_descendants(uuid.uuid4().hex, 1) == 0
    assert other.poll() is None
    other.kill()
    finished(other)

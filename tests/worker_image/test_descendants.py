from __future__ import annotations

import os
import subprocess
import sys
import uuid

from meshgate_worker.descendants import COOKIE_VARIABLE, end_descendants


def start(cookie: str, program: str = "import signal; print(flush=True); signal.pause()") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, COOKIE_VARIABLE: cookie},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def wait(process: subprocess.Popen[bytes]) -> int:
    with process:
        return process.wait(20)


def test_processes_with_the_cookie_are_ended_in_any_session() -> None:
    cookie = uuid.uuid4().hex
    processes = [start(cookie) for _ in range(3)]
    assert end_descendants(cookie, 20) == 0
    assert [wait(process) for process in processes] == [-15] * 3


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    cookie = uuid.uuid4().hex
    stubborn = start(
        cookie, "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile 1: signal.pause()"
    )
    assert end_descendants(cookie, 0.05) == 1
    assert wait(stubborn) == -9


def test_other_processes_are_not_signalled() -> None:
    other = start(uuid.uuid4().hex)
    assert end_descendants(uuid.uuid4().hex, 1) == 0
    assert other.poll() is None
    other.kill()
    wait(other)

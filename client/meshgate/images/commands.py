"""Commands of image steps, run on a host: in a group that ends with them, their output passed on as it comes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["StepFailed", "execute", "say"]

LAST_LINES = 20
_LAST_BYTES = 65536

# Ends the process group $1 when the other end of standard input is gone.
_GUARD = 'read _; kill -9 -"$1" 2>/dev/null'


class StepFailed(Exception):
    """A command ended with ``code``."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(code, output)
        self.code = code
        self.output = output


def execute(argv: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
    """Runs a command in a process group of its own, which ends with it, and with this process.

    What it prints is printed here as it comes. Raises StepFailed with the last lines.
    """
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    tail: deque[bytes] = deque()
    assert process.stdout is not None
    reading = threading.Thread(target=_pass_on, args=(process.stdout.fileno(), tail), daemon=True)
    reading.start()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: the group's number stays taken
    finally:
        guard.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        guard.communicate()
    reading.join(5.0)  # a daemon that left the group may hold the pipe
    if not reading.is_alive():
        process.stdout.close()
    if code:
        lines = b"".join(tail)[-_LAST_BYTES:].decode(errors="replace").splitlines()
        raise StepFailed(code if code > 0 else 128 - code, "\n".join(lines[-LAST_LINES:]))


def _pass_on(descriptor: int, tail: deque[bytes]) -> None:
    kept = 0
    while data := os.read(descriptor, 65536):
        _print(data)
        tail.append(data)
        kept += len(data)
        while kept - len(tail[0]) > _LAST_BYTES:
            kept -= len(tail.popleft())


def say(text: str) -> None:
    _print(f"{text}\n".encode())


def _print(data: bytes) -> None:
    sys.stdout.flush()
    while data:
        data = data[os.write(1, data) :]

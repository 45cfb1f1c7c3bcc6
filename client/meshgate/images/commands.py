"""Runs the commands of image steps on a host, in a process group that ends with them, and forwards their output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

TAIL_LINES = 20
_TAIL_BYTES = 65536

# Kills the process group $1 when its standard input is closed.
_GUARD = 'read _; kill -9 -"$1" 2>/dev/null'


class StepFailed(Exception):
    """A command ended with exit code ``code``; ``output`` holds its last lines."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(code, output)
        self.code = code
        self.output = output


def execute(argv: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
    """Runs a command in a new process group, which ends with the command and with this process.

    Prints its output as it comes. Raises StepFailed with the last lines.
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
    reader = threading.Thread(target=_forward_output, args=(process.stdout.fileno(), tail), daemon=True)
    reader.start()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet, so the group id is not reused
    finally:
        guard.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        guard.communicate()
    reader.join(5.0)  # a daemon that left the group may keep the pipe open
    if not reader.is_alive():
        process.stdout.close()
    if code:
        lines = b"".join(tail)[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        raise StepFailed(code if code > 0 else 128 - code, "\n".join(lines[-TAIL_LINES:]))


def _forward_output(descriptor: int, tail: deque[bytes]) -> None:
    kept = 0
    while data := os.read(descriptor, 65536):
        _print(data)
        tail.append(data)
        kept += len(data)
        while kept - len(tail[0]) > _TAIL_BYTES:
            kept -= len(tail.popleft())


def print_line(text: str) -> None:
    _print(f"{text}\n".encode())


def _print(data: bytes) -> None:
    sys.stdout.flush()
    while data:
        data = data[os.write(1, data) :]

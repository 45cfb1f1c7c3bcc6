"""The protocol between the run and a peer: a JSON line requests a method of the peer's driver, a JSON line replies.

This module uses the standard library only, since a peer may run in another environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, end_tree

END_GRACE = 15.0


class PeerFailed(Exception):
    """A request to a peer failed; the message is the peer's."""


def serve(driver: object) -> None:
    """Reads requests from descriptor ``argv[1]`` and replies on descriptor ``argv[2]``, until end of file."""
    request_fd, reply_fd = (int(argument) for argument in sys.argv[1:3])
    with os.fdopen(request_fd) as requests, os.fdopen(reply_fd, "w") as replies:
        for line in requests:
            request = json.loads(line)
            try:
                reply = {"value": getattr(driver, request["method"])(**request["arguments"])}
            except Exception:  # noqa: BLE001 - the run reports it and continues
                reply = {"error": traceback.format_exc()}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


class RunningPeer:
    """A peer's process, with its output in ``log``. The end of the ``with`` ends it and its descendants."""

    def __init__(self, module: str, log: Path, *, python: str = sys.executable) -> None:
        request_fd, self._request_fd = os.pipe()
        self._reply_fd, reply_fd = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, str(request_fd), str(reply_fd)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(request_fd, reply_fd),
            )
        os.close(request_fd)
        os.close(reply_fd)
        self._module, self._log = module, log
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, *, timeout: float = 120.0, **arguments: Any) -> Any:
        """The result of the driver's ``method(**arguments)``. Raises PeerFailed."""
        os.write(self._request_fd, json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")
        reply = json.loads(self._line(time.monotonic() + timeout, method))
        if "error" in reply:
            raise PeerFailed(f"{self._module}.{method}{arguments}: {reply['error']}")
        return reply["value"]

    def _line(self, deadline: float, method: str) -> bytes:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._reply_fd], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._reply_fd, 1 << 20) if readable else b""
            if not more:
                why = "the peer exited" if readable else "timed out"
                raise PeerFailed(f"{self._module}.{method}: {why}. Last lines of {self._log}: {_tail(self._log)}")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def __enter__(self) -> RunningPeer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PeerFailed, OSError):
            self.ask("close", timeout=30.0)
        for descriptor in (self._request_fd, self._reply_fd):
            os.close(descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_GRACE)
        end_tree(self._process, END_GRACE)


def _tail(log: Path) -> str:
    return log.read_bytes()[-2000:].decode(errors="replace")


def leave(code: int = 0, *streams: Sequence[object]) -> None:
    """Exits without the finalization of the interpreter, which takes seconds with Monarch or Ray."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

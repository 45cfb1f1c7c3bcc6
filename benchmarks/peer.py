"""How the run talks to a peer: one JSON line asks for a method of the peer's driver, one JSON line answers.

This module needs the standard library alone: a peer may run in an environment of its own.
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

__all__ = ["PeerFailed", "RunningPeer", "serve"]

END_GRACE = 15.0


class PeerFailed(Exception):
    """A peer could not do what it was asked for; the text is what it said."""


def serve(driver: object) -> None:
    """Answers what comes on descriptor ``argv[1]`` on descriptor ``argv[2]``, until end of file."""
    questions, answers = (int(argument) for argument in sys.argv[1:3])
    with os.fdopen(questions) as asked, os.fdopen(answers, "w") as answered:
        for line in asked:
            question = json.loads(line)
            try:
                answer = {"value": getattr(driver, question["method"])(**question["arguments"])}
            except Exception:  # noqa: BLE001 - the run reports it, and goes on with the others
                answer = {"error": traceback.format_exc()}
            answered.write(json.dumps(answer) + "\n")
            answered.flush()


class RunningPeer:
    """A peer's process. Its output goes to ``log``. Leaving the ``with`` ends it and everything it started."""

    def __init__(self, module: str, log: Path, *, python: str = sys.executable) -> None:
        asked, self._questions = os.pipe()
        self._answers, answered = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, str(asked), str(answered)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(asked, answered),
            )
        os.close(asked)
        os.close(answered)
        self._module, self._log = module, log
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, *, timeout: float = 120.0, **arguments: Any) -> Any:
        """What the driver's ``method(**arguments)`` returns. Raises PeerFailed."""
        os.write(self._questions, json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")
        answer = json.loads(self._line(time.monotonic() + timeout, method))
        if "error" in answer:
            raise PeerFailed(f"{self._module}.{method}{arguments}: {answer['error']}")
        return answer["value"]

    def _line(self, deadline: float, method: str) -> bytes:
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._answers, 1 << 20) if readable else b""
            if not more:
                why = "it ended" if readable else "no answer in time"
                raise PeerFailed(f"{self._module}.{method}: {why}; the end of {self._log}: {_tail(self._log)}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def __enter__(self) -> RunningPeer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PeerFailed, OSError):
            self.ask("close", timeout=30.0)
        for descriptor in (self._questions, self._answers):
            os.close(descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_GRACE)
        end_tree(self._process, END_GRACE)


def _tail(log: Path) -> str:
    return log.read_bytes()[-2000:].decode(errors="replace")


def leave(code: int = 0, *streams: Sequence[object]) -> None:
    """Ends a peer at once: what it started is stopped, and interpreters with Monarch or Ray in them take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

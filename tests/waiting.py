"""Waits for a condition of real processes, for what threads print, or for a coroutine that is a test."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")
DEADLINE = 120.0  # seconds, enough on a machine with ten times more work than processors
TASKS_END = 20.0  # seconds, in which what a test has cancelled or closed ends


def wait_for(condition: Callable[[], T], what: str, timeout: float = DEADLINE) -> T:
    """What ``condition`` returns once it is true. Fails after ``timeout`` seconds, with ``what`` it waited for."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)
    return found


def run_alone(test: Coroutine[Any, Any, None]) -> None:
    """As ``asyncio.run``. Fails if the coroutine leaves a task behind that does not end by itself, such as one that was
    cancelled or whose connection closes."""

    async def run() -> None:
        await test
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(left, timeout=TASKS_END)
        assert not left

    asyncio.run(run())


class Printed:
    """What is printed while ``capsys`` captures it. Its ``readouterr()`` loses what other threads write between its
    reading and its truncation."""

    def __init__(self) -> None:
        self._taken = (0, 0)

    @property
    def out(self) -> str:
        return str(cast("Any", sys.stdout).getvalue())

    @property
    def err(self) -> str:
        return str(cast("Any", sys.stderr).getvalue())

    def take(self) -> tuple[str, str]:
        """What has come since the last call on ``out`` and on ``err``."""
        out, err = self.out, self.err
        taken = out[self._taken[0] :], err[self._taken[1] :]
        self._taken = (len(out), len(err))
        return taken

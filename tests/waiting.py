"""Waits for a condition of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE = 120.0  # seconds, enough on a machine with ten times more work than processors


def wait_for(condition: Callable[[], T], what: str, timeout: float = DEADLINE) -> T:
    """What ``condition`` returns once it is true. Fails after ``timeout`` seconds, with ``what`` it waited for."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)
    return found

"""Failures that no call was there to hear of: told to ``meshgate.unhandled_fault_hook``.

The hook runs on a thread of its own, one failure after the other, so that it may block, call actors or end the
program without holding up the connection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from meshgate.errors import MeshFailure

__all__ = ["default_fault_hook", "fault_hook"]


def default_fault_hook(failure: MeshFailure) -> None:
    """Writes the failure to stderr, with what can be done about it."""
    if sys.stderr is not None:
        sys.stderr.write(
            f"meshgate: {failure}\n"
            "  Slices without these ranks can still be used, and their hosts can be spawned on again. Set "
            "meshgate.unhandled_fault_hook to handle failures yourself.\n"
        )
        sys.stderr.flush()


def fault_hook() -> Callable[[MeshFailure], object]:
    """The hook of this moment: a program assigns to ``meshgate.unhandled_fault_hook``."""
    hook: Callable[[MeshFailure], object] = sys.modules["meshgate"].unhandled_fault_hook
    return hook

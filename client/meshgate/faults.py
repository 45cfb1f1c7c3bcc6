"""Failures that no call was there to hear of: told to ``meshgate.unhandled_fault_hook``.

The hook runs on a thread of its own, one failure after the other, so that it may block, call actors or end the
program without holding up the connection.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from functools import cache

from meshgate.errors import MeshFailure

__all__ = ["default_fault_hook", "tell_fault"]

log = logging.getLogger("meshgate.faults")


def default_fault_hook(failure: MeshFailure) -> None:
    """Writes the failure to stderr, with what can be done about it."""
    stream = sys.stderr
    if stream is not None:
        stream.write(
            f"meshgate: {failure}\n"
            "  Slices without these ranks can still be used, and their hosts can be spawned on again. Set "
            "meshgate.unhandled_fault_hook to handle failures yourself.\n"
        )
        stream.flush()


def tell_fault(failure: MeshFailure) -> None:
    """Has the hook called soon. Never blocks."""
    _queue().put(failure)


@cache
def _queue() -> queue.SimpleQueue[MeshFailure]:
    faults: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    threading.Thread(target=_tell, args=(faults,), name="meshgate-faults", daemon=True).start()
    return faults


def _tell(faults: queue.SimpleQueue[MeshFailure]) -> None:
    while True:
        failure = faults.get()
        try:
            _hook()(failure)
        except Exception:
            log.exception("unhandled_fault_hook failed on: %s", failure)


def _hook() -> Callable[[MeshFailure], object]:
    """The hook of this moment: a program assigns to ``meshgate.unhandled_fault_hook``."""
    hook: Callable[[MeshFailure], object] = sys.modules["meshgate"].unhandled_fault_hook
    return hook

"""Failures that no call was there to hear of: told to ``meshgate.unhandled_fault_hook``.

The hook runs on a thread of its own, one failure after the other, so that it may block, call actors or end the
program without holding up the connection.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meshgate.errors import MeshFailure, ranks_text

__all__ = ["FaultReporter", "default_fault_hook", "fault_hook"]

ALIKE_FOR = 60.0  # seconds for which a failure that looks like one before is told in one line
_HINT = (
    "  Slices without these ranks can still be used, and hosts that are left can be spawned on again. Set "
    "meshgate.unhandled_fault_hook to handle failures yourself.\n"
)


@dataclass(slots=True)
class FaultReporter:
    """Words failures: the first of a kind in full and with what can be done, its like of other ranks in a line."""

    _told: dict[tuple[str, str], float] = field(default_factory=dict)

    def text(self, failure: MeshFailure, now: float) -> str:
        """What to write about ``failure`` at time ``now``, in seconds."""
        kind = (failure.mesh_name, re.sub(r"\d+", "#", failure.reason))
        self._told = {each: when for each, when in self._told.items() if now - when < ALIKE_FOR}
        alike = kind in self._told
        self._told[kind] = now
        if not alike:
            return f"meshgate: {failure}\n{_HINT}"
        hosts = sorted({failure.hosts[rank] for rank in failure.ranks if rank in failure.hosts})
        on = f" on {', '.join(hosts)}" if hosts else ""
        who = ranks_text(failure.ranks) if failure.ranks else "another part"
        return f"meshgate: {who} of mesh {failure.mesh_name!r}{on} failed in the same way\n"


_reporter = FaultReporter()


def default_fault_hook(failure: MeshFailure) -> None:
    """Writes the failure to stderr, with what can be done about it."""
    if sys.stderr is not None:
        sys.stderr.write(_reporter.text(failure, time.monotonic()))
        sys.stderr.flush()


def fault_hook() -> Callable[[MeshFailure], object]:
    """The hook of this moment: a program assigns to ``meshgate.unhandled_fault_hook``."""
    hook: Callable[[MeshFailure], object] = sys.modules["meshgate"].unhandled_fault_hook
    return hook

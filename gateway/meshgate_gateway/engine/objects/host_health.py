"""The health of a host in an attached mesh: its states, the transitions between them, and what users read about each.

::

    AVAILABLE ── lost, a replacement is expected ──> RETURNING ── at a new address ──> RESTARTED
        │                                                │                                │
        └───────── lost for good ──> GONE                └── at its old address ──> UNREACHABLE

A host can be lost in any state, and restart in any. When no host of a mesh is missing any more, the mesh is attached to
again and its hosts are AVAILABLE: Monarch attaches to all hosts of a mesh or to none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class HostState(enum.Enum):
    AVAILABLE = "available"
    RETURNING = "returning"  # it ended, and is expected to restart
    GONE = "gone"  # it ended for good
    RESTARTED = "restarted"  # usable once the mesh is attached to again
    UNREACHABLE = "unreachable"  # restarted at its old address, which Monarch in this process cannot use again


_SENTENCES = {
    HostState.RESTARTED: "the host has restarted; its mesh is usable again once all hosts are back",
    HostState.UNREACHABLE: "the host has restarted at its old address; start a new session to use it",
}


@dataclass(frozen=True, slots=True)
class HostHealth:
    """``reason`` is why the host ended, in the words of the host provider."""

    state: HostState
    reason: str = ""

    def lost(self, reason: str, *, returns: bool) -> HostHealth:
        """The host has ended. ``returns``: its provider restarts or replaces it."""
        return HostHealth(HostState.RETURNING if returns else HostState.GONE, reason)

    def restarted(self, *, same_address: bool) -> HostHealth:
        """The host, or another in its place, is up. ``same_address``: this process has used its address before."""
        return HostHealth(HostState.UNREACHABLE if same_address else HostState.RESTARTED)

    @property
    def available(self) -> bool:
        return self.state is HostState.AVAILABLE

    @property
    def ready_to_attach(self) -> bool:
        """Whether the host does not keep its mesh from being attached to again."""
        return self.state in (HostState.AVAILABLE, HostState.RESTARTED)

    @property
    def permanent(self) -> bool:
        """Whether waiting is pointless: the mesh does not become usable in this session."""
        return self.state in (HostState.GONE, HostState.UNREACHABLE)

    def __str__(self) -> str:
        return _SENTENCES.get(self.state, self.reason)


AVAILABLE = HostHealth(HostState.AVAILABLE)

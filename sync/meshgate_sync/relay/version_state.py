"""The life of one version at a relay: its states, the events that move it, and the only table of transitions.

Everything that affects a version's state is in this file. ``Version.apply`` is the only place that assigns one; an
event that the table does not list for the present state is a defect of the relay and raises InvalidTransition.

Imports nothing but the standard library.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

from ..tree.tree import short
from .frames import Offer


class VersionState(enum.Enum):
    """Of a version at one node."""

    PREPARING = "preparing"
    """The store is working out which pieces it lacks."""
    NEEDS_FULL_DELTA = "needs full delta"
    """The store does not have the base; the full delta was requested from the parent."""
    FETCHING = "fetching"
    """Pieces are missing."""
    FINISHING = "finishing"
    """All pieces are stored; the store is making the snapshot."""
    READY = "ready"
    """Processes can be started from it."""
    FAILED = "failed"
    """The store reported an error; the version is prepared again when it is offered again."""


class VersionEvent(enum.Enum):
    """What happens to a version at one node."""

    PREPARED = "prepared"
    """The store reports which pieces it lacks."""
    BASE_UNKNOWN = "base unknown"
    """The store does not have the base of the delta."""
    FULL_DELTA_OFFERED = "full delta offered"
    """The parent sent the version with a delta that needs no base."""
    COMPLETED = "completed"
    """The last missing piece is stored, or none was missing."""
    FINISHED = "finished"
    """The store made the snapshot."""
    DAMAGED = "damaged"
    """Files that the snapshot needs changed or vanished in the store."""
    PIECES_LOST = "pieces lost"
    """Pieces that a child requested are not in the store, or are corrupt."""
    STORE_FAILED = "store failed"
    """The store could not prepare, store, finish or hold the version."""
    OFFERED_AGAIN = "offered again"
    """The version is offered again after a failure."""


_S, _E = VersionState, VersionEvent

TRANSITIONS: dict[VersionState, dict[VersionEvent, VersionState]] = {
    _S.PREPARING: {
        _E.PREPARED: _S.FETCHING,
        _E.BASE_UNKNOWN: _S.NEEDS_FULL_DELTA,
        _E.STORE_FAILED: _S.FAILED,
    },
    _S.NEEDS_FULL_DELTA: {
        _E.FULL_DELTA_OFFERED: _S.PREPARING,
        _E.STORE_FAILED: _S.FAILED,
    },
    _S.FETCHING: {
        _E.COMPLETED: _S.FINISHING,
        _E.STORE_FAILED: _S.FAILED,
    },
    _S.FINISHING: {
        _E.FINISHED: _S.READY,
        _E.DAMAGED: _S.PREPARING,
        _E.PIECES_LOST: _S.PREPARING,
        _E.STORE_FAILED: _S.FAILED,
    },
    _S.READY: {
        _E.DAMAGED: _S.PREPARING,
        _E.PIECES_LOST: _S.PREPARING,
        _E.STORE_FAILED: _S.FAILED,
    },
    # A step that was running when another one failed may still succeed.
    _S.FAILED: {
        _E.PREPARED: _S.FETCHING,
        _E.BASE_UNKNOWN: _S.NEEDS_FULL_DELTA,
        _E.FINISHED: _S.READY,
        _E.DAMAGED: _S.PREPARING,
        _E.PIECES_LOST: _S.PREPARING,
        _E.STORE_FAILED: _S.FAILED,
        _E.OFFERED_AGAIN: _S.PREPARING,
    },
}


class InvalidTransition(RuntimeError):
    """A defect of the relay: ``event`` is not possible in ``state``."""

    def __init__(self, root: bytes, state: VersionState, event: VersionEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"version {short(root)} is {state.value}: event {event.value!r} is not possible")


@dataclass(slots=True)
class Version:
    """``missing``: pieces that the store lacks, digest to size. ``attempt`` numbers the passes through PREPARING: the
    result of a store command that was issued in an earlier pass is void. ``fetched`` counts pieces that arrived;
    ``restarts`` the passes that damaged or lost content caused. ``held``: processes are about to be started from it."""

    offer: Offer
    attempt: int
    state: VersionState = VersionState.PREPARING
    missing: dict[bytes, int] = field(default_factory=dict)
    fetched: int = 0
    restarts: int = 0
    held: bool = False

    @property
    def root(self) -> bytes:
        return self.offer.root

    @property
    def is_prepared(self) -> bool:
        """Whether it is known which pieces the store lacks."""
        return self.state not in (VersionState.PREPARING, VersionState.NEEDS_FULL_DELTA)

    def apply(self, event: VersionEvent) -> None:
        """Raises InvalidTransition."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise InvalidTransition(self.root, self.state, event)
        self.state = after

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        assert bool(self.missing) == (self.state is VersionState.FETCHING), (self.state, len(self.missing))
        assert all(size > 0 for size in self.missing.values())
        assert not self.offer.inline, "an offer is kept with its pieces"
        assert self.attempt > 0
        assert self.restarts >= 0


# DEBUG lines by which one version can be followed through the whole tree.
#
# ::
#
#     version=d6982182d6f6 node=workers-0 requested peer=gateway pieces=2
#
# Each line has the first 12 hex digits of the version's digest, the node that logs it, what happened, and with whom.


def node_name(name: str) -> str:
    """A node's name as people read it: the gateway's own is empty."""
    return name or "gateway"


class VersionLog:
    """Logs through ``logger`` what happens to versions at ``node``."""

    def __init__(self, logger: logging.Logger, node: str) -> None:
        self._logger = logger
        self._node = node_name(node)

    @property
    def enabled(self) -> bool:
        return self._logger.isEnabledFor(logging.DEBUG)

    def __call__(self, root: bytes, event: str, peer: str | None = None, /, **facts: object) -> None:
        if not self.enabled:
            return
        peers = {} if peer is None else {"peer": node_name(peer)}
        details = "".join(f" {key}={value}" for key, value in {**peers, **facts}.items())
        self._logger.debug("version=%s node=%s %s%s", short(root), self._node, event, details)

"""What a relay knows of one version.

Imports nothing but the standard library.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .frames import Offer

__all__ = ["State", "Version"]


class State(enum.Enum):
    """Of a version on this host."""

    BEGINNING = "the store is looking what it lacks"
    BASELESS = "waiting for the parent to tell the version whole"
    FETCHING = "pieces are missing"
    FINISHING = "the store is making the snapshot"
    READY = "processes can be started from it"
    FAILED = "the disk refused"


@dataclass(slots=True)
class Version:
    """``missing``: pieces by digest and size. ``parked``: what children want of it before that is known;
    ``untold_whole``: who is to be told it whole."""

    offer: Offer
    state: State = State.BEGINNING
    missing: dict[bytes, int] = field(default_factory=dict)
    parked: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    untold_whole: list[str] = field(default_factory=list)
    restarts: int = 0
    held: bool = False

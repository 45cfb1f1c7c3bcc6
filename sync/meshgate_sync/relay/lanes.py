"""Lanes: what a relay requests along each of its routes, and from which parents.

Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ParentLink:
    """A connection to a parent. ``heard_at``: its last message; ``starved``: it waits for pieces itself."""

    heard_at: float
    up: bool = False
    starved: bool = False


@dataclass(slots=True)
class Supplier:
    """A parent from which pieces are requested on one lane. ``received`` bytes since ``since`` are its speed;
    ``progressed_at`` is the time of its last piece."""

    since: float
    progressed_at: float
    requested: dict[bytes, None] = field(default_factory=dict)
    received: int = 0


class Lane:
    """One route and the pieces requested along it. Past the end of the route the lane rests until ``resting_until``;
    ``deferred`` pieces are requested then."""

    def __init__(self, name: str, route: tuple[str, ...]) -> None:
        self.name = name
        self.route = route
        self.position = 0
        self.suppliers: dict[str, Supplier] = {}
        self.resting_until: float | None = None
        self.deferred: dict[bytes, None] = {}

    @property
    def current(self) -> str:
        return self.route[self.position]

    @property
    def idle(self) -> bool:
        """Whether nothing is requested on it and it does not rest."""
        return self.resting_until is None and not any(of.requested for of in self.suppliers.values())

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        assert 0 <= self.position < len(self.route)
        assert self.resting_until is not None or not self.deferred, f"{self.name} defers pieces but does not rest"
        assert self.suppliers.keys() <= set(self.route)


@dataclass(frozen=True, slots=True)
class WantedPiece:
    root: bytes
    size: int
    lane: Lane

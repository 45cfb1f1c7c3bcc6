"""How much longer a living parent may seem silent, for reasons that are this host's own.

What a parent says waits behind pieces, its own and those of others, for this host's link; and processors may be short,
if those of others are as short as this host's, whose ticks come late.

Imports nothing but the standard library.
"""

from __future__ import annotations

from .timing import Timing

__all__ = ["Grace"]

_LATER = 4
_FORGET = 0.9


class Grace:
    """``window``: bytes that each parent may have on their way here."""

    def __init__(self, window: int, timing: Timing) -> None:
        self._window = window
        self._timing = timing
        self._ticked_at: float | None = None
        self._late = 0.0
        self._came = 0
        self._pace = 0.0

    def came(self, size: int) -> None:
        """A piece of ``size`` bytes came."""
        self._came += size

    def missed(self, seconds: float, now: float) -> None:
        """Nothing was read for so long, and this does not count."""
        if self._ticked_at is not None:
            self._ticked_at = min(now, self._ticked_at + seconds)

    def tick(self, now: float, busy: int) -> float:
        """The grace in seconds, while pieces are awaited from ``busy`` sources: twice the time that their windows take
        to come in, and some for ticks that came late."""
        since = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        self._late = max(since - self._timing.pulse, _FORGET * self._late)
        if self._came:
            pace = self._came / max(since, 1e-9)
            self._pace = (self._pace + pace) / 2 if self._pace else pace
            self._came = 0
        late = _LATER * max(self._late - self._timing.pulse, 0.0)
        if not busy:
            return late
        return late + (2 * busy * self._window / self._pace if self._pace else self._timing.stall)

"""How much longer a parent may be silent, for reasons that are this host's own.

A parent's messages queue behind pieces on this host's link, and a host that is short of CPU reads them late: its own
ticks are late too.

Imports nothing but the standard library.
"""

from __future__ import annotations

from .timeouts import Timeouts

_LATE_TICK_FACTOR = 4
_LATE_TICK_DECAY = 0.9


class LivenessAllowance:
    """Seconds to add to the timeouts of parents. ``window``: bytes that each parent may have in flight to this host."""

    def __init__(self, window: int, timeouts: Timeouts) -> None:
        self._window = window
        self._timeouts = timeouts
        self._ticked_at: float | None = None
        self._late = 0.0
        self._received = 0
        self._bytes_per_second = 0.0

    def received(self, size: int) -> None:
        """A piece of ``size`` bytes arrived."""
        self._received += size

    def paused(self, seconds: float, now: float) -> None:
        """Nothing was read for ``seconds``; that time does not count."""
        if self._ticked_at is not None:
            self._ticked_at = min(now, self._ticked_at + seconds)

    def tick(self, now: float, busy: int) -> float:
        """The allowance while ``busy`` parents owe pieces: twice the time in which their windows arrive, plus some for
        ticks that came late."""
        elapsed = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        interval = self._timeouts.busy_heartbeat_interval
        self._late = max(elapsed - interval, _LATE_TICK_DECAY * self._late)
        if self._received:
            rate = self._received / max(elapsed, 1e-9)
            self._bytes_per_second = (self._bytes_per_second + rate) / 2 if self._bytes_per_second else rate
            self._received = 0
        late = _LATE_TICK_FACTOR * max(self._late - interval, 0.0)
        if not busy:
            return late
        if not self._bytes_per_second:
            return late + self._timeouts.stall_timeout
        return late + 2 * busy * self._window / self._bytes_per_second

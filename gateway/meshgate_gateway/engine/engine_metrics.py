"""What an engine counts for the gateway's metrics: calls, syncs, bytes and printed lines.

The counts are sent some seconds after something was counted, not at each scrape: a busy engine delays no scrape, and an
idle one sends nothing.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence

from meshgate_gateway.control import CALL_BOUNDS, SYNC_BOUNDS, EngineCounts, Samples

REPORT_INTERVAL = 5.0  # seconds


class _Durations:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._clear()

    def _clear(self) -> None:
        self._buckets, self._seconds = [0] * (len(self._bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    def take(self) -> Samples:
        """All since the last time."""
        samples = Samples(buckets=tuple(self._buckets), seconds=self._seconds)
        self._clear()
        return samples


class EngineMetrics:
    """Counts, and passes them to ``report``. For use on the event loop.

    The client's connection adds to ``bytes_received`` and ``bytes_sent`` itself.
    """

    def __init__(self, report: Callable[[EngineCounts], object]) -> None:
        self._report = report
        self._loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None  # until the next report
        self._calls, self._syncs = _Durations(CALL_BOUNDS), _Durations(SYNC_BOUNDS)
        self._offered: dict[bytes, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._ok = self._failed = self._casts = self._lines = 0
        self.bytes_received = self.bytes_sent = 0

    # --- what happened ------------------------------------------------------------------------------------

    def call_ended(self, seconds: float, *, failed: bool) -> None:
        self._calls.add(seconds)
        if failed:
            self._failed += 1
        else:
            self._ok += 1
        if self.timer is None:
            self.changed()

    def cast(self) -> None:
        """A call without replies was sent."""
        self._casts += 1
        self.changed()

    def printed(self, lines: int) -> None:
        self._lines += lines
        self.changed()

    def version_offered(self, root: bytes) -> None:
        """The client has sent, or begun to send, a version of the code."""
        self._offered[root] = self._loop.time()

    def version_ready(self, root: bytes) -> None:
        """Every host has it. Only the first time counts: hosts that join later are not a sync."""
        offered = self._offered.pop(root, None)
        if offered is not None:
            self._syncs.add(self._loop.time() - offered)
            self.changed()

    def version_dropped(self, root: bytes) -> None:
        """Some hosts never get it."""
        self._offered.pop(root, None)

    # --- reports ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Reports what is counted so far, for the last time unless more happens."""
        if self.timer is not None:
            self.timer.cancel()
            self._send()

    def changed(self) -> None:
        """Something was counted: it is reported soon."""
        if self.timer is None:
            self.timer = self._loop.call_later(REPORT_INTERVAL, self._send)

    def _send(self) -> None:
        self.timer = None
        counts = EngineCounts(
            calls={"ok": self._ok, "failed": self._failed},
            call_times=self._calls.take(),
            casts=self._casts,
            sync_times=self._syncs.take(),
            bytes_received=self.bytes_received,
            bytes_sent=self.bytes_sent,
            lines=self._lines,
        )
        self._clear()
        self._report(counts)

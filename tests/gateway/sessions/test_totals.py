"""Sums over all sessions."""

from __future__ import annotations

from meshgate_gateway.control.counts import SYNC_BOUNDS, EngineCounts, Samples
from meshgate_gateway.sessions.totals import Totals


def test_counts_of_all_engines_add_up() -> None:
    totals = Totals()
    syncs = Samples(buckets=(1,) + (0,) * (len(SYNC_BOUNDS) - 1) + (2,), seconds=1.5)
    for _ in range(2):
        totals.add(EngineCounts(calls={"ok": 3, "failed": 1}, casts=5, sync_times=syncs, bytes_sent=7, lines=9))
    assert totals.calls == {"ok": 6, "failed": 2}
    assert (totals.casts, totals.bytes_sent, totals.bytes_received, totals.lines) == (10, 14, 0, 18)
    assert (totals.sync_times.buckets[0], totals.sync_times.buckets[-1], totals.sync_times.seconds) == (2, 4, 3.0)
    assert sum(totals.call_times.buckets) == 0


def test_more_buckets_than_known_are_ignored() -> None:
    totals = Totals()
    totals.add(EngineCounts(call_times=Samples(buckets=(1,) * 100)))
    assert sum(totals.call_times.buckets) == len(totals.call_times.buckets)

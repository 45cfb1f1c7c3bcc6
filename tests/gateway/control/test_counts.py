"""The bounds that engines and the server share."""

from __future__ import annotations

import pytest

from meshgate_gateway.control.channel import MAX_MESSAGE
from meshgate_gateway.control.counts import CALL_BOUNDS, SYNC_BOUNDS, EngineCounts, Samples


@pytest.mark.parametrize("bounds", [CALL_BOUNDS, SYNC_BOUNDS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_largest_counts_fit_into_a_control_message() -> None:
    most = 10**30
    samples = Samples(buckets=(most,) * (len(CALL_BOUNDS) + 1), seconds=float(most))
    counts = EngineCounts(
        calls={"ok": most, "failed": most}, call_times=samples, sync_times=samples, bytes_sent=most, lines=most
    )
    assert len(counts.model_dump_json()) < MAX_MESSAGE

from __future__ import annotations

import pytest

from meshgate_sync.relay.liveness import LivenessAllowance
from meshgate_sync.relay.timeouts import Timeouts

TIMEOUTS = Timeouts()
INTERVAL = TIMEOUTS.busy_heartbeat_interval


def ticking(until: float, start: float = 0.0) -> list[float]:
    count = round((until - start) / INTERVAL)
    return [start + number * INTERVAL for number in range(1, count + 1)]


def test_an_idle_host_that_ticks_in_time_gets_no_allowance() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    assert [allowance.tick(now, 0) for now in ticking(1.0)] == [0.0] * 20


def test_before_the_first_piece_a_busy_parent_may_take_the_stall_timeout() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 0)
    assert allowance.tick(INTERVAL, 1) == TIMEOUTS.stall_timeout


def test_a_busy_parent_may_take_twice_the_time_of_the_windows_before_it() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 1)
    allowance.received(500)  # in one interval: 10,000 bytes a second
    assert allowance.tick(INTERVAL, 1) == pytest.approx(2 * 1000 / 10_000)
    assert allowance.tick(2 * INTERVAL, 3) == pytest.approx(3 * 2 * 1000 / 10_000)


def test_the_rate_follows_what_arrives() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 1)
    allowance.received(500)
    allowance.tick(INTERVAL, 1)
    allowance.received(250)
    assert allowance.tick(2 * INTERVAL, 1) == pytest.approx(2 * 1000 / 7_500)


def test_late_ticks_extend_the_allowance_and_are_forgotten() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.tick(0.0, 0)
    late = allowance.tick(1.0, 0)
    assert late == pytest.approx(4 * (1.0 - 2 * INTERVAL))
    after = [allowance.tick(now, 0) for now in ticking(4.0, start=1.0)]
    assert after == sorted(after, reverse=True)
    assert after[0] < late
    assert after[-1] == 0.0


def test_a_pause_is_not_a_late_tick() -> None:
    allowance = LivenessAllowance(1000, TIMEOUTS)
    allowance.paused(5.0, 5.0)
    allowance.tick(5.0, 0)
    allowance.paused(30.0, 35.0)
    assert allowance.tick(35.0 + INTERVAL, 0) == 0.0

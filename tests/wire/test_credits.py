"""The receiver bounds what the peer sends on each stream, and grants it more."""

from __future__ import annotations

import pytest

from meshgate_wire import LimitExceeded, ProtocolError
from meshgate_wire.credits import ReceiveWindows


def windows(window: int = 1000, max_tracked: int = 16_000) -> ReceiveWindows:
    return ReceiveWindows(window, max_tracked)


def test_a_stream_may_send_one_window() -> None:
    credits = windows()
    credits.take(1, 1000)
    with pytest.raises(ProtocolError, match="sent 1 bytes on stream 1, but had credit for 0"):
        credits.take(1, 1)
    credits.take(2, 1000)
    credits.validate_state()


def test_grants_are_collected_up_to_a_quarter_of_the_window() -> None:
    credits = windows()
    credits.take(1, 249)
    assert not credits.due
    credits.take(1, 1)
    assert credits.due
    credits.validate_state()
    assert credits.grants(10) == [(1, 250)]
    assert not credits.due
    assert len(credits) == 0


def test_held_bytes_are_granted_when_they_are_released() -> None:
    credits = windows()
    credits.take(1, 600)
    credits.hold(1, 600)
    assert not credits.due
    assert credits.held == 600
    credits.take(1, 400)
    credits.hold(1, 400)
    credits.validate_state()
    credits.release(1, 600)
    assert credits.grants(10) == [(1, 600)]
    credits.release(1, 400)
    assert credits.grants(10) == [(1, 400)]
    assert len(credits) == 0


def test_a_small_message_that_is_held_leaves_the_rest_due() -> None:
    credits = windows()
    credits.take(1, 600)
    credits.hold(1, 100)
    assert credits.grants(10) == [(1, 500)]
    credits.validate_state()


def test_a_message_larger_than_the_window_closes_it_until_it_is_released() -> None:
    credits = windows()
    for _ in range(5):
        credits.take(1, 600)
        assert credits.grants(10) == [(1, 600)]
    credits.take(1, 600)
    credits.hold(1, 3600)
    assert not credits.due
    credits.take(1, 400)
    credits.hold(1, 400)
    credits.release(1, 3600)
    assert credits.grants(10) == [(1, 600)]
    credits.validate_state()


def test_a_message_that_has_begun_can_be_finished_whatever_is_held() -> None:
    credits = windows()
    credits.take(1, 900)
    credits.hold(1, 900)
    assert credits.take(1, 50) == 900
    credits.expect(1, 50)
    assert not credits.due  # the peer has credit for it
    credits.take(1, 40)
    credits.expect(1, 200)
    credits.validate_state()
    assert credits.grants(10) == [(1, 190)]
    credits.take(1, 200)
    credits.hold(1, 290)
    credits.validate_state()
    assert not credits.due  # and for nothing else
    credits.release(1, 1190)
    assert credits.grants(10) == [(1, 1000)]


def test_a_large_message_is_finished_with_half_a_window_at_a_time() -> None:
    credits = windows()
    credits.take(1, 1000)
    credits.hold(1, 500)
    assert credits.grants(10) == [(1, 500)]
    credits.hold(1, 5000)
    credits.take(1, 250)
    credits.expect(1, 3000)
    assert not credits.due
    credits.take(1, 1)
    credits.expect(1, 2999)
    credits.take(1, 9)
    credits.expect(1, 2990)
    credits.validate_state()
    assert credits.grants(10) == [(1, 260)]
    credits.validate_state()


def test_a_small_release_causes_no_grant() -> None:
    credits = windows()
    credits.take(1, 300)
    credits.hold(1, 300)
    credits.release(1, 100)
    assert not credits.due
    credits.release(1, 200)
    assert credits.grants(10) == [(1, 300)]


def test_grants_are_in_order_and_limited_in_number() -> None:
    credits = windows()
    for stream in (3, 1, 2):
        credits.take(stream, 500)
    assert credits.grants(2) == [(3, 500), (1, 500)]
    assert credits.grants(2) == [(2, 500)]
    assert credits.grants(2) == []


def test_small_amounts_on_many_streams_are_granted() -> None:
    credits = windows(max_tracked=160)
    credits.take(100, 300)
    credits.hold(100, 300)
    for stream in range(10):
        credits.take(stream, 1)
    assert credits.due
    credits.validate_state()
    assert credits.grants(100) == [(stream, 1) for stream in range(9)]
    assert len(credits) == 2


def test_the_number_of_tracked_streams_is_limited() -> None:
    credits = windows(max_tracked=20)
    for stream in range(20):
        credits.take(stream, 1)
    with pytest.raises(
        LimitExceeded, match="sent 21 streams whose window is not fully open, but this side's limit is 20"
    ):
        credits.take(20, 1)

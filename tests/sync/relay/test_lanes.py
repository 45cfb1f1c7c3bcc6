from __future__ import annotations

import pytest

from meshgate_sync.relay.lanes import Lane, Supplier

DIGEST = b"d" * 32


def lane() -> Lane:
    return Lane("stripe 0", ("a", "b", ""))


def test_a_lane_starts_idle_with_the_first_parent_of_its_route() -> None:
    made = lane()
    assert (made.current, made.idle) == ("a", True)
    made.validate_state()


def test_a_lane_that_requests_or_rests_is_not_idle() -> None:
    made = lane()
    made.suppliers["a"] = Supplier(0.0, 0.0)
    assert made.idle
    made.suppliers["a"].requested[DIGEST] = None
    assert not made.idle
    resting = lane()
    resting.resting_until = 1.0
    assert not resting.idle


def test_pieces_are_deferred_only_while_a_lane_rests() -> None:
    made = lane()
    made.resting_until = 1.0
    made.deferred[DIGEST] = None
    made.validate_state()
    made.resting_until = None
    with pytest.raises(AssertionError, match="does not rest"):
        made.validate_state()


def test_a_supplier_is_on_the_route() -> None:
    made = lane()
    made.suppliers["stranger"] = Supplier(0.0, 0.0)
    with pytest.raises(AssertionError):
        made.validate_state()

from __future__ import annotations

import pytest

from meshgate_sync.relay.pending_requests import PendingRequests, Requests

ONE, OTHER = b"1" * 32, b"2" * 32


def test_requests_are_taken_once_in_the_order_they_arrived() -> None:
    pending = PendingRequests()
    pending.add_pieces(ONE, "a", (b"x", b"y"))
    pending.add_full_delta(ONE, "b")
    pending.add_pieces(OTHER, "c", (b"z",))
    pending.add_pieces(ONE, "b", (b"x",))
    assert pending.take(ONE) == Requests([("a", (b"x", b"y")), ("b", (b"x",))], ["b"])
    assert pending.take(ONE) == Requests()
    assert pending.take(OTHER) == Requests([("c", (b"z",))])


def test_requests_of_a_withdrawn_version_are_discarded() -> None:
    pending = PendingRequests()
    pending.add_full_delta(ONE, "a")
    pending.discard(ONE)
    pending.discard(OTHER)
    assert pending.take(ONE) == Requests()


def test_requests_that_could_be_answered_are_a_defect() -> None:
    pending = PendingRequests()
    pending.add_full_delta(ONE, "a")
    pending.validate_state([OTHER])
    with pytest.raises(AssertionError, match="can be answered"):
        pending.validate_state([ONE, OTHER])

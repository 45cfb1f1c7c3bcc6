from __future__ import annotations

from meshgate_sync.relay.request_window import RequestWindow

ONE, OTHER = b"1" * 32, b"2" * 32
PIECES = {b"%d" % number: 10 for number in range(8)}


def test_more_is_requested_once_half_of_the_window_has_arrived() -> None:
    window = RequestWindow(40)
    window.add(ONE, PIECES)
    assert window.take() == [(ONE, (b"0", b"1", b"2", b"3"))]
    window.arrived(b"2")
    assert window.take() == []
    window.arrived(b"0")
    assert window.take() == [(ONE, (b"4", b"5"))]
    for digest in PIECES:
        window.arrived(digest)
    assert window.take() == []


def test_a_piece_that_arrived_for_one_version_is_not_requested_for_another() -> None:
    window = RequestWindow(20)
    window.add(ONE, PIECES)
    window.add(OTHER, {b"7": 10, b"6": 10, b"new": 10})
    window.arrived(b"6")
    assert window.take() == [(ONE, (b"0", b"1")), (OTHER, (b"7", b"new"))]


def test_a_version_whose_pieces_never_arrive_delays_no_other() -> None:
    window = RequestWindow(20)
    window.add(ONE, PIECES)
    assert window.take()
    window.add(OTHER, {b"other": 10})
    assert window.take() == [(OTHER, (b"other",))]
    window.forget(ONE)
    for digest in PIECES:
        window.arrived(digest)
    assert window.take() == []

"""Sent frames are kept until they are acknowledged, and replayed on a new connection."""

from __future__ import annotations

import pytest

from meshgate_wire import ProtocolError
from meshgate_wire.retransmission import Frame, Unacknowledged


def frame(name: str) -> Frame:
    return Frame(len(name), (name.encode(),))


def kept(*names: str) -> Unacknowledged:
    sent = Unacknowledged()
    for name in names:
        sent.keep(frame(name))
    sent.validate_state()
    return sent


def replayed(sent: Unacknowledged, max_bytes: int = 1000) -> list[str]:
    names = []
    while (again := sent.next_replayed(max_bytes, at_least_one=False)) is not None:
        names.append(again.pieces[0].tobytes() if isinstance(again.pieces[0], memoryview) else again.pieces[0])
        sent.validate_state()
    return [name.decode() for name in names]


def test_frames_are_kept_until_they_are_acknowledged() -> None:
    sent = kept("one", "two", "three")
    assert (sent.nbytes, len(sent)) == (11, 3)
    sent.acknowledge(2)
    assert (sent.nbytes, len(sent), sent.acknowledged) == (5, 1, 2)
    sent.acknowledge(2)
    sent.acknowledge(3)
    assert (sent.nbytes, len(sent)) == (0, 0)


@pytest.mark.parametrize("number", [-1, 0, 4, 2**62])
def test_an_acknowledgement_out_of_range_is_rejected(number: int) -> None:
    sent = kept("one", "two", "three")
    sent.acknowledge(1)
    with pytest.raises(ProtocolError, match="not between the last acknowledged frame 1 and the last sent frame 3"):
        sent.acknowledge(number)
    sent.validate_state()


def test_a_rewind_replays_missing_frames_in_order() -> None:
    sent = kept("one", "two", "three", "four")
    sent.acknowledge(1)
    sent.rewind(2)
    assert sent.replay
    assert replayed(sent) == ["three", "four"]
    assert not sent.replay
    assert sent.sent == sent.last == 4


def test_a_frame_cannot_be_acknowledged_before_its_replay() -> None:
    sent = kept("one", "two", "three")
    sent.rewind(0)
    sent.next_replayed(1000, at_least_one=False)
    sent.acknowledge(1)
    with pytest.raises(ProtocolError, match="and the last sent frame 1"):
        sent.acknowledge(2)


def test_replayed_frames_must_fit_unless_at_least_one_is_required() -> None:
    sent = kept("one", "eleven bytes", "two")
    sent.rewind(0)
    assert replayed(sent, max_bytes=5) == ["one"]
    large = sent.next_replayed(5, at_least_one=True)
    assert large is not None
    assert large.nbytes == 12
    assert replayed(sent, max_bytes=5) == ["two"]


def test_a_replay_ends_with_the_connection() -> None:
    sent = kept("one", "two")
    sent.rewind(0)
    sent.stop_replay()
    assert not sent.replay
    sent.rewind(1)
    assert replayed(sent) == ["two"]


def test_new_frames_follow_replayed_ones() -> None:
    sent = kept("one")
    sent.rewind(0)
    assert replayed(sent) == ["one"]
    sent.keep(frame("two"))
    assert (sent.sent, sent.last) == (2, 2)

"""The order in which frames are sent, and how long they are kept to be sent again."""

from __future__ import annotations

import pytest

from meshgate_wire import Limits, ProtocolError
from meshgate_wire.frames import (
    FIRST,
    FRAME_HEADER_BYTES,
    LAST,
    PeerLimits,
    encode_frame_header,
    read_frame_header,
)
from meshgate_wire.outbox import Frame, LargeMessage, Outbox, Unacknowledged, coalesce
from tests.wire.channel import KIB, pattern

CHUNK = 8 * KIB


def outbox(*, connected: bool = True, **limits: int) -> Outbox:
    box = Outbox(Limits(chunk=CHUNK))
    if connected:
        box.set_peer_limits(PeerLimits.of(Limits(**limits)))
    return box


def small(box: Outbox, stream: int, size: int = 100) -> None:
    box.put(stream, encode_frame_header(FIRST | LAST, stream, size) + bytes(size))


def large(box: Outbox, stream: int, size: int) -> None:
    box.put(stream, LargeMessage([pattern(size)], size))


def frames(box: Outbox, max_bytes: int = 2**20) -> list[tuple[int, int, int]]:
    """The flags, stream and payload size of every frame that can be sent."""
    out = []
    while (frame := box.next_frame(max_bytes, at_least_one=True)) is not None:
        box.validate_state()
        data = b"".join(frame.pieces)
        out.append(read_frame_header(data, 0))
        assert len(data) == frame.nbytes == out[-1][2] + FRAME_HEADER_BYTES
    return out


def streams(box: Outbox) -> list[int]:
    return [stream for _, stream, _ in frames(box)]


def test_a_large_message_is_sent_in_chunks() -> None:
    box = outbox()
    large(box, 1, 2 * CHUNK + 1)
    assert frames(box) == [(FIRST, 1, CHUNK), (0, 1, CHUNK), (LAST, 1, 1)]
    assert box.nbytes == 0


def test_queued_bytes_are_counted_for_each_stream() -> None:
    box = outbox()
    large(box, 1, 3 * CHUNK)
    small(box, 1)
    small(box, 2)
    assert (box.queued_on(1), box.queued_on(2), box.queued_on(3)) == (3 * CHUNK + 100, 100, 0)
    frames(box)
    assert (box.queued_on(1), box.queued_on(2)) == (0, 0)


def test_streams_take_turns() -> None:
    box = outbox()
    for stream in (1, 2, 3):
        large(box, stream, 2 * CHUNK)
    assert streams(box) == [1, 2, 3, 1, 2, 3]


def test_messages_of_one_stream_are_sent_in_order() -> None:
    box = outbox()
    large(box, 1, 2 * CHUNK)
    small(box, 1)
    large(box, 1, CHUNK)
    assert [flags for flags, _, _ in frames(box)] == [FIRST, LAST, FIRST | LAST, FIRST | LAST]


def test_a_small_message_is_sent_before_large_ones() -> None:
    box = outbox()
    large(box, 1, 4 * CHUNK)
    large(box, 2, 4 * CHUNK)
    box.next_frame(2**20, at_least_one=True)
    small(box, 3)
    assert streams(box)[0] == 3


def test_small_messages_of_the_size_of_a_chunk_are_followed_by_a_chunk() -> None:
    box = outbox()
    large(box, 1, 2 * CHUNK)
    for stream in range(100, 130):
        small(box, stream, KIB)
    order = streams(box)
    assert order.index(1) == 8
    assert order.index(1, 9) == 17
    assert len(order) == 32


def test_a_stream_without_credit_does_not_block_others() -> None:
    box = outbox(window=256 * KIB)
    for _ in range(5):
        small(box, 1, 64 * KIB)
    large(box, 2, 300 * KIB)
    small(box, 3)
    order = frames(box)
    assert [stream for _, stream, _ in order].count(1) == 4
    assert sum(size for _, stream, size in order if stream == 2) == 256 * KIB
    box.grant(1, 64 * KIB)
    box.grant(2, 44 * KIB)
    assert [stream for _, stream, _ in frames(box)] == [1, 2, 2, 2, 2, 2, 2]
    assert box.nbytes == 0


def test_a_large_message_waits_for_credit_for_a_full_chunk() -> None:
    box = outbox(window=256 * KIB)
    large(box, 1, 300 * KIB)
    frames(box)
    box.grant(1, CHUNK - 1)
    assert frames(box) == []
    box.grant(1, 1)
    assert frames(box) == [(0, 1, CHUNK)]


def test_a_grant_to_a_waiting_stream_may_be_too_small() -> None:
    box = outbox(window=256 * KIB)
    for _ in range(5):
        small(box, 1, 64 * KIB)
    frames(box)
    box.grant(1, 64 * KIB - 1)
    assert frames(box) == []


def test_a_frame_must_fit_unless_at_least_one_is_required() -> None:
    box = outbox()
    small(box, 1)
    assert box.next_frame(112, at_least_one=False) is None
    assert box.next_frame(113, at_least_one=False) is not None
    large(box, 1, CHUNK)
    assert box.next_frame(CHUNK + 12, at_least_one=False) is None
    assert box.next_frame(0, at_least_one=True) is not None
    assert box.next_frame(2**20, at_least_one=True) is None


def test_only_small_messages_are_sent_before_the_peers_hello() -> None:
    box = outbox(connected=False)
    large(box, 1, 100 * KIB)
    small(box, 1)
    small(box, 2)
    assert streams(box) == [2]
    box.set_peer_limits(PeerLimits.of(Limits()))
    assert streams(box) == [1] * 14


def test_chunks_do_not_exceed_the_peers_frames() -> None:
    box = Outbox(Limits(chunk=512 * KIB))
    box.set_peer_limits(PeerLimits.of(Limits(max_frame=64 * KIB)))
    large(box, 1, 128 * KIB)
    assert [size for _, _, size in frames(box)] == [64 * KIB, 64 * KIB]


def test_the_number_of_large_messages_in_progress_is_limited() -> None:
    box = outbox(max_partial_messages=2)
    for stream in (1, 2, 3):
        large(box, stream, 2 * CHUNK)
    assert streams(box) == [1, 2, 1, 2, 3, 3]


@pytest.mark.parametrize(("stream", "amount"), [(1, 101), (1, 0), (2, 1), (2, 0)])
def test_a_grant_may_not_exceed_the_window(stream: int, amount: int) -> None:
    box = outbox()
    small(box, 1)
    frames(box)
    with pytest.raises(ProtocolError, match=f"granted {amount} bytes on stream {stream}"):
        box.grant(stream, amount)


def test_a_stream_with_an_open_window_is_forgotten() -> None:
    box = outbox()
    small(box, 1)
    frames(box)
    box.grant(1, 50)
    assert box.streams == 1
    box.grant(1, 50)
    assert box.streams == 0


def test_a_grant_to_a_stream_that_still_sends_keeps_its_turn() -> None:
    box = outbox()
    large(box, 1, 2 * CHUNK)
    box.next_frame(2**20, at_least_one=True)
    box.grant(1, CHUNK)
    assert frames(box) == [(LAST, 1, CHUNK)]


def test_adjacent_small_pieces_are_joined_and_large_ones_are_kept() -> None:
    large = bytes(4096)
    joined = coalesce([b"a", b"", memoryview(b"b"), large, b"", b"c"])
    assert joined == [b"ab", large, b"c"]
    assert joined[1] is large


def test_the_pieces_of_a_message_are_split_at_frame_boundaries() -> None:
    message = LargeMessage([b"abc", memoryview(b"defgh"), b"i"], 9)
    taken = [b"".join(message.take(size)) for size in (2, 5, 2)]
    assert taken == [b"ab", b"cdefg", b"hi"]
    assert message.remaining == 0


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

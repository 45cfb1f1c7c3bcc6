from __future__ import annotations

import pytest

from meshgate_wire import Limits, ProtocolError
from meshgate_wire.frames import FIRST, FRAME_HEADER_BYTES, LAST, PeerLimits, encode_frame_header, read_frame_header
from meshgate_wire.outbox import Bulk, Outbox, coalesce
from tests.wire.channel import KIB, pattern

CHUNK = 8 * KIB


def outbox(*, greeted: bool = True, **limits: int) -> Outbox:
    box = Outbox(Limits(chunk=CHUNK))
    if greeted:
        box.peer_allows(PeerLimits.of(Limits(**limits)))
    return box


def small(box: Outbox, stream: int, size: int = 100) -> None:
    box.put_frame(stream, encode_frame_header(FIRST | LAST, stream, size) + bytes(size))


def bulk(box: Outbox, stream: int, size: int) -> None:
    box.put_bulk(stream, Bulk([pattern(size)], size))


def leaving(box: Outbox, room: int = 2**20) -> list[tuple[int, int, int]]:
    """Every frame that leaves: flags, stream, payload size."""
    out = []
    while (frame := box.next_frame(room, at_least_one=True)) is not None:
        box.validate_state()
        data = b"".join(frame.pieces)
        out.append(read_frame_header(data, 0))
        assert len(data) == frame.nbytes == out[-1][2] + FRAME_HEADER_BYTES
    return out


def streams(box: Outbox) -> list[int]:
    return [stream for _, stream, _ in leaving(box)]


def test_a_large_message_leaves_in_chunks() -> None:
    box = outbox()
    bulk(box, 1, 2 * CHUNK + 1)
    assert leaving(box) == [(FIRST, 1, CHUNK), (0, 1, CHUNK), (LAST, 1, 1)]
    assert box.nbytes == 0


def test_what_is_queued_is_told_for_each_stream() -> None:
    box = outbox()
    bulk(box, 1, 3 * CHUNK)
    small(box, 1)
    small(box, 2)
    assert (box.queued_on(1), box.queued_on(2), box.queued_on(3)) == (3 * CHUNK + 100, 100, 0)
    leaving(box)
    assert (box.queued_on(1), box.queued_on(2)) == (0, 0)


def test_streams_take_turns() -> None:
    box = outbox()
    for stream in (1, 2, 3):
        bulk(box, stream, 2 * CHUNK)
    assert streams(box) == [1, 2, 3, 1, 2, 3]


def test_messages_of_one_stream_leave_in_order() -> None:
    box = outbox()
    bulk(box, 1, 2 * CHUNK)
    small(box, 1)
    bulk(box, 1, CHUNK)
    assert [flags for flags, _, _ in leaving(box)] == [FIRST, LAST, FIRST | LAST, FIRST | LAST]


def test_a_small_message_goes_before_large_ones() -> None:
    box = outbox()
    bulk(box, 1, 4 * CHUNK)
    bulk(box, 2, 4 * CHUNK)
    box.next_frame(2**20, at_least_one=True)
    small(box, 3)
    assert streams(box)[0] == 3


def test_after_a_chunks_worth_of_small_messages_a_large_one_has_its_turn() -> None:
    box = outbox()
    bulk(box, 1, 2 * CHUNK)
    for stream in range(100, 130):
        small(box, stream, KIB)
    order = streams(box)
    assert order.index(1) == 8
    assert order.index(1, 9) == 17
    assert len(order) == 32


def test_a_stream_without_credit_holds_up_nobody() -> None:
    box = outbox(window=256 * KIB)
    for _ in range(5):
        small(box, 1, 64 * KIB)
    bulk(box, 2, 300 * KIB)
    small(box, 3)
    order = leaving(box)
    assert [stream for _, stream, _ in order].count(1) == 4
    assert sum(size for _, stream, size in order if stream == 2) == 256 * KIB
    box.grant(1, 64 * KIB)
    box.grant(2, 44 * KIB)
    assert [stream for _, stream, _ in leaving(box)] == [1, 2, 2, 2, 2, 2, 2]
    assert box.nbytes == 0


def test_a_large_message_waits_for_credit_rather_than_leave_in_crumbs() -> None:
    box = outbox(window=256 * KIB)
    bulk(box, 1, 300 * KIB)
    leaving(box)
    box.grant(1, CHUNK - 1)
    assert leaving(box) == []
    box.grant(1, 1)
    assert leaving(box) == [(0, 1, CHUNK)]


def test_a_grant_to_a_waiting_stream_may_be_too_little() -> None:
    box = outbox(window=256 * KIB)
    for _ in range(5):
        small(box, 1, 64 * KIB)
    leaving(box)
    box.grant(1, 64 * KIB - 1)
    assert leaving(box) == []


def test_a_frame_leaves_only_where_there_is_room_or_nothing_else() -> None:
    box = outbox()
    small(box, 1)
    assert box.next_frame(112, at_least_one=False) is None
    assert box.next_frame(113, at_least_one=False) is not None
    bulk(box, 1, CHUNK)
    assert box.next_frame(CHUNK + 12, at_least_one=False) is None
    assert box.next_frame(0, at_least_one=True) is not None
    assert box.next_frame(2**20, at_least_one=True) is None


def test_before_the_peer_has_spoken_only_small_messages_leave() -> None:
    box = outbox(greeted=False)
    bulk(box, 1, 100 * KIB)
    small(box, 1)
    small(box, 2)
    assert streams(box) == [2]
    box.peer_allows(PeerLimits.of(Limits()))
    assert streams(box) == [1] * 14


def test_chunks_are_no_larger_than_the_peers_frames() -> None:
    box = Outbox(Limits(chunk=512 * KIB))
    box.peer_allows(PeerLimits.of(Limits(max_frame=64 * KIB)))
    bulk(box, 1, 128 * KIB)
    assert [size for _, _, size in leaving(box)] == [64 * KIB, 64 * KIB]


def test_only_so_many_large_messages_are_under_way() -> None:
    box = outbox(max_partial_messages=2)
    for stream in (1, 2, 3):
        bulk(box, stream, 2 * CHUNK)
    assert streams(box) == [1, 2, 1, 2, 3, 3]


@pytest.mark.parametrize(("stream", "amount"), [(1, 101), (1, 0), (2, 1), (2, 0)])
def test_a_grant_may_not_open_more_than_the_window(stream: int, amount: int) -> None:
    box = outbox()
    small(box, 1)
    leaving(box)
    with pytest.raises(ProtocolError, match=f"grants {amount} bytes on stream {stream}"):
        box.grant(stream, amount)


def test_a_stream_whose_window_is_open_is_forgotten() -> None:
    box = outbox()
    small(box, 1)
    leaving(box)
    box.grant(1, 50)
    assert box.streams == 1
    box.grant(1, 50)
    assert box.streams == 0


def test_a_grant_to_a_stream_that_still_sends_keeps_its_place() -> None:
    box = outbox()
    bulk(box, 1, 2 * CHUNK)
    box.next_frame(2**20, at_least_one=True)
    box.grant(1, CHUNK)
    assert leaving(box) == [(LAST, 1, CHUNK)]


def test_small_neighbours_are_joined_and_large_pieces_are_left_where_they_are() -> None:
    large = bytes(4096)
    joined = coalesce([b"a", b"", memoryview(b"b"), large, b"", b"c"])
    assert joined == [b"ab", large, b"c"]
    assert joined[1] is large


def test_the_pieces_of_a_message_are_cut_where_the_frames_end() -> None:
    message = Bulk([b"abc", memoryview(b"defgh"), b"i"], 9)
    taken = [b"".join(message.take(size)) for size in (2, 5, 2)]
    assert taken == [b"ab", b"cdefg", b"hi"]
    assert message.remaining == 0

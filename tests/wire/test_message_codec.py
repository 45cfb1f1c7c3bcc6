"""Messages are encoded without copies and assembled from any split into frames; inconsistent ones are rejected."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_wire import LimitExceeded, Limits, MessageTooLarge, ProtocolError
from meshgate_wire import messages as m
from meshgate_wire.frames import FIRST, LAST
from meshgate_wire.message_codec import (
    AssembledMessage,
    Assembly,
    dump_header,
    encode_message,
    load_header,
    with_call_number,
)
from meshgate_wire.messages import Done, Release
from tests.wire.channel import KIB, MIB, pattern
from tests.wire.example_messages import EXAMPLES

LIMITS = Limits(
    max_header=64 * KIB, max_buffers=8 * KIB, max_message=MIB, max_partial_bytes=2 * MIB, max_partial_messages=3
)


def encoded(number: int, *sizes: int) -> bytes:
    buffers = [pattern(size, number + at) for at, size in enumerate(sizes)]
    return b"".join(encode_message(Done(call=number), buffers, Limits()).pieces)


def counts(header: int, *lengths: int) -> bytes:
    return pack(f"!II{len(lengths)}Q", header, len(lengths), *lengths)


def feed(assembly: Assembly, data: bytes, cuts: list[int], stream: int = 1) -> AssembledMessage | None:
    """Feeds ``data`` in chunks that end at ``cuts``, each a slice of larger data."""
    ends = [*cuts, len(data)]
    message = None
    for start, end in zip([0, *cuts], ends, strict=True):
        flags = (FIRST if start == 0 else 0) | (LAST if end == len(data) else 0)
        message = assembly.receive(flags, stream, b"before" + data[start:end] + b"after", 6, 6 + end - start)
        assembly.validate_state()
    return message


# --- headers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_a_header_is_loaded_as_dumped(header: m.Header) -> None:
    assert load_header(dump_header(header)) == header
    assert load_header(memoryview(dump_header(header))) == header


@pytest.mark.parametrize("header", EXAMPLES, ids=lambda header: header.type)
def test_unknown_fields_are_ignored(header: m.Header) -> None:
    data = dump_header(header)
    assert load_header(data[:-1] + b', "later": [1, {}]}') == header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"type": "unheard_of"}',
        b'{"type": "done"}',
        b'{"type": "done", "call": -1}',
        b'{"type": "done", "call": NaN}',
        b'{"type": "done", "call": 9007199254740993}',
        b'{"type": "done", "call": ' + b"9" * 100_000 + b"}",
        b'{"type": "done", "call": 1, "x": ' + b"[" * 100_000,
        b'{"type": "done", "call": 1, "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"type": "open_channel", "object": 1e99}',
        b'{"type": "attach_hosts", "object": 1, "mesh": "' + b"x" * 257 + b'"}',
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_an_invalid_header_is_rejected(data: bytes) -> None:
    with pytest.raises(ValidationError):
        load_header(data)


def test_a_long_list_of_invalid_elements_causes_one_error() -> None:
    data = b'{"type": "release", "objects": [' + b'"a",' * 100_000 + b'"a"]}'
    with pytest.raises(ValidationError) as caught:
        load_header(data)
    assert caught.value.error_count() == 1


@given(calls=st.lists(st.integers(0, 2**53), min_size=2, max_size=5))
@pytest.mark.parametrize(
    "header",
    [
        m.Call(call=0, target=m.MeshRef(object=7), endpoint="echo", adverb="call"),
        m.Values(call=0, ranks=(3,), objects={0: m.Adopted(objects=(-1,))}),
        m.Values(call=0),
        m.Done(call=0),
    ],
    ids=repr,
)
def test_headers_that_differ_in_the_call_number_only(header: m.Header, calls: list[int]) -> None:
    for call in calls:
        expected = header.model_copy(update={"call": call})
        other = with_call_number(header, call)
        loaded = load_header(dump_header(other))
        assert other == loaded == expected
        assert repr(other) == repr(loaded) == repr(expected)
        assert hash(other.model_dump_json()) == hash(loaded.model_dump_json())
        assert loaded.model_copy() == expected


@pytest.mark.parametrize("number", ["-1", "01", str(2**53 + 1), "1.5", "null", '"x"', "9" * 40])
def test_an_invalid_call_number_is_rejected_in_a_cached_header(number: str) -> None:
    assert load_header(b'{"type":"done","call":5}') == m.Done(call=5)
    data = f'{{"type":"done","call":{number}}}'.encode()
    with pytest.raises(ValidationError):
        load_header(data)


# --- sending ------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_message() -> None:
    head = dump_header(Done(call=1))
    nbytes, pieces = encode_message(Done(call=1), [b"ab", [b"c", b"de"], b""], Limits())
    data = b"".join(pieces)
    assert len(data) == nbytes
    lengths = (2).to_bytes(8, "big") + (3).to_bytes(8, "big") + bytes(8)
    assert data == len(head).to_bytes(4, "big") + (3).to_bytes(4, "big") + lengths + head + b"abcde"


def test_a_message_without_buffers_is_a_preamble_and_a_header() -> None:
    nbytes, pieces = encode_message(Done(call=1), (), Limits())
    assert b"".join(pieces) == (24).to_bytes(4, "big") + bytes(4) + b'{"type":"done","call":1}'
    assert nbytes == 32


def test_a_large_buffer_is_not_copied() -> None:
    large = bytes(10_000)
    assert any(piece is large for piece in encode_message(Done(call=1), [large], Limits()).pieces)


def test_a_message_that_exceeds_the_limit_is_rejected() -> None:
    limits = Limits(max_message=65536, max_partial_bytes=65536)
    with pytest.raises(MessageTooLarge, match="cannot send a message with 65576 bytes: the peer's limit is 65536"):
        encode_message(Done(call=1), [bytes(65536)], limits)


# --- receiving ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 1023, 1024, 5000, 70_000]), max_size=5),
    st.lists(st.integers(1024, 9000), max_size=20),
)
def test_a_message_is_the_same_however_it_is_cut(sizes: list[int], chunks: list[int]) -> None:
    data = encoded(1, *sizes)
    cuts: list[int] = []
    for chunk in chunks:
        if (cuts[-1] if cuts else 0) + chunk < len(data):
            cuts.append((cuts[-1] if cuts else 0) + chunk)
    whole = feed(Assembly(LIMITS), data, cuts)
    assert whole is not None
    assert whole.header == Done(call=1)
    assert whole.nbytes == len(data)
    assert [buffer.join() for buffer in whole.buffers] == [pattern(size, 1 + at) for at, size in enumerate(sizes)]
    assert [len(buffer) for buffer in whole.buffers] == sizes


@pytest.mark.parametrize("cut", [1024, 8 * 1024 - 8, 8 * 1024, 8 * 1024 + 1, 20_000])
def test_lengths_and_header_may_come_in_chunks_too(cut: int) -> None:
    header = Release(objects=tuple(range(2000)))
    data = b"".join(encode_message(header, [b"x"] * 1023, Limits()).pieces)
    whole = feed(Assembly(LIMITS), data, [cut] if cut < len(data) else [])
    assert whole is not None
    assert whole.header == header
    assert [buffer.join() for buffer in whole.buffers] == [b"x"] * 1023


def test_what_is_missing_of_a_message_is_known_once_its_lengths_have_arrived() -> None:
    data = b"".join(encode_message(Done(call=1), [b"x" * 9] * 200, Limits()).pieces)
    assembly = Assembly(LIMITS)
    assembly.receive(FIRST, 1, data, 0, 1024)
    assert assembly.missing(1) == 0
    assembly.receive(0, 1, data, 1024, 2048)
    assert assembly.missing(1) == len(data) - 2048


def test_a_message_that_is_refused_keeps_its_header_and_no_memory() -> None:
    asked: list[tuple[int, int]] = []

    def refuse(nbytes: int, incomplete: int) -> str:
        asked.append((nbytes, incomplete))
        return "too large" if nbytes > 500_000 else ""

    assembly = Assembly(LIMITS, refuse=refuse)
    large, other = encoded(1, 300_000, 0, 300_000), encoded(2, 5000)
    assert assembly.receive(FIRST, 1, large, 0, 2000) is None
    assert assembly.receive(FIRST, 2, other, 0, 2000) is None
    tracemalloc.start()
    for start in range(2000, 600_000, 2000):
        assert assembly.receive(0, 1, large, start, start + 2000) is None
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced < 50_000
    whole = assembly.receive(LAST, 1, large, 600_000, len(large))
    assert whole == AssembledMessage(Done(call=1), (), len(large), "too large")
    kept = assembly.receive(LAST, 2, other, 2000, len(other))
    assert kept is not None
    assert (kept.refused, kept.buffers[0].join()) == ("", pattern(5000, 2))
    assert asked == [(len(large), 0), (len(other), 0)]  # what is refused does not count
    assert assembly.receive(FIRST, 1, other, 0, 2000) is assembly.receive(FIRST, 2, other, 0, 2000) is None
    assert asked[2:] == [(len(other), 0), (len(other), len(other))]
    assembly.validate_state()


def test_streams_are_put_together_side_by_side() -> None:
    assembly = Assembly(LIMITS)
    first, second = encoded(1, 5000), encoded(2, 5000)
    assert assembly.receive(FIRST, 1, first, 0, 2000) is None
    assert assembly.receive(FIRST, 2, second, 0, 2000) is None
    assert len(assembly) == 2
    assert assembly.nbytes == 4000
    assert assembly.announced == len(first) + len(second)
    one = assembly.receive(LAST, 1, first, 2000, len(first))
    two = assembly.receive(LAST, 2, second, 2000, len(second))
    assert one is not None
    assert two is not None
    assert (one.header, two.header) == (Done(call=1), Done(call=2))
    assert len(assembly) == assembly.announced == 0


def test_a_message_may_not_start_within_another_on_its_stream() -> None:
    assembly = Assembly(LIMITS)
    assembly.receive(FIRST, 1, encoded(1, 5000), 0, 2000)
    with pytest.raises(ProtocolError, match="starts on stream 1 before the previous one has ended"):
        assembly.receive(FIRST | LAST, 1, encoded(2), 0, len(encoded(2)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has only 0 bytes, less than its preamble"),
        (counts(2**20), "sent 1048576 header bytes in one message, but this side's limit is 65536"),
        (pack("!II", 0, 2**32 - 1), "sent 4294967295 buffers in one message, but this side's limit is 8192"),
        (counts(100), "announces at least 108 bytes but has 8"),
        (pack("!II", 0, 100), "announces at least 808 bytes but has 8"),
        (counts(2, 5) + b"{}", "announces 23 bytes but has 18"),
        (counts(2, 2**63) + b"{}", "announces 9223372036854775826 bytes but has 18"),
        (counts(2) + b"{}x", "announces 10 bytes but has 11"),
        (counts(2) + b"{}", "invalid header of a message on stream 1: value: Unable to extract tag"),
        (counts(0), "invalid header"),
        (bytes(MIB + 1), "sent 1048577 bytes in one message, but this side's limit is 1048576"),
    ],
)
def test_an_inconsistent_message_is_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Assembly(LIMITS).receive(FIRST | LAST, 1, data, 0, len(data))


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([counts(2**20) + bytes(2000)], "1048576 header bytes in one message"),
        ([pack("!II", 0, 2**31) + bytes(2000)], "2147483648 buffers in one message"),
        ([counts(1000, 2**62) + bytes(2000)], "4611686018427388920 bytes in one message"),
        ([counts(1000, 5000) + bytes(2000)], "invalid header"),
        ([counts(2000) + b"x" * 1500, b"x" * 500], "invalid header"),
        ([encoded(1, 5000)[:2000], b""], "ended after 2000 of 5040 bytes"),
        ([counts(60_000) + bytes(2000), b""], "ended after 2008 of 60008 bytes"),
        ([b"\0" * 2000], "invalid header"),
        ([encoded(1, 5000), b"x" * 2000], "announces 5040 bytes but has at least 7040"),
        ([encoded(1, 1000) + b"x" * 1000], "announces 1040 bytes but has at least 2040"),
        ([bytes(100)], "has 100 bytes; all but the last of a message must have at least 1024"),
    ],
)
def test_inconsistent_chunks_are_rejected(chunks: list[bytes], reason: str) -> None:
    assembly = Assembly(LIMITS)
    *before, last = chunks
    for at, chunk in enumerate(before):
        assembly.receive(0 if at else FIRST, 1, chunk, 0, len(chunk))
    flags = (0 if before else FIRST) | (LAST if before and len(last) < 1024 else 0)
    with pytest.raises(ProtocolError, match=reason):
        assembly.receive(flags, 1, last, 0, len(last))


def test_the_number_of_incomplete_messages_is_limited() -> None:
    assembly = Assembly(LIMITS)
    for stream in range(3):
        assembly.receive(FIRST, stream, encoded(1, 5000), 0, 2000)
    with pytest.raises(LimitExceeded, match="sent 4 incomplete messages, but this side's limit is 3"):
        assembly.receive(FIRST, 3, encoded(1, 5000), 0, 2000)


def test_the_announced_size_of_incomplete_messages_is_limited() -> None:
    assembly = Assembly(LIMITS)
    size = 1_040_000
    for stream in range(2):
        assembly.receive(FIRST, stream, encoded(1, size), 0, 2000)
    with pytest.raises(
        LimitExceeded, match="sent 3120120 bytes of incomplete messages, but this side's limit is 2097152"
    ):
        assembly.receive(FIRST, 2, encoded(1, size), 0, 2000)


def test_announced_bytes_take_no_memory_until_they_arrive() -> None:
    assembly = Assembly(Limits())
    head = counts(30, *[2**32 - 2000]) + Done(call=1).model_dump_json().encode().ljust(30)
    data = head + bytes(2000)
    tracemalloc.start()
    try:
        assembly.receive(FIRST, 1, data, 0, len(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert assembly.announced > 4_000_000_000
    assert peak < 20_000


@pytest.mark.parametrize("views", [False, True])
def test_messages_are_freed_without_a_garbage_collection(views: bool) -> None:
    class Watched(Assembly):
        """Can be watched by a weak reference, as an ``Assembly`` cannot."""

    gc.disable()
    try:
        assembly = Watched(Limits(), views=views)
        message = feed(assembly, encoded(1, 20 * KIB, 3), [2 * KIB, 9 * KIB])
        assert message is not None
        freed = weakref.ref(assembly)
        del assembly
        assert freed() is None
        alone = object()
        references = [sys.getrefcount(each) for each in (*message.buffers, alone)]
        assert references == [references[-1]] * len(references)  # the message alone has its buffers
    finally:
        gc.enable()


def test_large_parts_of_received_data_become_views_and_small_ones_copies() -> None:
    assembly = Assembly(Limits(), views=True)
    data = encoded(1, 20 * KIB)
    cut = 12 * KIB
    assembly.receive(FIRST, 1, data[:cut], 0, cut)
    remaining = data[cut:]
    message = assembly.receive(LAST, 1, remaining + bytes(20 * KIB), 0, len(remaining))
    assert message is not None
    assert [type(fragment) for fragment in message.buffers[0].fragments] == [memoryview, bytes]
    assert message.buffers[0].join() == pattern(20 * KIB, 1)

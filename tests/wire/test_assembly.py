"""Messages out of frames: every way to cut them gives the same, and what does not add up is refused early."""

from __future__ import annotations

import gc
import tracemalloc
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_wire import LimitExceeded, Limits, ProtocolError
from meshgate_wire.assembly import Assembly, Whole
from meshgate_wire.encoding import encode_message
from meshgate_wire.frames import FIRST, LAST
from meshgate_wire.messages import Done, Release
from tests.wire.channel import KIB, MIB, pattern

LIMITS = Limits(
    max_header=64 * KIB, max_buffers=8 * KIB, max_message=MIB, max_partial_bytes=2 * MIB, max_partial_messages=3
)


def encoded(number: int, *sizes: int) -> bytes:
    buffers = [pattern(size, number + at) for at, size in enumerate(sizes)]
    return b"".join(encode_message(Done(call=number), buffers, Limits()).pieces)


def counts(header: int, *lengths: int) -> bytes:
    return pack(f"!II{len(lengths)}Q", header, len(lengths), *lengths)


def feed(assembly: Assembly, data: bytes, cuts: list[int], stream: int = 1) -> Whole | None:
    """Feeds ``data`` in chunks that end at ``cuts``, each out of the middle of something larger."""
    ends = [*cuts, len(data)]
    whole = None
    for start, end in zip([0, *cuts], ends, strict=True):
        flags = (FIRST if start == 0 else 0) | (LAST if end == len(data) else 0)
        whole = assembly.receive(flags, stream, b"before" + data[start:end] + b"after", 6, 6 + end - start)
        assembly.validate_state()
    return whole


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


def test_a_whole_message_may_not_come_within_another_on_its_stream() -> None:
    assembly = Assembly(LIMITS)
    assembly.receive(FIRST, 1, encoded(1, 5000), 0, 2000)
    with pytest.raises(ProtocolError, match="begins on stream 1 before the last one ended"):
        assembly.receive(FIRST | LAST, 1, encoded(2), 0, len(encoded(2)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has 0 bytes, too few"),
        (counts(2**20), "a header in bytes of 1048576, the limit here is 65536"),
        (pack("!II", 0, 2**32 - 1), "a number of buffers of 4294967295, the limit here is 8192"),
        (counts(100), "announces 108 bytes or more and has 8"),
        (pack("!II", 0, 100), "announces 808 bytes or more and has 8"),
        (counts(2, 5) + b"{}", "announces 23 bytes and has 18"),
        (counts(2, 2**63) + b"{}", "announces 9223372036854775826 bytes and has 18"),
        (counts(2) + b"{}x", "announces 10 bytes and has 11"),
        (counts(2) + b"{}", "malformed header, the whole: Unable to extract tag"),
        (counts(0), "malformed header"),
        (bytes(MIB + 1), "a message in bytes of 1048577, the limit here is 1048576"),
    ],
)
def test_a_whole_message_that_does_not_add_up_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Assembly(LIMITS).receive(FIRST | LAST, 1, data, 0, len(data))


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([counts(2**20) + bytes(2000)], "a header in bytes of 1048576"),
        ([pack("!II", 0, 2**31) + bytes(2000)], "a number of buffers of 2147483648"),
        ([counts(1000, 2**62) + bytes(2000)], "a message in bytes of 4611686018427388920"),
        ([counts(1000, 5000) + bytes(2000)], "malformed header"),
        ([counts(2000) + b"x" * 1500, b"x" * 500], "malformed header"),
        ([encoded(1, 5000)[:2000], b""], "ended after 2000 of 5040 bytes"),
        ([counts(60_000) + bytes(2000), b""], "ended after 2008 of 60008 bytes"),
        ([b"\0" * 2000], "malformed header"),
        ([encoded(1, 5000), b"x" * 2000], "announces 5040 bytes and has 7040 or more"),
        ([encoded(1, 1000) + b"x" * 1000], "announces 1040 bytes and has 2040 or more"),
        ([bytes(100)], "carries 100 bytes; one that is not the last of its message carries 1024 or more"),
    ],
)
def test_chunks_that_do_not_add_up_are_refused(chunks: list[bytes], reason: str) -> None:
    assembly = Assembly(LIMITS)
    *before, last = chunks
    for at, chunk in enumerate(before):
        assembly.receive(0 if at else FIRST, 1, chunk, 0, len(chunk))
    flags = (0 if before else FIRST) | (LAST if before and len(last) < 1024 else 0)
    with pytest.raises(ProtocolError, match=reason):
        assembly.receive(flags, 1, last, 0, len(last))


def test_only_so_many_messages_may_be_unfinished() -> None:
    assembly = Assembly(LIMITS)
    for stream in range(3):
        assembly.receive(FIRST, stream, encoded(1, 5000), 0, 2000)
    with pytest.raises(LimitExceeded, match="a number of unfinished messages of 4, the limit here is 3"):
        assembly.receive(FIRST, 3, encoded(1, 5000), 0, 2000)


def test_only_so_much_may_be_announced() -> None:
    assembly = Assembly(LIMITS)
    size = 1_040_000
    for stream in range(2):
        assembly.receive(FIRST, stream, encoded(1, size), 0, 2000)
    with pytest.raises(LimitExceeded, match="unfinished messages in bytes of 3120120, the limit here is 2097152"):
        assembly.receive(FIRST, 2, encoded(1, size), 0, 2000)


def test_what_is_announced_takes_no_memory_until_it_comes() -> None:
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
def test_what_is_done_with_is_let_go_at_once(views: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        assembly = Assembly(Limits(), views=views)
        assert feed(assembly, encoded(1, 20 * KIB, 3), [2 * KIB, 9 * KIB]) is not None
        del assembly
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_views_are_of_what_was_received_unless_that_is_mostly_something_else() -> None:
    assembly = Assembly(Limits(), views=True)
    data = encoded(1, 20 * KIB)
    cut = 12 * KIB
    assembly.receive(FIRST, 1, data[:cut], 0, cut)
    rest = data[cut:]
    whole = assembly.receive(LAST, 1, rest + bytes(20 * KIB), 0, len(rest))
    assert whole is not None
    assert [type(fragment) for fragment in whole.buffers[0].fragments] == [memoryview, bytes]
    assert whole.buffers[0].join() == pattern(20 * KIB, 1)

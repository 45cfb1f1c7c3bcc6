from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage
from meshgate_sync.tree.codec import Reader, Writer


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32), st.binary(), st.binary())
def test_a_reader_returns_what_a_writer_wrote(byte: int, number: int, digest: bytes, short: bytes, long: bytes) -> None:
    out = Writer()
    out.u8(byte)
    out.u32(number)
    out.digest(digest)
    out.short(short)
    out.long(long)
    out.raw(b"rest")
    reader = Reader(out.finish())
    assert (reader.u8(), reader.u32(), reader.digest()) == (byte, number, digest)
    assert (reader.short(), reader.long(), reader.take(4)) == (short, long, b"rest")
    reader.finish()


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (Reader.u8, b""),
        (Reader.u32, b"\0\0\0"),
        (Reader.digest, bytes(31)),
        (Reader.short, b"\0\2x"),
        (Reader.long, b"\xff\xff\xff\xff"),
    ],
)
def test_a_field_longer_than_the_buffer_is_rejected(read: object, data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="truncated message"):
        read(Reader(data))  # type: ignore[operator]


def test_a_count_of_more_items_than_fit_is_rejected_before_they_are_read() -> None:
    assert Reader(b"\0\0\0\2" + bytes(8)).count(4) == 2
    with pytest.raises(MalformedMessage, match="3 items of 4 bytes, 8 are left"):
        Reader(b"\0\0\0\3" + bytes(8)).count(4)


def test_bytes_after_the_last_field_are_rejected() -> None:
    reader = Reader(b"\1\2")
    reader.u8()
    assert reader.remaining == 1
    with pytest.raises(MalformedMessage, match="1 bytes after its end"):
        reader.finish()


@pytest.mark.parametrize(("write", "value"), [(Writer.u8, 256), (Writer.u32, -1), (Writer.short, bytes(65536))])
def test_a_value_that_does_not_fit_its_field_is_a_defect(write: object, value: object) -> None:
    with pytest.raises(struct.error):
        write(Writer(), value)  # type: ignore[operator]

"""Values are decoded from bincode; truncated data and trailing bytes are rejected."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.shapes.bincode import Reader

integers = st.integers(0, 2**64 - 1)


def encoded(value: int | list[int] | list[str]) -> bytes:
    if isinstance(value, int):
        return struct.pack("<Q", value)
    items = [encoded(item) if isinstance(item, int) else encoded(len(item.encode())) + item.encode() for item in value]
    return encoded(len(value)) + b"".join(items)


@given(integers, st.lists(integers, max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_values_are_decoded_in_order(integer: int, numbers: list[int], strings: list[str]) -> None:
    reader = Reader(encoded(integer) + encoded(numbers) + encoded(strings))
    assert (reader.integer(), reader.integers(), reader.strings()) == (integer, numbers, strings)
    reader.end()


def test_truncated_data_is_rejected() -> None:
    with pytest.raises(ValueError, match="truncated data: 1 bytes are missing"):
        Reader(encoded(5)[:-1]).integer()
    with pytest.raises(ValueError, match="truncated data: 8 bytes are missing"):
        Reader(encoded([1, 2])[:-8]).integers()
    with pytest.raises(ValueError, match="truncated data: 2 bytes are missing"):
        Reader(encoded(["abc"])[:-2]).strings()


def test_a_length_beyond_the_data_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="truncated data"):
        Reader(encoded(2**60)).integers()


def test_trailing_bytes_are_rejected() -> None:
    reader = Reader(encoded(5) + b"x")
    reader.integer()
    with pytest.raises(ValueError, match="1 trailing bytes"):
        reader.end()

"""Buffers: joined, read as files, and flattened for sending."""

from __future__ import annotations

import io
import pickle
from pickle import PickleBuffer

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_wire import Fragments
from meshgate_wire.fragments import flatten


def test_a_buffer_of_one_fragment_is_joined_without_a_copy() -> None:
    data = b"content"
    assert Fragments((data,)).join() is data


def test_fragments_join_in_their_order() -> None:
    buffer = Fragments((b"one ", b"two"))
    assert len(buffer) == 7
    assert buffer.join() == b"one two"
    assert Fragments().join() == b""
    assert repr(buffer) == "<Fragments 7 bytes in 2>"


def test_fragments_are_equal_if_their_bytes_are() -> None:
    assert Fragments((b"ab", b"c")) == Fragments((b"a", b"bc"))
    assert Fragments((b"abc",)) != Fragments((b"abd",))
    assert Fragments((b"abc",)) != Fragments((b"ab",))
    assert Fragments((b"abc",)) != b"abc"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Fragments())


@pytest.mark.parametrize(
    "buffer",
    [
        b"content",
        bytearray(b"content"),
        memoryview(b"content"),
        memoryview(b"-content")[1:],
        PickleBuffer(b"content"),
        numpy.frombuffer(b"content", dtype="u1").data,
        [b"con", b"", memoryview(b"tent")],
        (bytearray(b"conte"), b"nt"),
        Fragments((b"con", b"tent")),
    ],
)
def test_every_kind_of_buffer_is_flattened_to_its_bytes(buffer: object) -> None:
    size, pieces = flatten(buffer)  # type: ignore[arg-type]
    assert size == 7
    assert b"".join(pieces) == b"content"
    assert all(len(piece) for piece in pieces)


def test_views_of_larger_items_count_in_bytes() -> None:
    array = numpy.arange(6, dtype="i4").reshape(2, 3)
    size, pieces = flatten(array.data)
    assert size == 24
    assert b"".join(pieces) == array.tobytes()


@pytest.mark.parametrize("empty", [numpy.empty((0, 3)).data, b"", bytearray(), [], PickleBuffer(b"")])
def test_an_empty_buffer_has_no_pieces(empty: object) -> None:
    assert flatten(empty) == (0, [])  # type: ignore[arg-type]


def test_an_array_in_fortran_order_is_flattened_in_memory_order() -> None:
    array = numpy.asfortranarray(numpy.arange(6, dtype="u1").reshape(2, 3))
    assert flatten(PickleBuffer(array))[1][0] == array.tobytes(order="A")


def test_memory_that_is_not_contiguous_is_rejected() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        flatten(numpy.arange(10, dtype="u1")[::2].data)


@given(
    pieces=st.lists(st.binary(max_size=20), max_size=6),
    reads=st.lists(st.tuples(st.sampled_from(["read", "readinto", "readline"]), st.integers(0, 30)), max_size=8),
)
def test_a_buffer_is_read_like_a_file(pieces: list[bytes], reads: list[tuple[str, int]]) -> None:
    read, real = Fragments(tuple(pieces)).open(), io.BytesIO(b"".join(pieces))
    for method, size in reads:
        if method == "readinto":
            got, expected = bytearray(size), bytearray(size)
            assert read.readinto(memoryview(got)) == real.readinto(expected)
            assert got == expected
        else:
            assert read.readline() == real.readline() if method == "readline" else read.read(size) == real.read(size)


def test_a_pickle_is_read_without_joining() -> None:
    value = {"array": numpy.arange(300_000), "text": "x" * 100_000, "few": list(range(1000))}
    data = pickle.dumps(value, 5)
    pieces = tuple(data[at : at + 65_536] for at in range(0, len(data), 65_536))
    read = pickle.Unpickler(Fragments(pieces).open()).load()
    assert read["text"] == value["text"]
    assert read["few"] == value["few"]
    assert (read["array"] == value["array"]).all()

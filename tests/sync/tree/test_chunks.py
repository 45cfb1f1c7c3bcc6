from __future__ import annotations

import io
import random

from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.tree import chunks
from meshgate_sync.tree.chunks import AVERAGE, MAX_SINGLE_PIECE, cut
from meshgate_sync.tree.tree import MAX_PIECE, piece_digest


def pieces_of(data: bytes, expected: int | None = None) -> list[bytes]:
    found, count = cut(io.BytesIO(data).read, len(data) if expected is None else expected)
    assert count == len(data)
    parts, offset = [], 0
    for piece in found:
        part = data[offset : offset + piece.size]
        assert piece_digest(part) == piece.digest
        parts.append(part)
        offset += piece.size
    assert b"".join(parts) == data
    return parts


def test_a_small_file_is_one_piece_and_an_empty_one_none() -> None:
    assert pieces_of(b"") == []
    assert pieces_of(b"x" * MAX_SINGLE_PIECE) == [b"x" * MAX_SINGLE_PIECE]


def test_a_large_file_is_cut_near_the_average() -> None:
    data = random.Random(1).randbytes(4_000_000)
    parts = pieces_of(data)
    assert AVERAGE / 2 < len(data) / len(parts) < 2 * AVERAGE
    assert max(map(len, parts)) <= MAX_PIECE


def test_a_file_that_grew_after_it_was_listed_is_cut_the_same_way() -> None:
    data = random.Random(2).randbytes(300_000)
    assert pieces_of(data, expected=10) == pieces_of(data)


def test_the_window_size_does_not_move_the_cuts(monkeypatch: object) -> None:
    data = random.Random(3).randbytes(3_000_000)
    at_once = pieces_of(data)
    original = chunks._WINDOW
    try:
        chunks._WINDOW = 600_000
        assert pieces_of(data) == at_once
    finally:
        chunks._WINDOW = original


@given(st.integers(0, 1_999_999), st.binary(max_size=8))
def test_an_edit_anywhere_changes_few_pieces(position: int, inserted: bytes) -> None:
    data = random.Random(4).randbytes(2_000_000)
    edited = data[:position] + inserted + data[position + 1 :]
    assert len(set(pieces_of(edited)) - set(pieces_of(data))) <= 3


def test_short_reads_are_joined() -> None:
    data = random.Random(5).randbytes(200_000)
    stream = io.BytesIO(data)
    found, _ = cut(lambda count: stream.read(min(count, 1000)), len(data))
    assert [piece.size for piece in found] == [len(part) for part in pieces_of(data)]

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_sync.errors import MalformedMessage
from meshgate_sync.tree.tree import piece_digest
from meshgate_sync.upload.protocol import (
    MAX_PACK,
    SyncOffer,
    compress,
    decompress,
    join_digests,
    pack,
    split_digests,
    unpack,
)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5))
def test_unpack_reverses_pack(contents: list[bytes]) -> None:
    pieces = [(piece_digest(data), data) for data in contents]
    assert unpack(pack(pieces)) == pieces
    names = tuple(digest for digest, _ in pieces)
    assert split_digests(join_digests(names)) == names


@pytest.mark.parametrize("data", [b"x", bytes(36), bytes(32) + b"\x7f\xff\xff\xff", bytes(32) + b"\0\0\0\1"])
def test_corrupt_packs_are_rejected(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_a_piece_that_does_not_match_its_digest_is_rejected() -> None:
    good = piece_digest(b"data"), b"data"
    with pytest.raises(MalformedMessage, match="does not match its digest"):
        unpack(pack([good, (piece_digest(b"data"), b"dada")]))


def test_a_list_of_digests_has_no_remainder() -> None:
    with pytest.raises(MalformedMessage):
        split_digests(bytes(33))


def test_headers_have_limits() -> None:
    with pytest.raises(ValidationError):
        SyncOffer(root="0" * 64, pack_size=MAX_PACK + 1)
    with pytest.raises(ValidationError):
        SyncOffer(root="../../etc")


@given(st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(lambda size: b"ab" * size)))
def test_decompress_reverses_compress(data: bytes) -> None:
    compressed = compress(data)
    assert decompress(compressed, len(data)) == data
    assert len(compressed) <= len(data) + 1


def test_incompressible_data_is_sent_as_it_is() -> None:
    noise = os.urandom(500_000)
    assert compress(noise) == b"\0" + noise
    assert len(compress(b"text " * 100_000)) < 1000
    assert len(compress(noise[:200_000] + b"text " * 100_000)) < 202_000
    small = os.urandom(100)
    assert compress(small) == b"\0" + small


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", 0),
        (b"\0abc", 4),
        (b"\2abc", 3),
        (b"\1abc", 3),
        (compress(b"a" * 1000), 999),
        (compress(b"a" * 1000)[:-3], 1000),
        (compress(b"a" * 1000)[:-9] + b"damage!!!", 1000),
    ],
)
def test_corrupt_data_and_wrong_sizes_are_rejected(data: bytes, size: int) -> None:
    with pytest.raises(MalformedMessage):
        decompress(data, size)

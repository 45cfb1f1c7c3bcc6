from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_sync.errors import MalformedMessage
from meshgate_sync.tree.digest import piece_digest
from meshgate_sync.upload.protocol import MAX_PACK, SyncOffer, join_digests, pack, split_digests, unpack


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

from __future__ import annotations

import hashlib

from meshgate_sync.tree.digest import DIGEST_SIZE, NOTHING, list_digest, piece_digest, short, tree_digest


def test_a_piece_has_its_sha256() -> None:
    assert piece_digest(b"data") == hashlib.sha256(b"data").digest()
    assert piece_digest(memoryview(b"data")) == piece_digest(bytearray(b"data")) == piece_digest(b"data")


def test_pieces_lists_and_directories_of_the_same_bytes_differ() -> None:
    digests = {piece_digest(b"data"), list_digest(b"data"), tree_digest(b"data")}
    assert len(digests) == 3
    assert {len(digest) for digest in digests} == {DIGEST_SIZE}
    assert NOTHING not in digests


def test_versions_are_shown_by_twelve_hex_digits() -> None:
    assert short(bytes.fromhex("3f9c0a41d2e7ff") + bytes(25)) == "3f9c0a41d2e7"

from __future__ import annotations

import hashlib

from hypothesis import given

from meshgate_sync.tree.tree import (
    DIGEST_SIZE,
    EMPTY,
    NOTHING,
    Directory,
    File,
    Piece,
    Symlink,
    files,
    list_digest,
    lookup,
    piece_digest,
    short,
    tree_digest,
    walk,
)
from tests.sync.trees import Content, file, models


@given(models)
def test_equal_content_has_equal_digests_in_any_order(model: dict[bytes, object]) -> None:
    tree = Content().tree(model)
    assert Content().tree(dict(reversed(model.items()))) == tree
    assert hash(Content().tree(model)) == hash(tree)


@given(models, models)
def test_digests_differ_if_content_does(one: dict[bytes, object], other: dict[bytes, object]) -> None:
    first, second = Content().tree(one), Content().tree(other)
    assert (first == second) == (dict(walk(first)) == dict(walk(second)))


def test_kinds_modes_and_names_change_the_digest() -> None:
    content = file(b"content")
    variants = [
        EMPTY,
        Directory({b"a": content}),
        Directory({b"b": content}),
        Directory({b"a": file(b"content", executable=True)}),
        Directory({b"a": Symlink(b"content")}),
        Directory({b"a": EMPTY}),
        Directory({b"a": Directory({b"a": content})}),
        Directory({b"a": File(())}),
    ]
    assert len({tree.digest for tree in variants}) == len(variants)


def test_a_file_of_several_pieces_has_a_digest_of_its_own() -> None:
    pieces = file(b"x" * 40)
    assert len(pieces.pieces) == 3
    assert pieces.digest not in {piece.digest for piece in pieces.pieces}
    assert file(b"x").digest == file(b"x").pieces[0].digest


def test_counts_include_everything_below() -> None:
    tree = Content().tree({b"a": b"123", b"d": {b"b": b"45", b"l": "a", b"e": {}}})
    assert (tree.files, tree.size) == (3, 5)
    assert [found.size for found in files(tree)] == [3, 2]
    assert repr(tree) == f"Directory({tree.digest.hex()[:12]}, files=3, size=5)"


def test_lookup_finds_nodes_and_nothing_below_files() -> None:
    tree = Content().tree({b"a": b"1", b"d": {b"b": b"2"}})
    assert lookup(tree, b"d/b") == file(b"2")
    assert lookup(tree, b"d") == Directory({b"b": file(b"2")})
    assert lookup(tree, b"a/b") is None
    assert lookup(tree, b"d/c") is None


def test_offsets_follow_the_pieces() -> None:
    cut = File((Piece(b"1" * 32, 5), Piece(b"2" * 32, 7)))
    assert [offset for offset, _ in cut.offsets()] == [0, 5]
    assert cut.size == 12
    assert cut.key.endswith(cut.digest.hex())


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

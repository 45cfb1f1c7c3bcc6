from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshgate_sync.errors import DeltaMismatch, MalformedMessage
from meshgate_sync.tree.delta import (
    Delta,
    MakeDirectory,
    PutFile,
    PutSymlink,
    Remove,
    Splice,
    decode,
    diff,
    encode,
    full_delta,
    patch,
    transfer_size,
    transferred_pieces,
)
from meshgate_sync.tree.tree import EMPTY, NOTHING, Directory, File, Piece
from tests.sync.trees import Content, file, models

PIECES = {name: Piece(name.encode() * 32, 10) for name in "ab"}


@given(models, models)
def test_a_delta_leads_from_one_version_to_the_other(old: dict[bytes, object], new: dict[bytes, object]) -> None:
    before, after = Content().tree(old), Content().tree(new)
    delta = decode(encode(diff(before, after)))
    assert delta.root == after.digest
    assert delta.base == (before.digest if old else NOTHING)
    assert patch(before, delta) == after


@given(models)
def test_a_full_delta_needs_no_base(model: dict[bytes, object]) -> None:
    tree = Content().tree(model)
    delta = decode(encode(full_delta(tree)))
    assert patch(EMPTY, delta) == tree
    assert transfer_size(delta) == tree.size
    assert sum(piece.size for _, _, piece in transferred_pieces(delta, tree)) == tree.size


@given(st.lists(st.sampled_from("ab"), max_size=8), st.lists(st.sampled_from("ab"), max_size=8))
def test_a_file_whose_pieces_repeat_becomes_any_other(old: list[str], new: list[str]) -> None:
    """Equal pieces may match from the front and from the back: no piece may count twice."""
    before, after = (Directory({b"f": File(tuple(PIECES[name] for name in names))}) for names in (old, new))
    delta = decode(encode(diff(before, after)))
    assert patch(before, delta) == after
    assert transfer_size(delta) <= after.size


def test_equal_trees_have_an_empty_delta() -> None:
    tree = Content().tree({b"a": b"1", b"d": {b"b": b"2"}})
    assert diff(tree, tree).operations == ()


def test_each_change_is_one_operation() -> None:
    content = Content()
    old = content.tree({b"gone": b"1", b"kept": b"2", b"d": {b"x": b"3"}, b"turned": {b"y": b"4"}, b"l": "a"})
    new = content.tree({b"kept": (b"2", True), b"d": {b"x": b"5"}, b"turned": b"6", b"l": "b", b"e": {}})
    assert set(diff(old, new).operations) == {
        Remove(b"gone"),
        PutFile(b"kept", file(b"2", executable=True)),
        PutFile(b"d/x", file(b"5")),
        Remove(b"turned"),
        PutFile(b"turned", file(b"6")),
        PutSymlink(b"l", b"b"),
        MakeDirectory(b"e"),
    }


def test_one_byte_in_a_large_file_is_a_splice_of_one_piece() -> None:
    content = Content()
    data = bytes(range(200)) * 2
    changed = data[:100] + b"!" + data[101:]
    old, new = content.tree({b"f": data}), content.tree({b"f": changed})
    delta = diff(old, new)
    (splice,) = delta.operations
    assert isinstance(splice, Splice)
    assert len(splice.middle) == 1
    assert transfer_size(delta) == 16
    ((path, offset, piece),) = transferred_pieces(delta, new)
    assert (path, offset, piece) == (b"f", 96, splice.middle[0])
    assert patch(old, decode(encode(delta))) == new


def test_appending_to_a_large_file_keeps_its_head() -> None:
    content = Content()
    old, new = content.tree({b"f": bytes(range(64))}), content.tree({b"f": bytes(range(96))})
    (splice,) = diff(old, new).operations
    assert isinstance(splice, Splice)
    assert (splice.head, splice.tail, len(splice.middle)) == (4, 0, 2)


def test_a_file_that_shares_no_piece_is_put() -> None:
    content = Content()
    old, new = content.tree({b"f": b"a" * 40}), content.tree({b"f": b"b" * 50})
    assert isinstance(diff(old, new).operations[0], PutFile)


@pytest.mark.parametrize(
    ("base", "operation"),
    [
        (EMPTY, Remove(b"a")),
        (EMPTY, Remove(b"a/b")),
        (EMPTY, Splice(b"a", False, 0, 0, ())),
        (EMPTY, Splice(b"d/a", False, 0, 0, ())),
        (Directory({b"a": file(b"x" * 40)}), Splice(b"a", False, 2, 2, ())),
        (Directory({b"a": EMPTY}), PutFile(b"a", file(b""))),
        (Directory({b"a": EMPTY}), MakeDirectory(b"a")),
        (Directory({b"a": file(b"")}), PutSymlink(b"a/b", b"c")),
        (EMPTY, PutFile(b"a", file(b"not the root"))),
    ],
)
def test_a_delta_that_does_not_lead_to_its_root_is_rejected(base: Directory, operation: Remove) -> None:
    with pytest.raises(DeltaMismatch):
        patch(base, Delta(base.digest, b"r" * 32, (operation,)))


def encoded(operation: object) -> bytes:
    return encode(Delta(NOTHING, NOTHING, (operation,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nope" + bytes(68),
        encode(Delta(NOTHING, NOTHING, ())) + b"x",
        encode(Delta(NOTHING, NOTHING, ()))[:-4] + b"\xff\xff\xff\xff",
        encoded(PutFile(b"../a", file(b""))),
        encoded(PutFile(b"/a", file(b""))),
        encoded(PutFile(b"a//b", file(b""))),
        encoded(PutFile(b"a/./b", file(b""))),
        encoded(PutFile(b"", file(b""))),
        encoded(PutFile(b"a\0b", file(b""))),
        encoded(PutFile(b"a" * 5000, file(b""))),
        encoded(PutFile(b"a/" * 300 + b"a", file(b""))),
        encoded(PutFile(b"a", File((Piece(NOTHING, 0),)))),
        encoded(PutFile(b"a", File((Piece(NOTHING, 1 << 30),)))),
        encoded(PutSymlink(b"a", b"")),
        encoded(PutSymlink(b"a", b"x\0y")),
        encoded(Remove(b"abc")).replace(b"\x00\x00\x03abc", b"\x09\x00\x03abc"),
    ],
)
def test_malformed_deltas_are_rejected(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


@given(st.binary(max_size=300))
@example(b"MGD1" + bytes(64) + b"\x00\x00\x00\x01\x02\x00\x01a\x00\xff\xff\xff\xff")
def test_random_bytes_are_rejected_without_allocating_memory(random_bytes: bytes) -> None:
    for data in (random_bytes, b"MGD1" + bytes(64) + random_bytes):
        try:
            delta = decode(data)
        except MalformedMessage:
            continue
        assert encode(delta)[:4] == b"MGD1"

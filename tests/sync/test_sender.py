from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_sync.compress import squeeze, unsqueeze
from meshgate_sync.delta import decode, patch
from meshgate_sync.digest import piece_digest
from meshgate_sync.errors import LinkLeavesTree, MalformedMessage
from meshgate_sync.protocol import (
    MAX_PACK,
    SyncGone,
    SyncNeed,
    SyncOffer,
    SyncPieces,
    SyncWants,
    join_digests,
    pack,
    split_digests,
    unpack,
)
from meshgate_sync.scan import Scanner
from meshgate_sync.sender import Message, Sender
from meshgate_sync.tree import EMPTY, Directory, files
from tests.sync.trees import models, write


class Gateway:
    """The other end: what a sender's messages come to."""

    def __init__(self) -> None:
        self.held: dict[bytes, Directory] = {bytes(32): EMPTY}
        self.pieces: dict[bytes, bytes] = {}
        self.answers: list[SyncNeed] = []

    def take(self, message: Message) -> None:
        header, buffers = message
        if isinstance(header, SyncOffer):
            root = bytes.fromhex(header.root)
            if header.pack_size:
                self.keep(unpack(unsqueeze(buffers[1], header.pack_size)))
            if not header.delta_size:
                if root not in self.held:
                    self.need(header.root)
                return
            delta = decode(unsqueeze(buffers[0], header.delta_size))
            if delta.base in self.held:
                self.held[root] = patch(self.held[delta.base], delta)
            else:
                self.need(header.root)
        elif isinstance(header, SyncPieces):
            self.keep(unpack(unsqueeze(buffers[0], header.size)))

    def need(self, root: str) -> None:
        self.answers.append(SyncNeed(root=root, held=tuple(held.hex() for held in reversed(self.held))))

    def keep(self, pieces: list[tuple[bytes, bytes]]) -> None:
        for digest, data in pieces:
            assert piece_digest(data) == digest
            self.pieces[digest] = data

    def lacks(self, root: bytes) -> tuple[bytes, ...]:
        wanted = {piece.digest for file in files(self.held[root]) for piece in file.pieces}
        return tuple(sorted(wanted - self.pieces.keys()))


def bring(sender: Sender, gateway: Gateway, tree: Directory) -> None:
    for message in sender.offer(tree).messages:
        gateway.take(message)
    while gateway.answers:
        for message in sender.needed(gateway.answers.pop()):
            gateway.take(message)
    wants = SyncWants(root=tree.digest.hex())
    for message in sender.wanted(wants, join_digests(gateway.lacks(tree.digest))):
        gateway.take(message)
    assert gateway.held[tree.digest] == tree
    assert gateway.lacks(tree.digest) == ()


@given(st.lists(models, min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_the_gateway_ends_with_what_is_on_the_laptop(tmp_path: Path, sequence: list[dict[bytes, object]]) -> None:
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    for model in sequence:
        write(tmp_path / "t", model)
        try:
            tree = Scanner(tmp_path / "t").scan().tree
        except LinkLeavesTree:
            continue
        bring(sender, gateway, tree)


def scanned(path: Path, model: dict[bytes, object]) -> Directory:
    write(path, model)
    return Scanner(path).scan().tree


def test_a_small_change_is_one_message_with_its_pieces(tmp_path: Path) -> None:
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    bring(sender, gateway, scanned(tmp_path / "t", {b"a": b"1", b"b": b"2"}))
    offered = sender.offer(scanned(tmp_path / "t", {b"a": b"1", b"b": b"changed"}))
    assert offered.files == 1
    ((header, buffers),) = offered.messages
    assert isinstance(header, SyncOffer)
    gateway.take((header, buffers))
    assert gateway.lacks(offered.root) == ()
    assert sum(map(len, buffers)) < 300


def test_the_same_version_again_sends_nothing(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "t")
    tree = scanned(tmp_path / "t", {b"a": b"1"})
    sender.offer(tree)
    sent = sender.bytes_sent
    assert sender.offer(tree).messages == ()
    assert sender.bytes_sent == sent


def many(count: int, **changed: bytes) -> dict[bytes, object]:
    model: dict[bytes, object] = {b"%d" % number: b"content %d" % number for number in range(count)}
    return {**model, **{name.encode(): content for name, content in changed.items()}}


def test_a_large_tree_is_first_asked_for_by_name(tmp_path: Path) -> None:
    tree = scanned(tmp_path / "t", many(2000))
    offered = Sender(tmp_path / "t").offer(tree)
    assert offered.messages == ((SyncOffer(root=tree.digest.hex()), ()),)
    gateway = Gateway()
    bring(Sender(tmp_path / "t"), gateway, tree)
    again = Sender(tmp_path / "t")
    bring(again, gateway, tree)
    assert again.bytes_sent == 0


def test_a_version_of_an_earlier_session_serves_as_base(tmp_path: Path) -> None:
    gateway = Gateway()
    before = scanned(tmp_path / "t", many(2000))
    bring(Sender(tmp_path / "t"), gateway, before)
    after = scanned(tmp_path / "t", many(2000, new=b"file"))
    again = Sender(tmp_path / "t", [before])
    bring(again, gateway, after)
    assert again.bytes_sent < 500


def test_a_version_no_longer_remembered_is_not_told(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "t")
    assert sender.needed(SyncNeed(root="0" * 64)) == ()
    ((header, _),) = sender.wanted(SyncWants(root="0" * 64), bytes(32))
    assert isinstance(header, SyncGone)
    for number in range(12):
        sender.offer(scanned(tmp_path / "t", {b"a": b"%d" % number}))
    assert len(sender._versions) == 8


def test_pieces_go_out_in_packs(tmp_path: Path) -> None:
    rng = random.Random(0)
    tree = scanned(tmp_path / "t", {b"%d" % number: rng.randbytes(60_000) for number in range(50)})
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    digests = join_digests(tuple(file.digest for file in files(tree)))
    packs = list(sender.wanted(SyncWants(root=tree.digest.hex()), digests))
    assert [type(header) for header, _ in packs] == [SyncPieces] * 2
    assert sum(len(unpack(unsqueeze(buffers[0], header.size))) for header, buffers in packs) == 50  # type: ignore[union-attr]


def test_packs_come_in_the_order_asked_and_end_with_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshgate_sync.sender._PACK", 3000)
    contents = {b"%03d" % number: b"%d" % number * 400 for number in range(100, 150)}
    tree = scanned(tmp_path / "t", contents)
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    wanted = [piece_digest(contents[name]) for name in sorted(contents)]
    (tmp_path / "t/120").unlink()
    *packs, (last, _) = sender.wanted(SyncWants(root=tree.digest.hex()), join_digests(tuple(wanted)))
    assert last == SyncGone(root=tree.digest.hex(), path="120")
    came = [digest for header, (buffer,) in packs for digest, _ in unpack(unsqueeze(buffer, header.size))]  # type: ignore[union-attr]
    assert came == wanted[: len(came)]
    assert 15 < len(came) <= 20


def test_what_nobody_takes_any_more_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.sender._PACK", 3000)
    tree = scanned(tmp_path / "t", many(500))
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    packs = sender.wanted(SyncWants(root=tree.digest.hex()), join_digests(tuple(file.digest for file in files(tree))))
    next(packs)
    packs.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshgate-pack")]


def test_a_great_many_tiny_files_fit_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.sender.MAX_PACK", 5000)
    monkeypatch.setattr("meshgate_sync.sender._PACK", 3000)
    gateway = Gateway()
    tree = scanned(tmp_path / "t", many(200))
    bring(Sender(tmp_path / "t"), gateway, tree)
    assert gateway.lacks(tree.digest) == ()


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_file_changed_since_the_scan_is_told_gone(tmp_path: Path, change: str) -> None:
    tree = scanned(tmp_path / "t", {b"a": b"1", b"b": b"2"})
    (tmp_path / "t/a").write_bytes(b"3") if change == "edited" else (tmp_path / "t/a").unlink()
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    for message in sender.offer(tree).messages:
        gateway.take(message)
    lacking = gateway.lacks(tree.digest)
    assert len(lacking) == 1
    ((header, _),) = sender.wanted(SyncWants(root=tree.digest.hex()), join_digests(lacking))
    assert header == SyncGone(root=tree.digest.hex(), path="a")


# --- packs and compression ----------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5))
def test_what_is_packed_is_unpacked(contents: list[bytes]) -> None:
    pieces = [(piece_digest(data), data) for data in contents]
    assert unpack(pack(pieces)) == pieces
    names = tuple(digest for digest, _ in pieces)
    assert split_digests(join_digests(names)) == names


@given(st.one_of(st.binary(max_size=300), st.integers(0, 200_000).map(lambda size: b"ab" * size)))
def test_what_is_squeezed_comes_out_again(data: bytes) -> None:
    squeezed = squeeze(data)
    assert unsqueeze(squeezed, len(data)) == data
    assert len(squeezed) <= len(data) + 1


def test_what_does_not_compress_stays_as_it_is() -> None:
    noise = os.urandom(500_000)
    assert squeeze(noise) == b"\0" + noise
    assert len(squeeze(b"text " * 100_000)) < 1000
    assert len(squeeze(noise[:200_000] + b"text " * 100_000)) < 202_000
    small = os.urandom(100)
    assert squeeze(small) == b"\0" + small


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", 0),
        (b"\0abc", 4),
        (b"\2abc", 3),
        (b"\1abc", 3),
        (squeeze(b"a" * 1000), 999),
        (squeeze(b"a" * 1000)[:-3], 1000),
        (squeeze(b"a" * 1000)[:-9] + b"damage!!!", 1000),
    ],
)
def test_damaged_or_dishonest_sizes_are_refused(data: bytes, size: int) -> None:
    with pytest.raises(MalformedMessage):
        unsqueeze(data, size)


@pytest.mark.parametrize("data", [b"x", bytes(36), bytes(32) + b"\x7f\xff\xff\xff", bytes(32) + b"\0\0\0\1"])
def test_damaged_packs_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)


def test_a_piece_that_is_not_what_its_digest_says_is_refused() -> None:
    good = piece_digest(b"data"), b"data"
    with pytest.raises(MalformedMessage, match="not what its digest says"):
        unpack(pack([good, (piece_digest(b"data"), b"dada")]))


def test_digests_come_in_wholes() -> None:
    with pytest.raises(MalformedMessage):
        split_digests(bytes(33))


def test_headers_have_limits() -> None:
    with pytest.raises(ValidationError):
        SyncOffer(root="0" * 64, pack_size=MAX_PACK + 1)
    with pytest.raises(ValidationError):
        SyncOffer(root="../../etc")

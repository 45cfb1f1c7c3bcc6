from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshgate_sync.errors import LinkLeavesTree, MalformedMessage
from meshgate_sync.tree.delta import decode, patch
from meshgate_sync.tree.scan import Scanner
from meshgate_sync.tree.tree import EMPTY, Directory, files, piece_digest
from meshgate_sync.upload import (
    MAX_PACK,
    Message,
    Patience,
    Sender,
    SyncGone,
    SyncNeed,
    SyncOffer,
    SyncPieces,
    SyncWants,
    compress,
    decompress,
    join_digests,
    pack,
    split_digests,
    unpack,
)
from tests.sync.trees import models, write


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


class Gateway:
    """The receiver of a sender's messages."""

    def __init__(self) -> None:
        self.held: dict[bytes, Directory] = {bytes(32): EMPTY}
        self.pieces: dict[bytes, bytes] = {}
        self.needs: list[SyncNeed] = []

    def receive(self, message: Message) -> None:
        header, buffers = message
        if isinstance(header, SyncOffer):
            root = bytes.fromhex(header.root)
            if header.pack_size:
                self.store(unpack(decompress(buffers[1], header.pack_size)))
            if not header.delta_size:
                if root not in self.held:
                    self.request_base(header.root)
                return
            delta = decode(decompress(buffers[0], header.delta_size))
            if delta.base in self.held:
                self.held[root] = patch(self.held[delta.base], delta)
            else:
                self.request_base(header.root)
        elif isinstance(header, SyncPieces):
            self.store(unpack(decompress(buffers[0], header.size)))

    def request_base(self, root: str) -> None:
        self.needs.append(SyncNeed(root=root, held=tuple(held.hex() for held in reversed(self.held))))

    def store(self, pieces: list[tuple[bytes, bytes]]) -> None:
        for digest, data in pieces:
            assert piece_digest(data) == digest
            self.pieces[digest] = data

    def lacks(self, root: bytes) -> tuple[bytes, ...]:
        wanted = {piece.digest for file in files(self.held[root]) for piece in file.pieces}
        return tuple(sorted(wanted - self.pieces.keys()))


def upload(sender: Sender, gateway: Gateway, tree: Directory) -> None:
    for message in sender.offer(tree).messages:
        gateway.receive(message)
    while gateway.needs:
        for message in sender.answer_need(gateway.needs.pop()):
            gateway.receive(message)
    wants = SyncWants(root=tree.digest.hex())
    for message in sender.answer_wants(wants, join_digests(gateway.lacks(tree.digest))):
        gateway.receive(message)
    assert gateway.held[tree.digest] == tree
    assert gateway.lacks(tree.digest) == ()


@given(st.lists(models, min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_the_gateway_ends_up_with_what_is_on_disk(tmp_path: Path, sequence: list[dict[bytes, object]]) -> None:
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    for model in sequence:
        write(tmp_path / "t", model)
        try:
            tree = Scanner(tmp_path / "t").scan().tree
        except LinkLeavesTree:
            continue
        upload(sender, gateway, tree)


def scanned(path: Path, model: dict[bytes, object]) -> Directory:
    write(path, model)
    return Scanner(path).scan().tree


def test_a_small_change_is_one_message_with_its_pieces(tmp_path: Path) -> None:
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    upload(sender, gateway, scanned(tmp_path / "t", {b"a": b"1", b"b": b"2"}))
    offered = sender.offer(scanned(tmp_path / "t", {b"a": b"1", b"b": b"changed"}))
    assert offered.files == 1
    ((header, buffers),) = offered.messages
    assert isinstance(header, SyncOffer)
    gateway.receive((header, buffers))
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


def test_a_large_tree_is_first_offered_by_its_digest(tmp_path: Path) -> None:
    tree = scanned(tmp_path / "t", many(2000))
    offered = Sender(tmp_path / "t").offer(tree)
    assert offered.messages == ((SyncOffer(root=tree.digest.hex()), ()),)
    gateway = Gateway()
    upload(Sender(tmp_path / "t"), gateway, tree)
    again = Sender(tmp_path / "t")
    upload(again, gateway, tree)
    assert again.bytes_sent == 0


def test_requests_for_a_forgotten_version_get_no_pieces(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "t")
    assert sender.answer_need(SyncNeed(root="0" * 64)) == ()
    ((header, _),) = sender.answer_wants(SyncWants(root="0" * 64), bytes(32))
    assert isinstance(header, SyncGone)
    for number in range(12):
        sender.offer(scanned(tmp_path / "t", {b"a": b"%d" % number}))
    assert len(sender._versions) == 8


def test_pieces_are_sent_in_packs(tmp_path: Path) -> None:
    rng = random.Random(0)
    tree = scanned(tmp_path / "t", {b"%d" % number: rng.randbytes(60_000) for number in range(50)})
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    digests = join_digests(tuple(file.digest for file in files(tree)))
    packs = list(sender.answer_wants(SyncWants(root=tree.digest.hex()), digests))
    assert [type(header) for header, _ in packs] == [SyncPieces] * 2
    assert sum(len(unpack(decompress(buffers[0], header.size))) for header, buffers in packs) == 50  # type: ignore[union-attr]


def test_packs_keep_the_requested_order_and_end_with_sync_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.upload._PACK", 3000)
    contents = {b"%03d" % number: b"%d" % number * 400 for number in range(100, 150)}
    tree = scanned(tmp_path / "t", contents)
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    wanted = [piece_digest(contents[name]) for name in sorted(contents)]
    (tmp_path / "t/120").unlink()
    *packs, (last, _) = sender.answer_wants(SyncWants(root=tree.digest.hex()), join_digests(tuple(wanted)))
    assert last == SyncGone(root=tree.digest.hex(), path="120")
    received = [digest for header, (buffer,) in packs for digest, _ in unpack(decompress(buffer, header.size))]  # type: ignore[union-attr]
    assert received == wanted[: len(received)]
    assert 15 < len(received) <= 20


def test_a_closed_iterator_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.upload._PACK", 3000)
    tree = scanned(tmp_path / "t", many(500))
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    digests = join_digests(tuple(file.digest for file in files(tree)))
    packs = sender.answer_wants(SyncWants(root=tree.digest.hex()), digests)
    next(packs)
    packs.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshgate-pack")]


def test_many_tiny_files_stay_within_the_size_of_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.upload.MAX_PACK", 5000)
    monkeypatch.setattr("meshgate_sync.upload._PACK", 3000)
    gateway = Gateway()
    tree = scanned(tmp_path / "t", many(200))
    upload(Sender(tmp_path / "t"), gateway, tree)
    assert gateway.lacks(tree.digest) == ()


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_file_that_changed_after_the_scan_is_reported_as_gone(tmp_path: Path, change: str) -> None:
    tree = scanned(tmp_path / "t", {b"a": b"1", b"b": b"2"})
    (tmp_path / "t/a").write_bytes(b"3") if change == "edited" else (tmp_path / "t/a").unlink()
    sender, gateway = Sender(tmp_path / "t"), Gateway()
    for message in sender.offer(tree).messages:
        gateway.receive(message)
    lacking = gateway.lacks(tree.digest)
    assert len(lacking) == 1
    ((header, _),) = sender.answer_wants(SyncWants(root=tree.digest.hex()), join_digests(lacking))
    assert header == SyncGone(root=tree.digest.hex(), path="a")


def test_a_file_whose_name_is_not_utf_8_is_reported_as_gone(tmp_path: Path) -> None:
    tree = scanned(tmp_path / "t", {b"a\xff": b"1"})
    sender = Sender(tmp_path / "t")
    sender.offer(tree)
    os.unlink(os.fsencode(tmp_path) + b"/t/a\xff")
    wanted = join_digests(tuple(piece.digest for file in files(tree) for piece in file.pieces))
    ((header, _),) = sender.answer_wants(SyncWants(root=tree.digest.hex()), wanted)
    assert r'"path":"a\\xff"' in header.model_dump_json()


def test_patience_ends_after_a_time_in_which_nothing_moved() -> None:
    patience = Patience(10, 100.0)
    assert not patience.ends("a", 105.0)  # the first look
    assert not patience.ends("a", 114.0)
    assert patience.left == 1
    assert not patience.ends("b", 116.0)
    assert not patience.ends(None, 500.0)
    assert not patience.ends("b", 509.0)
    assert not patience.ends(None, 520.0)
    assert patience.ends("b", 521.0)

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast

import pytest

from meshgate_sync.store.objects import Assembly, Objects
from meshgate_sync.tree.delta import full_delta
from meshgate_sync.tree.tree import NOTHING, File, Piece
from tests.sync.store.store_host import MODEL, Host, damage, objects, partials, raising
from tests.sync.trees import Content, on_disk, plain


def test_files_are_read_only_and_their_times_follow_their_content(host: Host, content: Content) -> None:
    one = host.sync(content.tree(MODEL))
    other = host.sync(content.tree({**MODEL, b"a.py": b"ONE", b"copy.py": b"one"}))
    assert os.stat(f"{one}/a.py").st_mode & 0o777 == 0o444
    assert os.stat(f"{one}/run").st_mode & 0o777 == 0o555
    assert os.stat(f"{one}/a.py").st_mtime != os.stat(f"{other}/a.py").st_mtime
    assert os.stat(f"{one}/a.py").st_mtime == os.stat(f"{other}/copy.py").st_mtime
    assert os.stat(f"{one}/d/b").st_ino == os.stat(f"{other}/d/b").st_ino


def test_a_large_file_is_assembled_from_ranges_of_others(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content.tree({b"one": bytes(range(200)), b"two": bytes(range(200, 0, -1)) * 2})
    host.sync(first)
    mixed = (
        bytes(range(96)) + b"new piece of 16b" + bytes(range(200, 0, -1)) * 2 + bytes(range(96, 200)) + bytes(range(32))
    )
    for copying in ("in the kernel", "by reading"):
        if copying == "by reading":
            monkeypatch.setattr(os, "copy_file_range", raising(errno.EXDEV))
        host.fetched = 0
        name = copying.encode()
        path = host.sync(content.tree({**{b"one": bytes(range(200))}, name: mixed + name * 16}), first)
        assert on_disk(path)[name] == mixed + name * 16
        assert host.fetched < 20
    assert host.store.verify() == []


def test_ranges_are_not_copied_from_a_modified_object(host: Host, content: Content) -> None:
    first, second = content.tree({b"f": bytes(range(200))}), content.tree({b"f": bytes(range(200)) + b"more"})
    path = host.sync(first)
    damage(Path(path, "f"), keep_time=False)
    assert on_disk(host.sync(second, first)) == {b"f": bytes(range(200)) + b"more"}


@pytest.mark.parametrize("keep_time", [True, False])
def test_a_corrupt_object_is_found_and_fetched_again(host: Host, content: Content, keep_time: bool) -> None:
    tree = content.tree(MODEL)
    host.sync(tree)
    damaged = objects(host)[0]
    damage(damaged, keep_time=keep_time)
    (problem,) = host.store.verify()
    assert problem.path == str(damaged)
    assert problem.root == tree.digest.hex()
    assert not host.store.ready(tree.digest)
    assert on_disk(host.sync(tree)) == plain(MODEL)
    assert host.store.verify() == []


def test_a_corrupt_piece_is_not_read(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    host.sync(tree)
    (digest,) = content.pieces
    assert host.store.read(digest) == b"some content"
    damage(objects(host)[0], keep_time=True)
    assert host.store.read(digest) is None
    assert digest in host.store.prepare(full_delta(tree)).missing
    assert host.store.read(b"x" * 32) is None


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_store_that_is_opened_again_reads_every_piece(tmp_path: Path, content: Content, snapshots: bool) -> None:
    end = b"the same end"
    tree = content.tree({b"one": b"1" * 16 + b"3" * 16 + end, b"two": b"2" * 16 + b"3" * 16 + end, b"three": end})
    host = Host(tmp_path / "home", content, snapshots=snapshots)
    host.sync(tree)
    host.reopen()
    fetched = host.fetched
    host.sync(tree)
    assert {digest: host.store.read(digest) for digest in content.pieces} == content.pieces
    assert host.fetched == fetched


def test_a_piece_of_a_deleted_object_is_read_from_another_one(tmp_path: Path, content: Content) -> None:
    end = b"the same end"
    tree = content.tree({b"one": b"1" * 16 + end, b"two": b"2" * 16 + end})
    host = Host(tmp_path / "home", content, snapshots=False)
    host.sync(tree)
    for deleted in objects(host):
        kept = deleted.read_bytes()
        deleted.unlink()
        assert None in [host.store.read(digest) for digest in content.pieces]
        host.sync(tree)
        assert {digest: host.store.read(digest) for digest in content.pieces} == content.pieces
        assert deleted.read_bytes() == kept


def test_a_deleted_object_is_missing_again(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    host.sync(tree)
    objects(host)[0].unlink()
    (digest,) = content.pieces
    assert host.store.read(digest) is None
    assert len(host.store.verify()) == 0 or not host.store.ready(tree.digest)


def test_an_object_modified_through_a_link_is_not_used_for_the_next_version(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    path = host.sync(tree)
    damage(Path(path, "a"), keep_time=False)
    host.reopen()
    other = content.tree({b"b": b"some content"})
    assert on_disk(host.sync(other)) == {b"b": b"some content"}


@pytest.mark.timeout(60)
def test_a_file_of_many_equal_pieces_is_assembled_in_linear_time(tmp_path: Path) -> None:
    """Quadratic time would be minutes."""

    class Nothing:
        """Objects of which none has a piece."""

        def location_of(self, digest: bytes) -> None:
            return None

    count = 150_000
    assembly = Assembly(cast("Objects", Nothing()), str(tmp_path / "file"), File((Piece(b"same", 1),) * count))
    assembly.copy_known_pieces()
    assert [len(offsets) for offsets in assembly.missing.values()] == [count]
    assembly.close()


def test_an_unfinished_file_that_was_sealed_before_a_crash_can_be_written_to(tmp_path: Path) -> None:
    """Root could write to it in any case."""
    (tmp_path / "file").touch(0o444)
    Assembly(cast("Objects", None), str(tmp_path / "file"), File((Piece(b"same", 1),))).close()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_only_new_pieces_are_fetched(host: Host, content: Content) -> None:
    first = content.tree(MODEL)
    host.sync(first)
    fetched = host.fetched
    data = bytearray(range(100))
    data[50] = 255
    renamed = {**MODEL, b"moved": MODEL[b"a.py"], b"large": bytes(data), b"plain": b"#!"}
    del renamed[b"a.py"]
    path = host.sync(content.tree(renamed), first)
    assert host.fetched == fetched + 1
    assert on_disk(path) == plain(renamed)


def test_two_versions_that_are_being_fetched_share_a_large_file(host: Host, content: Content) -> None:
    large = bytes(range(100))
    first, second = content.tree({b"f": large}), content.tree({b"g": large})
    one, two = host.store.prepare(full_delta(first)), host.store.prepare(full_delta(second))
    for digest in list(one.missing):
        host.store.add(digest, content.pieces[digest])
    assert one.complete
    assert two.complete
    assert on_disk(host.store.finish(first.digest, base=NOTHING)) == {b"f": large}
    assert on_disk(host.store.finish(second.digest, base=NOTHING)) == {b"g": large}


def test_pieces_of_an_abandoned_version_are_kept(host: Host, content: Content) -> None:
    tree = content.tree({b"f": bytes(range(100))})
    fetch = host.store.prepare(full_delta(tree))
    first = next(iter(fetch.missing))
    host.store.add(first, content.pieces[first])
    host.store.abandon(tree.digest)
    host.reopen()
    assert first not in host.store.prepare(full_delta(tree)).missing


def abandon(host: Host, content: Content, count: int) -> None:
    """So many versions given up, a piece of the large file of each having come."""
    for number in range(count):
        tree = content.tree({b"f": bytes([number]) + bytes(range(100))})
        fetch = host.store.prepare(full_delta(tree))
        first = next(iter(fetch.missing))
        host.store.add(first, content.pieces[first])
        host.store.abandon(tree.digest)


def test_abandoned_versions_keep_no_files_open(host: Host, content: Content) -> None:
    abandon(host, content, 1)
    before = len(os.listdir("/dev/fd"))
    abandon(host, content, 20)
    assert len(os.listdir("/dev/fd")) == before
    assert len(partials(host)) == 20

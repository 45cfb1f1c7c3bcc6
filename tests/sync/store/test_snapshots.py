from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from meshgate_sync.errors import ObjectsDamaged, StoreError, VersionUnavailable
from meshgate_sync.store.gc import Policy, collect
from meshgate_sync.store.home import open_version, snapshot_path
from meshgate_sync.store.store import Store
from meshgate_sync.tree.delta import full_delta
from meshgate_sync.tree.tree import EMPTY, NOTHING, Directory
from tests.sync.store.store_host import MODEL, Crash, Host, crashing, damage, objects, raising
from tests.sync.trees import Content, on_disk, plain
from tests.waiting import DEADLINE


def test_an_unused_snapshot_becomes_the_version_that_replaces_it(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"a.py": b"changed"})
    inode = os.stat(host.sync(first)).st_ino
    path = host.sync(second, first, replaces=first.digest)
    assert os.stat(path).st_ino == inode
    assert not host.store.ready(first.digest)
    assert on_disk(path) == plain({**MODEL, b"a.py": b"changed"})


def test_a_snapshot_that_a_process_opened_is_left_alone(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"changed"})
    path = host.sync(first)
    open_version(str(host.home), first.digest.hex()).close()
    host.sync(second, first, replaces=first.digest)
    assert on_disk(path) == plain(MODEL)


def test_a_snapshot_that_another_session_requested_is_left_alone(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"changed"})
    path = host.sync(first, owner="one")
    host.sync(first, owner="two")
    host.sync(second, first, owner="two", replaces=first.digest)
    assert on_disk(path) == plain(MODEL)
    host.sync(content.tree({b"b": b"3"}), second, owner="one", replaces=first.digest)
    assert not host.store.ready(first.digest)


def test_a_spare_becomes_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"d": b"now a file"})
    host.sync(first)
    assert host.prepare_spares(first) == 2
    assert host.prepare_spares(first) == 0
    spares = {os.stat(path).st_ino for path in (host.home / "spares").iterdir()}
    path = host.sync(second, first)
    assert os.stat(path).st_ino in spares
    assert on_disk(path) == plain({**MODEL, b"d": b"now a file"})
    assert on_disk(snapshot_path(str(host.home), first.digest.hex())) == plain(MODEL)
    assert host.store.snapshots.spares() == [first.digest]


def test_an_empty_version_has_as_many_spares_as_another(host: Host, content: Content) -> None:
    empty, full = content.tree({}), content.tree(MODEL)
    for tree in (empty, full, empty):
        host.sync(tree)
        host.prepare_spares(tree)
        assert host.store.snapshots.spares() == [tree.digest] * 2


def test_spares_follow_the_newest_version(host: Host, content: Content) -> None:
    models: list[dict[bytes, object]] = [{b"a": b"1"}, {b"a": b"2", b"d": {b"b": b"3"}}]
    first, second = (content.tree(model) for model in models)
    host.sync(first)
    host.prepare_spares(first)
    inodes = {os.stat(path).st_ino for path in (host.home / "spares").iterdir()}
    host.sync(second, first, replaces=first.digest)
    host.prepare_spares(second)
    assert host.store.snapshots.spares() == [second.digest] * 2
    assert {os.stat(path).st_ino for path in (host.home / "spares").iterdir()} == inodes
    for path in (host.home / "spares").iterdir():
        assert on_disk(path) == plain(models[1])
    assert host.prepare_spares(content.tree({b"unknown": b""})) == 0


def test_a_gateways_store_has_no_spares(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, snapshots=False)
    tree = content.tree(MODEL)
    host.sync(tree)
    assert host.prepare_spares(tree) == 0


@pytest.mark.parametrize("donor", ["none", "spare", "replaced"])
@pytest.mark.parametrize("past", [False, True])
def test_a_file_that_a_process_modified_is_fetched_again_for_the_next_version(
    host: Host, content: Content, donor: str, past: bool
) -> None:
    models = [{b"a": number, b"cfg": b"as on the laptop", b"d": {b"e": b"1"}} for number in (b"1", b"2", b"3")]
    first, second, third = (content.tree(model) for model in models)
    path = host.sync(first)
    with open_version(str(host.home), first.digest.hex()):
        host.sync(second, first)
        if donor == "spare":
            host.prepare_spares(second)
        damage(Path(path, "cfg"), keep_time=False)
    if past:
        assert host.store.snapshots.remove(first.digest)
    replaces = second.digest if donor == "replaced" else None
    with pytest.raises(ObjectsDamaged, match="changed or vanished"):
        host.sync(third, second, replaces=replaces)
    host.fetched = 0
    assert on_disk(host.sync(third, second)) == models[2]
    assert host.fetched == 1


def test_a_modified_snapshot_is_made_again_when_its_version_is_synced_again(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    path = host.sync(tree)
    with open_version(str(host.home), tree.digest.hex()):
        damage(Path(path, "a.py"), keep_time=False)
        inode = os.stat(path).st_ino
        assert os.stat(host.sync(tree)).st_ino == inode  # the process keeps using it
    with pytest.raises(ObjectsDamaged):
        host.sync(tree)
    assert on_disk(host.sync(tree)) == plain(MODEL)


@pytest.mark.parametrize("when", ["before the spare", "after the spare"])
def test_a_file_modified_through_a_link_is_replaced_in_what_is_made_from_a_spare(
    host: Host, content: Content, when: str
) -> None:
    tree, newer = content.tree(MODEL), content.tree({**MODEL, b"new": b"1"})
    path = host.sync(tree)
    with open_version(str(host.home), tree.digest.hex()):
        if when == "before the spare":
            damage(Path(path, "a.py"), keep_time=False)
        host.prepare_spares(tree)
        damage(Path(path, "a.py"), keep_time=False)
        with pytest.raises(ObjectsDamaged):
            host.sync(newer, tree)
        with pytest.raises(VersionUnavailable, match="not checked within"):
            open_within(host, newer, 0.01)
        assert on_disk(host.sync(newer, tree)) == plain({**MODEL, b"new": b"1"})
        open_version(str(host.home), newer.digest.hex()).close()
    assert host.fetched == len(content.pieces) + 1


def open_within(host: Host, tree: Directory, seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshgate_sync.store.home.CHECK_TIMEOUT", seconds)
        open_version(str(host.home), tree.digest.hex()).close()


def change_everything(snapshot: str) -> None:
    """What a process can do to its snapshot without writing through a link."""
    os.chmod(snapshot, 0o755)
    Path(snapshot, "a.py").unlink()
    Path(snapshot, "a.py").write_bytes(b"ONE")
    status = os.stat(f"{snapshot}/d/b")
    Path(snapshot, "run").unlink()
    Path(snapshot, "results.txt").write_text("new")
    Path(snapshot, "d", "__pycache__").mkdir()
    Path(snapshot, "d", "__pycache__", "b.pyc").write_bytes(b"compiled")
    os.rename(f"{snapshot}/d/l", f"{snapshot}/d/moved")
    Path(snapshot, "d", "b").unlink()
    Path(snapshot, "d", "b").write_bytes(b"TWO")
    os.utime(f"{snapshot}/d/b", ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("running", [True, False])
def test_what_a_process_adds_removes_and_replaces_stays_in_its_snapshot(
    host: Host, content: Content, running: bool
) -> None:
    models = [{**MODEL, b"version": b"%d" % number} for number in range(4)]
    before = EMPTY
    with contextlib.ExitStack() as stack:
        for model in models:
            tree = content.tree(model)
            path = host.sync(tree, before)
            assert on_disk(path) == plain(model)
            version = open_version(str(host.home), tree.digest.hex())
            host.prepare_spares(tree)
            change_everything(path)
            if running:
                stack.enter_context(version)
            else:
                version.close()
            before = tree
        assert host.fetched == len(content.pieces)
        assert host.store.verify() == []


def test_processes_wait_until_a_new_snapshot_is_checked(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    fetch = host.store.prepare(full_delta(tree))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    host.store.finish(tree.digest, base=NOTHING)
    opened = threading.Event()

    def open_it() -> None:
        open_version(str(host.home), tree.digest.hex()).close()
        opened.set()

    thread = threading.Thread(target=open_it)
    thread.start()
    assert not opened.wait(0.05)
    host.store.check(tree.digest)
    assert opened.wait(DEADLINE)
    thread.join()


def test_a_snapshot_whose_store_died_before_the_check_cannot_be_opened(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    fetch = host.store.prepare(full_delta(tree))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    host.store.finish(tree.digest, base=NOTHING)
    host.store.close()
    with pytest.raises(VersionUnavailable, match="was interrupted"):
        open_version(str(host.home), tree.digest.hex())
    host._open()
    assert not host.store.ready(tree.digest)
    assert on_disk(host.sync(tree)) == plain(MODEL)
    open_version(str(host.home), tree.digest.hex()).close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_snapshot_that_another_store_has_yet_to_check_can_be_opened_if_it_is_intact(
    host: Host, content: Content, damaged: bool
) -> None:
    tree = content.tree(MODEL)
    fetch = host.store.prepare(full_delta(tree))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    host.store.finish(tree.digest, base=NOTHING)
    other = Store(str(host.home))
    other.prepare(full_delta(tree))
    if damaged:
        Path(host.store.snapshots.path(tree.digest), "a.py").unlink()
    other.check(tree.digest)
    host.store.close()
    if damaged:
        with pytest.raises(VersionUnavailable, match="was interrupted"):
            open_version(str(host.home), tree.digest.hex())
    else:
        open_version(str(host.home), tree.digest.hex()).close()
    other.close()


def test_a_hold_lasts_ten_minutes(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.sync(first)
    host.store.hold(first.digest, "me")
    host.sync(second, first)
    (note,) = (host.home / "held").iterdir()
    os.utime(note, (0, time.time() - 500))
    collect(host.store, Policy(keep_newest=0, max_age=0.0, grace_period=0.0))
    assert host.store.ready(first.digest)
    os.utime(note, (0, time.time() - 601))
    collect(host.store, Policy(keep_newest=0, max_age=0.0, grace_period=0.0))
    assert not host.store.ready(first.digest)
    assert not note.exists()


def test_a_snapshot_that_another_program_removed_cannot_be_held_and_is_made_again(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"1"})
    path = Path(host.sync(tree))
    shutil.rmtree(path)
    with pytest.raises(StoreError, match=r"has been removed from .*; sync again"):
        host.store.hold(tree.digest, "me")
    host.sync(tree)
    host.store.hold(tree.digest, "me")
    assert on_disk(path) == {b"a": b"1"}


@pytest.mark.parametrize("stale", [False, True])
def test_a_crash_at_any_point_while_spares_are_made_leaves_only_complete_ones(tmp_path: Path, stale: bool) -> None:
    newer = {**MODEL, b"a.py": b"newer", b"more": {b"x": b"y"}}
    after, crashed = 0, True
    while crashed:
        content = Content()
        old, new = content.tree(MODEL), content.tree(newer)
        host = Host(tmp_path / f"{after}", content)
        host.sync(old)
        if stale:
            host.prepare_spares(old)
        host.sync(new, old)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, Crash)
            with contextlib.suppress(Crash):
                host.prepare_spares(new)
            crashed = happened()
        os.close(host.store._held)  # the process is gone
        host.store = Store(str(host.home))
        for path in (host.home / "spares").iterdir():
            root = bytes.fromhex(path.name.partition("-")[2])
            assert on_disk(path) == plain({old.digest: MODEL, new.digest: newer}[root])
        assert os.listdir(host.home / "work") == [os.path.basename(host.store._work)]
        assert host.prepare_spares(new) >= 0
        assert host.store.snapshots.spares() == [new.digest] * 2
        host.store.close()
        after += 1
    assert after > 5


def test_a_snapshot_that_was_not_checked_does_not_become_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"a.py": b"changed"})
    fetch = host.store.prepare(full_delta(first))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    inode = os.stat(host.store.finish(first.digest, base=NOTHING)).st_ino
    assert os.stat(host.sync(second, first, replaces=first.digest)).st_ino != inode


def test_files_are_copied_if_they_cannot_be_linked(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raising(errno.EMLINK))
    path = host.sync(content.tree(MODEL))
    assert on_disk(path) == plain(MODEL)
    assert os.stat(f"{path}/a.py").st_mode & 0o777 == 0o444


def test_a_deleted_object_is_fetched_again_for_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"new": b"1"})
    host.sync(first)
    next(path for path in objects(host) if path.read_bytes() == b"one").unlink()
    with pytest.raises(ObjectsDamaged, match="vanished"):
        host.sync(second, first)
    assert on_disk(host.sync(second, first)) == plain({**MODEL, b"new": b"1"})


def test_an_object_that_is_replaced_while_it_is_linked_is_linked_again(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = os.link, iter([True])

    def link(source: str, target: bytes) -> None:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "its last name was taken from it just now")
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    assert on_disk(host.sync(content.tree(MODEL))) == plain(MODEL)

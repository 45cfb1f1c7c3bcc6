from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import BaseUnknown, ObjectsDamaged, StoreError, StoreFull
from meshgate_sync.store.home import open_version, snapshot_path
from meshgate_sync.store.store import Store
from meshgate_sync.tree.delta import diff, full_delta
from meshgate_sync.tree.tree import EMPTY, NOTHING
from tests.sync.store.store_host import ANY, MODEL, Crash, Host, crashing, damage, objects, partials
from tests.sync.trees import Content, models, on_disk, plain


def test_a_version_becomes_a_directory_with_its_content(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    path = host.sync(tree)
    assert path == snapshot_path(str(host.home), tree.digest.hex())
    assert on_disk(path) == plain(MODEL)
    assert host.store.ready(tree.digest)
    assert host.store.verify() == []


def test_going_back_to_an_earlier_version_fetches_nothing(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"1"})
    host.sync(first)
    host.sync(second, first)
    fetched = host.fetched
    host.sync(first, second)
    assert host.fetched == fetched


def test_an_unknown_base_raises(host: Host, content: Content) -> None:
    with pytest.raises(BaseUnknown):
        host.store.prepare(diff(content.tree({b"a": b"1"}), content.tree({b"b": b"2"})))


def test_the_base_may_be_a_version_that_is_still_being_fetched(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"1", b"b": b"2"})
    host.store.prepare(full_delta(first))
    path = host.sync(second, first)
    assert on_disk(path) == {b"a": b"1", b"b": b"2"}
    host.store.add(*next((digest, data) for digest, data in content.pieces.items() if data == b"1"))
    assert on_disk(host.store.finish(first.digest, base=NOTHING)) == {b"a": b"1"}


def test_a_gateways_store_makes_no_snapshots(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, snapshots=False)
    tree = content.tree(MODEL)
    assert not host.store.ready(tree.digest)
    path = host.sync(tree)
    assert host.store.ready(tree.digest)
    assert not os.path.exists(path)
    assert host.store.verify() == []


def test_a_copy_of_a_version_is_independent_of_the_store(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, snapshots=False)
    tree = content.tree(MODEL)
    host.sync(tree)
    copy = tmp_path / "copy"
    host.store.copy_version(tree.digest, str(copy))
    assert on_disk(str(copy)) == plain(MODEL)
    for file in copy.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.write_bytes(b"other")
    assert host.store.verify() == []


def test_a_version_that_is_not_complete_is_not_copied(tmp_path: Path, host: Host, content: Content) -> None:
    with pytest.raises(BaseUnknown):
        host.store.copy_version(bytes(31) + b"1", str(tmp_path / "unknown"))
    tree = content.tree({b"a": b"1"})
    host.sync(tree)
    (path,) = objects(host)
    damage(path, keep_time=False)
    with pytest.raises(ObjectsDamaged):
        host.store.copy_version(tree.digest, str(tmp_path / "damaged"))
    path.unlink()
    with pytest.raises(StoreError):
        host.store.copy_version(tree.digest, str(tmp_path / "missing"))


@given(st.lists(models, min_size=2, max_size=5), st.randoms(use_true_random=False))
@ANY
def test_any_sequence_of_versions_is_byte_identical(
    tmp_path_factory: pytest.TempPathFactory, sequence: list[dict[bytes, object]], rng: random.Random
) -> None:
    content = Content()
    host = Host(tmp_path_factory.mktemp("any") / "home", content)
    before = EMPTY
    for model in sequence:
        tree = content.tree(model)
        choice = rng.randrange(4)
        if choice == 1 and before.entries:
            host.prepare_spares(before)
        if choice == 2:
            host.reopen()
        if choice == 3 and host.store.ready(before.digest):
            open_version(str(host.home), before.digest.hex()).close()
        path = host.sync(tree, before, replaces=before.digest)
        assert on_disk(path) == plain(model)
        before = tree
    assert host.store.verify() == []
    host.store.close()


def test_a_store_starts_over_after_a_reboot(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, boot="first")
    tree = content.tree(MODEL)
    host.sync(tree)
    host.prepare_spares(tree)
    host.store.close()
    host.reopen_as("second")
    assert not host.store.ready(tree.digest)
    assert host.store.snapshots.spares() == []
    assert objects(host) == []
    fetched = host.fetched
    assert on_disk(host.sync(tree)) == plain(MODEL)
    assert host.fetched == 2 * fetched
    host.reopen()
    assert host.store.ready(tree.digest)


def test_a_crash_at_any_point_of_the_first_opening_after_a_reboot_leaves_no_old_files(tmp_path: Path) -> None:
    after = 0
    crashed = True
    while crashed:
        content = Content()
        host = Host(tmp_path / str(after), content, boot="first")
        tree = content.tree(MODEL)
        host.sync(tree)
        host.prepare_spares(tree)
        damage(next(path for path in objects(host) if path.read_bytes() == b"one"), keep_time=True)
        host.store.close()
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, Crash)
            with contextlib.suppress(Crash):
                opened = Host(host.home, content, boot="second")
                opened.sync(content.tree({b"small": b"2"}))
                opened.store.close()
            crashed = happened()
        host.reopen_as("second")
        assert host.store.snapshots.spares() == []
        assert not host.store.ready(tree.digest)
        assert on_disk(host.sync(tree)) == plain(MODEL)
        assert host.store.verify() == []
        host.store.close()
        after += 1
    assert after > 10


@pytest.mark.parametrize("kind", ["replace", "spare", "fresh"])
def test_a_crash_at_any_point_leaves_a_store_that_verifies(tmp_path: Path, kind: str) -> None:
    model = {**MODEL, b"a.py": b"changed", b"new": {b"x": b"y"}, b"large": bytes(range(50)) + bytes(60)}
    after = 0
    crashed = True
    while crashed:
        content = Content()
        old, new = content.tree(MODEL), content.tree(model)
        host = Host(tmp_path / f"{kind}-{after}", content)
        host.sync(old)
        if kind == "spare":
            host.prepare_spares(old)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, Crash)
            with contextlib.suppress(Crash):
                host.sync(new, old, replaces=old.digest if kind == "replace" else None)
            crashed = happened()
        os.close(host.store._held)  # the process is gone
        host.store = Store(str(host.home))
        assert host.store.verify() == []
        for root in host.store.snapshots.roots():
            assert on_disk(host.store.snapshots.path(root)) == plain({old.digest: MODEL, new.digest: model}[root])
        assert on_disk(host.sync(new)) == plain(model)
        assert on_disk(host.sync(old)) == plain(MODEL)
        assert os.listdir(host.home / "work") == [os.path.basename(host.store._work)]
        host.store.close()
        after += 1
    assert after > 20


def test_a_disk_that_is_full_at_any_point_raises_and_the_store_recovers(tmp_path: Path) -> None:
    model = {**MODEL, b"a.py": b"changed", b"large": bytes(range(50)) + bytes(60)}
    after = 0
    failed = True
    while failed:
        content = Content()
        old, new = content.tree(MODEL), content.tree(model)
        host = Host(tmp_path / f"full-{after}", content)
        host.sync(old)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, lambda: OSError(errno.ENOSPC, "no space"))
            try:
                path = host.sync(new, old, replaces=old.digest)
            except StoreFull:
                assert happened()
            else:
                assert on_disk(path) == plain(model)
            failed = happened()
        assert on_disk(host.sync(new, old)) == plain(model)
        assert host.store.verify() == []
        host.store.close()
        after += 1
    assert after > 10


def test_a_changed_large_file_needs_its_whole_size_before_anything_is_written(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = content.tree({b"large": bytes(64_000)}), content.tree({b"large": bytes(64_000) + b"more"})
    host.sync(before)
    disk = SimpleNamespace(f_bavail=63, f_frsize=1000, f_blocks=100)
    monkeypatch.setattr("meshgate_sync.store.store.disk_of", lambda _: disk)
    with pytest.raises(StoreFull, match=r"0\.1 MB are needed, and 0\.1 MB are free"):
        host.store.prepare(diff(before, after))
    assert partials(host) == []
    disk.f_bavail = 65
    host.sync(after, before)


def test_other_disk_errors_name_the_store(host: Host, content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing(monkeypatch, 0, lambda: OSError(errno.EIO, "broken"))
    with pytest.raises(StoreError, match="broken"):
        host.sync(content.tree(MODEL))


def test_two_processes_may_make_the_same_version_at_once(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    tree = content.tree(MODEL)
    fetches = [host.store.prepare(full_delta(tree)) for host in (one, two)]
    for host, fetch in zip((one, two), fetches, strict=True):
        for digest in list(fetch.missing):
            host.store.add(digest, content.pieces[digest])
    assert one.store.finish(tree.digest, base=NOTHING) == two.store.finish(tree.digest, base=NOTHING)
    assert on_disk(one.store.snapshots.path(tree.digest)) == plain(MODEL)
    one.store.close()
    two.store.close()


def test_unfinished_files_of_a_running_process_are_left_alone(tmp_path: Path, content: Content) -> None:
    one = Host(tmp_path / "home", content)
    tree = content.tree({b"f": bytes(range(100))})
    fetch = one.store.prepare(full_delta(tree))
    first = next(iter(fetch.missing))
    one.store.add(first, content.pieces[first])
    two = Host(tmp_path / "home", content)
    assert first in two.store.prepare(full_delta(tree)).missing
    assert len(os.listdir(one.home / "work")) == 2


def test_an_unfinished_file_of_an_ended_process_does_not_replace_one_being_assembled(
    tmp_path: Path, content: Content
) -> None:
    tree = content.tree({b"f": bytes(range(100))})
    hosts = [Host(tmp_path / "home", content) for _ in range(2)]
    fetches = [host.store.prepare(full_delta(tree)) for host in hosts]
    os.close(hosts[1].store._held)  # the process is gone
    hosts[0].store.remove_partials(0)
    for digest in list(fetches[0].missing):
        hosts[0].store.add(digest, content.pieces[digest])
    path = hosts[0].store.finish(tree.digest, base=NOTHING)
    assert on_disk(path) == {b"f": bytes(range(100))}
    assert hosts[0].store.verify() == []
    hosts[0].store.close()

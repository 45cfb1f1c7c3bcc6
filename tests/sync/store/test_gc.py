from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from meshgate_sync.errors import StoreError
from meshgate_sync.store.gc import Policy, collect, stale_snapshots
from meshgate_sync.tree.delta import full_delta
from meshgate_sync.tree.tree import EMPTY, NOTHING, Directory
from tests.sync.store.store_host import Host, crashing, objects, partials
from tests.sync.store.test_objects import abandon
from tests.sync.trees import Content, on_disk


def test_unfinished_files_are_collected_after_the_grace_period(tmp_path: Path, content: Content) -> None:
    host, dead = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    abandon(host, content, 3)
    fetch = dead.store.prepare(full_delta(content.tree({b"g": bytes(range(200))})))
    assert fetch.missing
    dead.store.close()
    going = host.store.prepare(full_delta(content.tree({b"f": bytes(range(90, 200))})))
    fresh, *old = (path for path in sorted(partials(host)) if not path.name.endswith(next(going.assembling)))
    for path in old:
        os.utime(path, (0, 0))
    collect(host.store)
    assert {path.name for path in partials(host)} == {fresh.name, "partial-" + next(going.assembling)}
    collect(host.store, Policy(grace_period=0.0))
    assert [path.name for path in partials(host)] == ["partial-" + next(going.assembling)]
    for digest in list(going.missing):
        host.store.add(digest, content.pieces[digest])
    assert partials(host) == []


def test_old_versions_are_collected_with_their_objects(host: Host, content: Content) -> None:
    trees = [content.tree({b"a": b"%d" % number, b"same": b"same"}) for number in range(6)]
    for number, tree in enumerate(trees):
        host.sync(tree, trees[number - 1] if number else EMPTY)
        os.utime(host.home / "versions" / tree.digest.hex(), (number, number))
    collected = collect(host.store, Policy(keep_newest=2, max_age=100, grace_period=0), now=10**12)
    assert (collected.versions, collected.objects, collected.bytes) == (4, 4, 4)
    assert set(host.store.snapshots.roots()) == {trees[4].digest, trees[5].digest}
    assert host.store.verify() == []
    host.reopen()
    assert set(host.store.records.trees) == {trees[4].digest, trees[5].digest}
    assert on_disk(host.sync(trees[0])) == {b"a": b"0", b"same": b"same"}


def test_an_old_version_that_is_being_fetched_is_kept(host: Host, content: Content) -> None:
    trees = versions_in_order(host, content, 3, 10)
    for path in objects(host):
        path.unlink()
    host.reopen()
    assert host.store.prepare(full_delta(trees[0])).missing
    collected = collect(host.store, Policy(keep_newest=1, max_age=0.0, grace_period=0.0))
    assert collected.versions == 1
    assert set(host.store.records.trees) == {trees[0].digest, trees[2].digest}


def test_a_store_over_its_size_limit_removes_the_oldest_versions_first(host: Host, content: Content) -> None:
    trees = [content.tree({b"a": bytes([number]) * 10}) for number in range(5)]
    for number, tree in enumerate(trees):
        host.sync(tree)
        os.utime(host.home / "versions" / tree.digest.hex(), (number, number))
    collect(host.store, Policy(keep_newest=1, max_age=1e15, max_bytes=30, grace_period=0), now=10**12)
    assert set(host.store.snapshots.roots()) == {tree.digest for tree in trees[2:]}


def versions_in_order(host: Host, content: Content, count: int, size: int) -> list[Directory]:
    """So many versions, each with a file of its own of ``size`` bytes and one in common, the first the oldest."""
    trees = [content.tree({b"a": bytes([number]) * size, b"same": b"same"}) for number in range(count)]
    now = time.time()
    for number, tree in enumerate(trees):
        host.sync(tree, trees[number - 1] if number else EMPTY)
        os.utime(host.home / "versions" / tree.digest.hex(), (now, now - 60 * (count - number)))
    return trees


def test_space_is_freed_at_once_if_the_disk_is_full(host: Host, content: Content) -> None:
    trees = versions_in_order(host, content, 6, 10)
    collected = collect(host.store, Policy(keep_newest=1, max_age=0.0, grace_period=0.0))
    assert (collected.versions, collected.objects, collected.bytes) == (5, 5, 50)
    assert host.store.snapshots.roots() == [trees[5].digest]
    assert host.store.verify() == []


def test_a_store_one_byte_over_its_limit_removes_one_version(host: Host, content: Content) -> None:
    trees = versions_in_order(host, content, 6, 10)
    collected = collect(host.store, Policy(keep_newest=1, max_bytes=6 * 10 + 4 - 1, grace_period=0.0))
    assert (collected.versions, collected.objects, collected.bytes) == (1, 1, 10)
    assert set(host.store.snapshots.roots()) == {tree.digest for tree in trees[1:]}


def test_objects_that_another_process_just_used_are_kept(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second, third = (content.tree({name: b"of %s" % name, b"same": b"same"}) for name in (b"a", b"b", b"c"))
    one.sync(first)
    for path in objects(one):
        os.utime(path, (0, path.stat().st_mtime))
    two.store.prepare(full_delta(content.tree({b"s": b"same", b"other": b"o"})))
    one.sync(second, first)
    one.sync(third, second)
    one.store.records.remove(first.digest)
    one.store.records.remove(second.digest)
    one.sync(content.tree({b"c": b"of c"}), third)
    collect(one.store, Policy(keep_newest=1, max_age=0.0, grace_period=600))
    left = {path.read_bytes() for path in objects(one)}
    assert b"same" in left
    assert b"of a" not in left


def test_disk_errors_during_collection_raise_store_error(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_in_order(host, content, 3, 10)
    crashing(monkeypatch, 0, lambda: OSError(errno.EIO, "broken"))
    with pytest.raises(StoreError, match="broken"):
        collect(host.store, Policy(keep_newest=1, max_age=0.0, grace_period=0.0))


def test_a_held_version_survives_a_save_and_a_full_disk(tmp_path: Path, content: Content) -> None:
    host, other = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second, third = (content.tree({b"a": number}) for number in (b"1", b"2", b"3"))
    path = host.sync(first)
    host.store.hold(first.digest, "me")
    host.sync(second, first)
    other.sync(third, second, owner="other", replaces=first.digest)
    collect(other.store, Policy(keep_newest=0, max_age=0.0, grace_period=0.0))
    assert on_disk(path) == {b"a": b"1"}
    host.store.snapshots.release("me")
    collect(other.store, Policy(keep_newest=0, max_age=0.0, grace_period=0.0))
    assert host.store.snapshots.roots() == [third.digest]


def test_a_version_is_not_collected_while_it_is_being_finished(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.sync(first)
    host.sync(second, first)
    other = Host(host.home, content)
    ready = host.store.snapshots.ready

    collecting = threading.Thread(
        target=collect, args=(other.store, Policy(keep_newest=0, max_age=0.0, grace_period=0.0))
    )

    def then_collected(root: bytes) -> bool:
        found = ready(root)
        if collecting.ident is None:
            collecting.start()
            collecting.join(0.2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(host.store.snapshots, "ready", then_collected)
        path = host.sync(first, second)
    collecting.join()
    assert on_disk(path) == {b"a": b"1"}


def test_pinned_versions_and_recent_objects_are_kept(host: Host, content: Content) -> None:
    pinned, on_its_way = content.tree({b"a": b"1"}), content.tree({b"f": bytes(range(100)), b"b": b"small"})
    host.sync(pinned, owner="driver")
    fetch = host.store.prepare(full_delta(on_its_way))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    collect(host.store, Policy(keep_newest=0, max_age=0, grace_period=0), now=10**12)
    assert host.store.ready(pinned.digest)
    assert on_disk(host.store.finish(on_its_way.digest, base=NOTHING)) != {}


def test_files_that_disappear_during_collection_are_ignored(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.sync(content.tree({b"a": b"1"}))
    (host.home / "versions" / next(iter(host.store.records.trees)).hex()).unlink()
    assert collect(host.store, now=10**12).versions == 0


def test_snapshots_are_stale_ten_minutes_after_their_versions_were_recorded(host: Host, content: Content) -> None:
    trees = [content.tree({b"a": b"%d" % number}) for number in range(6)]
    now = time.time()
    for number, tree in enumerate(trees):
        host.sync(tree)
        os.utime(host.home / "versions" / tree.digest.hex(), (now, now + number))
    assert stale_snapshots(host.store, now=now + 600) == []
    assert stale_snapshots(host.store, now=now + 601) == [trees[0].digest]
    assert stale_snapshots(host.store, now=now + 10_000) == [tree.digest for tree in trees[:2]]

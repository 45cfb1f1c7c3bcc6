from __future__ import annotations

from pathlib import Path

from meshgate_sync.tree.tree import EMPTY
from tests.sync.store.store_host import Host
from tests.sync.trees import Content, on_disk


def test_invalid_records_are_removed_with_their_snapshots(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.sync(first)
    host.sync(second, first)
    (host.home / "versions" / first.digest.hex()).write_bytes(b"nonsense")
    (host.home / "versions" / "not a digest").write_bytes(b"")
    host.prepare_spares(second)
    host.reopen()
    assert host.store.records.trees == {}
    assert host.store.snapshots.roots() == []
    assert host.store.snapshots.spares() == []


def test_a_long_chain_of_deltas_is_cut(host: Host, content: Content) -> None:
    before = EMPTY
    for number in range(140):
        tree = content.tree({b"a": b"%d" % number, b"b": b"same"})
        host.sync(tree, before, replaces=before.digest)
        before = tree
    host.reopen()
    assert len(host.store.records.trees) == 140


def test_processes_use_each_others_records(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    one.sync(first)
    assert on_disk(two.sync(second, first)) == {b"a": b"2"}
    one.store.records.remove(first.digest)
    third = content.tree({b"a": b"3"})
    two.sync(third, first)
    two.reopen()
    assert {second.digest, third.digest} <= two.store.records.trees.keys()


def test_a_version_that_another_process_removed_is_recorded_again(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    one.sync(first)
    one.sync(second, first)
    two.store.records.remove(first.digest)
    one.sync(first, second)
    one.sync(content.tree({b"a": b"3"}), first)
    two.reopen()
    assert two.store.ready(first.digest)
    assert {first.digest, second.digest} <= two.store.records.trees.keys()

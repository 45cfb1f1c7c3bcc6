from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshgate_sync.errors import VersionUnavailable
from meshgate_sync.store.gc import Policy, collect
from meshgate_sync.store.home import activate, locked, open_version
from tests.sync.store.store_host import MODEL, Host
from tests.sync.trees import Content, on_disk, plain


def test_an_open_snapshot_stays_until_it_is_closed(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    host.sync(tree)
    with open_version(str(host.home), tree.digest.hex()) as version:
        host.store.snapshots.release("me")
        collect(host.store, Policy(keep_newest=0, max_age=0, grace_period=0), now=10**12)
        assert on_disk(version.path) == plain(MODEL)
    collect(host.store, Policy(keep_newest=0, max_age=0, grace_period=0), now=10**12)
    assert not host.store.ready(tree.digest)


def test_a_missing_version_raises_with_the_reason(tmp_path: Path, host: Host) -> None:
    with pytest.raises(VersionUnavailable, match="sync again"):
        open_version(str(host.home), "0" * 64)
    with pytest.raises(VersionUnavailable, match="nothing has been synced"):
        open_version(str(tmp_path / "none"), "0" * 64)


def test_a_newer_version_replaces_the_older_one_on_sys_path(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    monkeypatch.setattr("meshgate_sync.store.home._active", [])
    first, second = content.tree({b"a.py": b"x = 1"}), content.tree({b"a.py": b"x = 2"})
    one, two = host.sync(first), host.sync(second)
    assert activate(str(host.home), first.digest.hex(), ("src", "")) == one
    assert sys.path == [f"{one}/src", one, "", "/elsewhere"]
    assert activate(str(host.home), second.digest.hex()) == two
    assert sys.path == [two, "", "/elsewhere"]
    assert host.store.snapshots.in_use(first.digest)


def test_shared_locks_do_not_exclude_each_other(tmp_path: Path) -> None:
    with locked(str(tmp_path), shared=True), locked(str(tmp_path), shared=True):
        pass

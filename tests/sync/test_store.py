from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshgate_sync.delta import decode, diff, encode, whole
from meshgate_sync.digest import NOTHING
from meshgate_sync.disk import Disk
from meshgate_sync.errors import BaseUnknown, ObjectsDamaged, StoreError, StoreFull, VersionUnavailable
from meshgate_sync.home import activate, locked, open_version, snapshot_path
from meshgate_sync.store import Store
from meshgate_sync.tree import EMPTY, Directory
from meshgate_sync.upkeep import Policy, collect
from tests.sync.trees import Content, models, on_disk, plain

ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class Host:
    """A store, and what a relay would do with it."""

    def __init__(self, home: Path, content: Content, **options: object) -> None:
        self.home = home
        self.content = content
        self.options = options
        self.fetched = 0
        self.store = Store(str(home), **options)  # type: ignore[arg-type]

    def bring(
        self, tree: Directory, base: Directory = EMPTY, *, owner: str = "me", replaces: bytes | None = None
    ) -> str:
        delta = decode(encode(diff(base, tree)))
        fetch = self.store.begin(delta)
        for digest in list(fetch.missing):
            self.fetched += 1
            self.store.add(digest, self.content.pieces[digest])
        assert fetch.complete
        return self.store.finish(tree.digest, base=delta.base, owner=owner, replaces=replaces)

    def reopen(self) -> None:
        self.store.close()
        self._open()

    def reopen_as(self, boot: str) -> None:
        """As the first process after the machine came up; the earlier one has been closed or is dead."""
        self.options = {"boot": boot}
        self._open()

    def _open(self) -> None:
        self.store = Store(str(self.home), **self.options)  # type: ignore[arg-type]


@pytest.fixture
def content() -> Content:
    return Content()


@pytest.fixture
def host(tmp_path: Path, content: Content) -> Host:
    return Host(tmp_path / "home", content)


MODEL: dict[bytes, object] = {
    b"a.py": b"one", b"empty": b"", b"run": (b"#!", True), b"d": {b"b": b"two", b"l": "../a.py", b"e": {}},
    b"large": bytes(range(100)),
}  # fmt: skip


def test_a_version_becomes_a_directory_with_its_content(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    path = host.bring(tree)
    assert path == snapshot_path(str(host.home), tree.digest.hex())
    assert on_disk(path) == plain(MODEL)
    assert host.store.ready(tree.digest)
    assert host.store.verify() == []


def test_files_are_read_only_and_times_follow_content(host: Host, content: Content) -> None:
    one = host.bring(content.tree(MODEL))
    other = host.bring(content.tree({**MODEL, b"a.py": b"ONE", b"copy.py": b"one"}))
    assert os.stat(f"{one}/a.py").st_mode & 0o777 == 0o444
    assert os.stat(f"{one}/run").st_mode & 0o777 == 0o555
    assert os.stat(f"{one}/a.py").st_mtime != os.stat(f"{other}/a.py").st_mtime
    assert os.stat(f"{one}/a.py").st_mtime == os.stat(f"{other}/copy.py").st_mtime
    assert os.stat(f"{one}/d/b").st_ino == os.stat(f"{other}/d/b").st_ino


def test_only_pieces_that_are_new_are_fetched(host: Host, content: Content) -> None:
    first = content.tree(MODEL)
    host.bring(first)
    fetched = host.fetched
    data = bytearray(range(100))
    data[50] = 255
    renamed = {**MODEL, b"moved": MODEL[b"a.py"], b"large": bytes(data), b"plain": b"#!"}
    del renamed[b"a.py"]
    path = host.bring(content.tree(renamed), first)
    assert host.fetched == fetched + 1
    assert on_disk(path) == plain(renamed)


def test_a_large_file_is_made_of_stretches_of_others(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content.tree({b"one": bytes(range(200)), b"two": bytes(range(200, 0, -1)) * 2})
    host.bring(first)
    mixed = (
        bytes(range(96)) + b"new piece of 16b" + bytes(range(200, 0, -1)) * 2 + bytes(range(96, 200)) + bytes(range(32))
    )
    for copying in ("in the kernel", "by reading"):
        if copying == "by reading":
            monkeypatch.setattr(os, "copy_file_range", refusing(errno.EXDEV))
        host.fetched = 0
        name = copying.encode()
        path = host.bring(content.tree({**{b"one": bytes(range(200))}, name: mixed + name * 16}), first)
        assert on_disk(path)[name] == mixed + name * 16
        assert host.fetched < 20
    assert host.store.verify() == []


def refusing(number: int) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    return refuse


def test_stretches_are_not_taken_from_an_object_that_was_written_to(host: Host, content: Content) -> None:
    first, second = content.tree({b"f": bytes(range(200))}), content.tree({b"f": bytes(range(200)) + b"more"})
    path = host.bring(first)
    damage(Path(path, "f"), keep_time=False)
    assert on_disk(host.bring(second, first)) == {b"f": bytes(range(200)) + b"more"}


def test_going_back_to_an_earlier_version_fetches_nothing(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"1"})
    host.bring(first)
    host.bring(second, first)
    fetched = host.fetched
    host.bring(first, second)
    assert host.fetched == fetched


def test_a_base_that_is_not_held_is_named(host: Host, content: Content) -> None:
    with pytest.raises(BaseUnknown):
        host.store.begin(diff(content.tree({b"a": b"1"}), content.tree({b"b": b"2"})))


def test_a_version_may_be_told_against_one_still_on_its_way(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"1", b"b": b"2"})
    host.store.begin(whole(first))
    path = host.bring(second, first)
    assert on_disk(path) == {b"a": b"1", b"b": b"2"}
    host.store.add(*next((digest, data) for digest, data in content.pieces.items() if data == b"1"))
    assert on_disk(host.store.finish(first.digest, base=NOTHING)) == {b"a": b"1"}


def test_two_versions_on_their_way_share_a_large_file(host: Host, content: Content) -> None:
    large = bytes(range(100))
    first, second = content.tree({b"f": large}), content.tree({b"g": large})
    one, two = host.store.begin(whole(first)), host.store.begin(whole(second))
    for digest in list(one.missing):
        host.store.add(digest, content.pieces[digest])
    assert one.complete
    assert two.complete
    assert on_disk(host.store.finish(first.digest, base=NOTHING)) == {b"f": large}
    assert on_disk(host.store.finish(second.digest, base=NOTHING)) == {b"g": large}


def test_a_version_given_up_keeps_its_pieces(host: Host, content: Content) -> None:
    tree = content.tree({b"f": bytes(range(100))})
    fetch = host.store.begin(whole(tree))
    first = next(iter(fetch.missing))
    host.store.add(first, content.pieces[first])
    host.store.forget(tree.digest)
    host.reopen()
    assert first not in host.store.begin(whole(tree)).missing


def superseded(host: Host, content: Content, count: int) -> None:
    """So many versions given up, a piece of the large file of each having come."""
    for number in range(count):
        tree = content.tree({b"f": bytes([number]) + bytes(range(100))})
        fetch = host.store.begin(whole(tree))
        first = next(iter(fetch.missing))
        host.store.add(first, content.pieces[first])
        host.store.forget(tree.digest)


def partials(host: Host) -> list[Path]:
    return list((host.home / "work").glob("*/partial-*"))


def test_versions_given_up_hold_no_files_open(host: Host, content: Content) -> None:
    superseded(host, content, 1)
    before = len(os.listdir("/dev/fd"))
    superseded(host, content, 20)
    assert len(os.listdir("/dev/fd")) == before
    assert len(partials(host)) == 20


def test_what_was_assembled_in_vain_is_collected_after_a_while(tmp_path: Path, content: Content) -> None:
    host, dead = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    superseded(host, content, 3)
    fetch = dead.store.begin(whole(content.tree({b"g": bytes(range(200))})))
    assert fetch.missing
    dead.store.close()
    going = host.store.begin(whole(content.tree({b"f": bytes(range(90, 200))})))
    fresh, *old = (path for path in sorted(partials(host)) if not path.name.endswith(next(going.assembling)))
    for path in old:
        os.utime(path, (0, 0))
    collect(host.store)
    assert {path.name for path in partials(host)} == {fresh.name, "partial-" + next(going.assembling)}
    collect(host.store, Policy(grace=0.0))
    assert [path.name for path in partials(host)] == ["partial-" + next(going.assembling)]
    for digest in list(going.missing):
        host.store.add(digest, content.pieces[digest])
    assert partials(host) == []


def test_a_gateway_s_store_makes_no_snapshots(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, snapshots=False)
    tree = content.tree(MODEL)
    assert not host.store.ready(tree.digest)
    path = host.bring(tree)
    assert host.store.ready(tree.digest)
    assert not os.path.exists(path)
    assert host.store.verify() == []


# --- snapshots ----------------------------------------------------------------------------------------------


def test_a_replaced_version_is_turned_into_the_next(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"a.py": b"changed"})
    inode = os.stat(host.bring(first)).st_ino
    path = host.bring(second, first, replaces=first.digest)
    assert os.stat(path).st_ino == inode
    assert not host.store.ready(first.digest)
    assert on_disk(path) == plain({**MODEL, b"a.py": b"changed"})


def test_a_version_that_a_process_has_opened_is_left_alone(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"changed"})
    path = host.bring(first)
    open_version(str(host.home), first.digest.hex()).close()
    host.bring(second, first, replaces=first.digest)
    assert on_disk(path) == plain(MODEL)


def test_a_version_that_another_driver_asked_for_is_left_alone(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({b"a": b"changed"})
    path = host.bring(first, owner="one")
    host.bring(first, owner="two")
    host.bring(second, first, owner="two", replaces=first.digest)
    assert on_disk(path) == plain(MODEL)
    host.bring(content.tree({b"b": b"3"}), second, owner="one", replaces=first.digest)
    assert not host.store.ready(first.digest)


def test_a_spare_becomes_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"d": b"now a file"})
    host.bring(first)
    assert host.store.prepare_spare(first.digest)
    assert not host.store.prepare_spare(first.digest)
    spare = os.stat(host.home / "spares" / first.digest.hex()).st_ino
    path = host.bring(second, first)
    assert os.stat(path).st_ino == spare
    assert on_disk(path) == plain({**MODEL, b"d": b"now a file"})
    assert on_disk(snapshot_path(str(host.home), first.digest.hex())) == plain(MODEL)
    assert host.store.snapshots.spares() == []


def test_there_is_one_spare_at_most(host: Host, content: Content) -> None:
    for model in ({b"a": b"1"}, {b"a": b"2"}):
        host.bring(content.tree(model))
        host.store.prepare_spare(content.tree(model).digest)
    assert host.store.snapshots.spares() == [content.tree({b"a": b"2"}).digest]
    assert not host.store.prepare_spare(b"x" * 32)


def test_files_are_copied_where_links_are_refused(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EMLINK))
    path = host.bring(content.tree(MODEL))
    assert on_disk(path) == plain(MODEL)
    assert os.stat(f"{path}/a.py").st_mode & 0o777 == 0o444


@given(st.lists(models, min_size=2, max_size=5), st.randoms(use_true_random=False))
@ANY
def test_any_sequence_of_versions_ends_byte_identical(
    tmp_path_factory: pytest.TempPathFactory, sequence: list[dict[bytes, object]], rng: random.Random
) -> None:
    content = Content()
    host = Host(tmp_path_factory.mktemp("any") / "home", content)
    before = EMPTY
    for model in sequence:
        tree = content.tree(model)
        choice = rng.randrange(4)
        if choice == 1 and before.entries:
            host.store.prepare_spare(before.digest)
        if choice == 2:
            host.reopen()
        if choice == 3 and host.store.ready(before.digest):
            open_version(str(host.home), before.digest.hex()).close()
        path = host.bring(tree, before, replaces=before.digest)
        assert on_disk(path) == plain(model)
        before = tree
    assert host.store.verify() == []
    host.store.close()


# --- processes ----------------------------------------------------------------------------------------------


def test_a_process_sees_its_version_whole_until_it_lets_go(host: Host, content: Content) -> None:
    tree = content.tree(MODEL)
    host.bring(tree)
    with open_version(str(host.home), tree.digest.hex()) as version:
        host.store.snapshots.release("me")
        collect(host.store, Policy(newest=0, age=0, grace=0), now=10**12)
        assert on_disk(version.path) == plain(MODEL)
    collect(host.store, Policy(newest=0, age=0, grace=0), now=10**12)
    assert not host.store.ready(tree.digest)


def test_a_version_that_is_not_there_says_so(tmp_path: Path, host: Host) -> None:
    with pytest.raises(VersionUnavailable, match="sync again"):
        open_version(str(host.home), "0" * 64)
    with pytest.raises(VersionUnavailable, match="nothing was ever synced"):
        open_version(str(tmp_path / "none"), "0" * 64)


def test_a_newer_version_takes_the_older_one_s_place_on_the_path(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    monkeypatch.setattr("meshgate_sync.home._active", [])
    first, second = content.tree({b"a.py": b"x = 1"}), content.tree({b"a.py": b"x = 2"})
    one, two = host.bring(first), host.bring(second)
    assert activate(str(host.home), first.digest.hex(), ("src", "")) == one
    assert sys.path == [f"{one}/src", one, "", "/elsewhere"]
    assert activate(str(host.home), second.digest.hex()) == two
    assert sys.path == [two, "", "/elsewhere"]
    assert host.store.snapshots.in_use(first.digest)


# --- damage -------------------------------------------------------------------------------------------------


def damage(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    path.chmod(status.st_mode & 0o777)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def objects(host: Host) -> list[Path]:
    return sorted(path for path in (host.home / "objects").glob("*/*"))


@pytest.mark.parametrize("keep_time", [True, False])
def test_a_corrupt_object_is_found_and_fetched_again(host: Host, content: Content, keep_time: bool) -> None:
    tree = content.tree(MODEL)
    host.bring(tree)
    damaged = objects(host)[0]
    damage(damaged, keep_time=keep_time)
    (problem,) = host.store.verify()
    assert problem.path == str(damaged)
    assert problem.root == tree.digest.hex()
    assert not host.store.ready(tree.digest)
    assert on_disk(host.bring(tree)) == plain(MODEL)
    assert host.store.verify() == []


def test_a_corrupt_piece_is_not_handed_on(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    host.bring(tree)
    (digest,) = content.pieces
    assert host.store.read(digest) == b"some content"
    damage(objects(host)[0], keep_time=True)
    assert host.store.read(digest) is None
    assert digest in host.store.begin(whole(tree)).missing
    assert host.store.read(b"x" * 32) is None


def test_an_object_that_vanished_is_missing_again(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    host.bring(tree)
    objects(host)[0].unlink()
    (digest,) = content.pieces
    assert host.store.read(digest) is None
    assert len(host.store.verify()) == 0 or not host.store.ready(tree.digest)


def test_an_object_written_through_a_link_is_not_used_for_the_next_version(host: Host, content: Content) -> None:
    tree = content.tree({b"a": b"some content"})
    path = host.bring(tree)
    damage(Path(path, "a"), keep_time=False)
    host.reopen()
    other = content.tree({b"b": b"some content"})
    assert on_disk(host.bring(other)) == {b"b": b"some content"}


def test_after_a_reboot_nothing_is_trusted_unread(tmp_path: Path, content: Content) -> None:
    host = Host(tmp_path / "home", content, boot="first")
    tree = content.tree(MODEL)
    host.bring(tree)
    damage(min(objects(host), key=lambda path: path.stat().st_size), keep_time=True)
    host.options = {"boot": "second"}
    host.reopen()
    assert not host.store.ready(tree.digest)
    fetched = host.fetched
    assert on_disk(host.bring(tree)) == plain(MODEL)
    assert host.fetched == fetched + 1
    host.reopen()
    assert host.store.ready(tree.digest)


@pytest.mark.parametrize("donor", ["none", "spare", "replaced"])
@pytest.mark.parametrize("past", [False, True])
def test_a_file_written_to_by_a_process_is_fetched_again_for_the_next_version(
    host: Host, content: Content, donor: str, past: bool
) -> None:
    models = [{b"a": number, b"cfg": b"as on the laptop", b"d": {b"e": b"1"}} for number in (b"1", b"2", b"3")]
    first, second, third = (content.tree(model) for model in models)
    path = host.bring(first)
    with open_version(str(host.home), first.digest.hex()):
        host.bring(second, first)
        if donor == "spare":
            host.store.prepare_spare(second.digest)
        damage(Path(path, "cfg"), keep_time=False)
    if past:
        assert host.store.snapshots.remove(first.digest)
    replaces = second.digest if donor == "replaced" else None
    with pytest.raises(ObjectsDamaged, match="was written to"):
        host.bring(third, second, replaces=replaces)
    host.fetched = 0
    assert on_disk(host.bring(third, second)) == models[2]
    assert host.fetched == 1


def test_a_snapshot_that_a_process_wrote_to_is_made_anew_when_its_version_comes_back(
    host: Host, content: Content
) -> None:
    tree = content.tree(MODEL)
    path = host.bring(tree)
    with open_version(str(host.home), tree.digest.hex()):
        damage(Path(path, "a.py"), keep_time=False)
        inode = os.stat(path).st_ino
        assert os.stat(host.bring(tree)).st_ino == inode  # the process goes on in it
    with pytest.raises(ObjectsDamaged):
        host.bring(tree)
    assert on_disk(host.bring(tree)) == plain(MODEL)


def test_a_spare_is_not_made_of_files_that_a_process_wrote_to(host: Host, content: Content) -> None:
    disk = Disk(host.store, "me")
    tree, newer = content.tree(MODEL), content.tree({**MODEL, b"new": b"1"})
    path = host.bring(tree)
    with open_version(str(host.home), tree.digest.hex()):
        damage(Path(path, "a.py"), keep_time=False)
        for _ in range(2):
            disk.look_after(tree.digest, reserve=True)
        assert host.store.snapshots.spares() == []
    with pytest.raises(ObjectsDamaged):
        host.bring(newer, tree)
    host.bring(newer, tree)
    disk.look_after(newer.digest, reserve=True)
    assert host.store.snapshots.spares() == [newer.digest]


def test_an_object_that_vanished_is_fetched_again_for_the_next_version(host: Host, content: Content) -> None:
    first, second = content.tree(MODEL), content.tree({**MODEL, b"new": b"1"})
    host.bring(first)
    next(path for path in objects(host) if path.read_bytes() == b"one").unlink()
    with pytest.raises(ObjectsDamaged, match="vanished"):
        host.bring(second, first)
    assert on_disk(host.bring(second, first)) == plain({**MODEL, b"new": b"1"})


def rebooted(tmp_path: Path, content: Content) -> tuple[Host, Directory, Path]:
    """A store closed before its machine went down, a version of it, and an object of that the disk had not got."""
    host = Host(tmp_path / "home", content, boot="first")
    tree = content.tree(MODEL)
    host.bring(tree)
    host.store.prepare_spare(tree.digest)
    lost = next(path for path in objects(host) if path.read_bytes() == b"one")
    damage(lost, keep_time=True)
    host.store.close()
    host.options = {"boot": "second"}
    return host, tree, lost


def test_after_a_reboot_no_process_trusts_what_none_has_read(tmp_path: Path, content: Content) -> None:
    host, tree, _ = rebooted(tmp_path, content)
    first = Host(host.home, content, boot="second")
    first.bring(content.tree({b"small": b"2"}))
    first.store.close()
    second, third = Host(host.home, content, boot="second"), Host(host.home, content, boot="second")
    assert not second.store.ready(tree.digest)
    assert on_disk(second.bring(tree)) == plain(MODEL)
    assert second.fetched == 1
    assert on_disk(third.bring(tree)) == plain(MODEL)
    assert third.fetched == 0


def test_a_second_reboot_sets_aside_what_was_read_after_the_first(tmp_path: Path, content: Content) -> None:
    host, tree, _ = rebooted(tmp_path, content)
    host.reopen_as("second")
    host.bring(content.tree({b"d": MODEL[b"d"], b"new": b"brought since"}))
    damage(next(path for path in objects(host) if path.read_bytes().startswith(b"brought")), keep_time=True)
    host.store.close()
    host.reopen_as("third")
    assert objects(host) == []
    both = {**MODEL, b"new": b"brought since"}
    host.fetched = 0
    assert on_disk(host.bring(content.tree(both))) == plain(both)
    assert host.fetched == 2
    assert not host.store.ready(tree.digest)


def test_a_process_that_dies_while_it_opens_after_a_reboot_leaves_nothing_trusted(tmp_path: Path) -> None:
    after = 0
    crashed = True
    while crashed:
        content = Content()
        host, tree, _ = rebooted(tmp_path / str(after), content)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, Crash)
            with contextlib.suppress(Crash):
                opened = Host(host.home, content, boot="second")
                opened.bring(content.tree({b"small": b"2"}))
                opened.store.close()
            crashed = happened()
        host.reopen_as("second")
        assert host.store.snapshots.spares() == []
        assert not host.store.ready(tree.digest)
        assert on_disk(host.bring(tree)) == plain(MODEL)
        assert host.store.verify() == []
        host.store.close()
        after += 1
    assert after > 10


def test_unread_objects_that_nothing_names_are_collected(tmp_path: Path, content: Content) -> None:
    host, tree, _ = rebooted(tmp_path, content)
    host.reopen_as("second")
    host.store.snapshots.release("me")
    collect(host.store, Policy(newest=0, age=0.0, grace=0.0))
    assert not list((host.home / "unread").glob("*/*"))
    assert on_disk(host.bring(tree)) == plain(MODEL)


def test_records_that_make_no_sense_are_dropped_with_their_snapshots(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.bring(first)
    host.bring(second, first)
    (host.home / "versions" / first.digest.hex()).write_bytes(b"nonsense")
    (host.home / "versions" / "not a digest").write_bytes(b"")
    host.store.prepare_spare(second.digest)
    host.reopen()
    assert host.store.records.trees == {}
    assert host.store.snapshots.roots() == []
    assert host.store.snapshots.spares() == []


def test_a_long_chain_of_versions_is_cut(host: Host, content: Content) -> None:
    before = EMPTY
    for number in range(140):
        tree = content.tree({b"a": b"%d" % number, b"b": b"same"})
        host.bring(tree, before, replaces=before.digest)
        before = tree
    host.reopen()
    assert len(host.store.records.trees) == 140


# --- crashes ------------------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


STEPS = ("rename", "link", "mkdir", "unlink", "symlink", "truncate", "pwrite", "fchmod", "utime")


def crashing(monkeypatch: pytest.MonkeyPatch, after: int, problem: Callable[[], BaseException]) -> Callable[[], bool]:
    """Lets ``after`` steps on the disk happen and fails from then on; tells whether it came to that."""
    count = 0

    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count > after:
                raise problem()
            return original(*arguments, **options)

        return step

    for name in STEPS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count > after


@pytest.mark.parametrize("kind", ["replace", "spare", "fresh"])
def test_a_crash_at_any_point_leaves_a_store_that_verifies(tmp_path: Path, kind: str) -> None:
    model = {**MODEL, b"a.py": b"changed", b"new": {b"x": b"y"}, b"large": bytes(range(50)) + bytes(60)}
    after = 0
    crashed = True
    while crashed:
        content = Content()
        old, new = content.tree(MODEL), content.tree(model)
        host = Host(tmp_path / f"{kind}-{after}", content)
        host.bring(old)
        if kind == "spare":
            host.store.prepare_spare(old.digest)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, Crash)
            with contextlib.suppress(Crash):
                host.bring(new, old, replaces=old.digest if kind == "replace" else None)
            crashed = happened()
        os.close(host.store._held)  # the process is gone
        host.store = Store(str(host.home))
        assert host.store.verify() == []
        for root in host.store.snapshots.roots():
            assert on_disk(host.store.snapshots.path(root)) == plain({old.digest: MODEL, new.digest: model}[root])
        assert on_disk(host.bring(new)) == plain(model)
        assert on_disk(host.bring(old)) == plain(MODEL)
        assert os.listdir(host.home / "work") == [os.path.basename(host.store._work)]
        host.store.close()
        after += 1
    assert after > 20


def test_a_disk_that_is_full_at_any_point_is_an_error_and_recoverable(tmp_path: Path) -> None:
    model = {**MODEL, b"a.py": b"changed", b"large": bytes(range(50)) + bytes(60)}
    after = 0
    failed = True
    while failed:
        content = Content()
        old, new = content.tree(MODEL), content.tree(model)
        host = Host(tmp_path / f"full-{after}", content)
        host.bring(old)
        with pytest.MonkeyPatch.context() as patch:
            happened = crashing(patch, after, lambda: OSError(errno.ENOSPC, "no space"))
            try:
                host.bring(new, old, replaces=old.digest)
            except StoreFull:
                assert happened()
            failed = happened()
        assert on_disk(host.bring(new, old)) == plain(model)
        assert host.store.verify() == []
        host.store.close()
        after += 1
    assert after > 10


def test_other_errors_of_the_disk_name_the_store(host: Host, content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing(monkeypatch, 0, lambda: OSError(errno.EIO, "broken"))
    with pytest.raises(StoreError, match="broken"):
        host.bring(content.tree(MODEL))


# --- several processes --------------------------------------------------------------------------------------


def test_two_processes_make_the_same_version_at_once(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    tree = content.tree(MODEL)
    fetches = [host.store.begin(whole(tree)) for host in (one, two)]
    for host, fetch in zip((one, two), fetches, strict=True):
        for digest in list(fetch.missing):
            host.store.add(digest, content.pieces[digest])
    assert one.store.finish(tree.digest, base=NOTHING) == two.store.finish(tree.digest, base=NOTHING)
    assert on_disk(one.store.snapshots.path(tree.digest)) == plain(MODEL)
    one.store.close()
    two.store.close()


def test_one_process_uses_what_the_other_has_recorded(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    one.bring(first)
    assert on_disk(two.bring(second, first)) == {b"a": b"2"}
    one.store.records.remove(first.digest)
    third = content.tree({b"a": b"3"})
    two.bring(third, first)
    two.reopen()
    assert {second.digest, third.digest} <= two.store.records.trees.keys()


def test_an_object_replaced_while_it_is_linked_is_linked_all_the_same(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = os.link, iter([True])

    def link(source: str, target: bytes) -> None:
        if next(failures, False):
            raise FileNotFoundError(errno.ENOENT, "its last name was taken from it just now")
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    assert on_disk(host.bring(content.tree(MODEL))) == plain(MODEL)


def test_what_a_living_process_builds_is_left_to_it(tmp_path: Path, content: Content) -> None:
    one = Host(tmp_path / "home", content)
    tree = content.tree({b"f": bytes(range(100))})
    fetch = one.store.begin(whole(tree))
    first = next(iter(fetch.missing))
    one.store.add(first, content.pieces[first])
    two = Host(tmp_path / "home", content)
    assert first in two.store.begin(whole(tree)).missing
    assert len(os.listdir(one.home / "work")) == 2


def test_the_lock_lets_readers_share(tmp_path: Path) -> None:
    with locked(str(tmp_path), shared=True), locked(str(tmp_path), shared=True):
        pass


# --- collecting ---------------------------------------------------------------------------------------------


def test_old_versions_are_collected_and_their_objects_with_them(host: Host, content: Content) -> None:
    trees = [content.tree({b"a": b"%d" % number, b"same": b"same"}) for number in range(6)]
    for number, tree in enumerate(trees):
        host.bring(tree, trees[number - 1] if number else EMPTY)
        os.utime(host.home / "versions" / tree.digest.hex(), (number, number))
    collected = collect(host.store, Policy(newest=2, age=100, grace=0), now=10**12)
    assert (collected.versions, collected.objects, collected.bytes) == (4, 4, 4)
    assert set(host.store.snapshots.roots()) == {trees[4].digest, trees[5].digest}
    assert host.store.verify() == []
    host.reopen()
    assert set(host.store.records.trees) == {trees[4].digest, trees[5].digest}
    assert on_disk(host.bring(trees[0])) == {b"a": b"0", b"same": b"same"}


def test_a_store_over_its_size_gives_up_the_oldest_first(host: Host, content: Content) -> None:
    trees = [content.tree({b"a": bytes([number]) * 10}) for number in range(5)]
    for number, tree in enumerate(trees):
        host.bring(tree)
        os.utime(host.home / "versions" / tree.digest.hex(), (number, number))
    collect(host.store, Policy(newest=1, age=1e15, bytes=30, grace=0), now=10**12)
    assert set(host.store.snapshots.roots()) == {tree.digest for tree in trees[2:]}


def versions_in_order(host: Host, content: Content, count: int, size: int) -> list[Directory]:
    """So many versions, each with a file of its own of ``size`` bytes and one in common, the first the oldest."""
    trees = [content.tree({b"a": bytes([number]) * size, b"same": b"same"}) for number in range(count)]
    now = time.time()
    for number, tree in enumerate(trees):
        host.bring(tree, trees[number - 1] if number else EMPTY)
        os.utime(host.home / "versions" / tree.digest.hex(), (now, now - 60 * (count - number)))
    return trees


def test_a_full_disk_is_relieved_at_once(host: Host, content: Content) -> None:
    trees = versions_in_order(host, content, 6, 10)
    collected = collect(host.store, Policy(newest=1, age=0.0, grace=0.0))
    assert (collected.versions, collected.objects, collected.bytes) == (5, 5, 50)
    assert host.store.snapshots.roots() == [trees[5].digest]
    assert host.store.verify() == []


def test_a_store_one_byte_over_its_size_gives_up_one_version(host: Host, content: Content) -> None:
    trees = versions_in_order(host, content, 6, 10)
    collected = collect(host.store, Policy(newest=1, bytes=6 * 10 + 4 - 1, grace=0.0))
    assert (collected.versions, collected.objects, collected.bytes) == (1, 1, 10)
    assert set(host.store.snapshots.roots()) == {tree.digest for tree in trees[1:]}


def test_objects_that_another_process_has_just_found_use_for_are_left_to_it(tmp_path: Path, content: Content) -> None:
    one, two = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second, third = (content.tree({name: b"of %s" % name, b"same": b"same"}) for name in (b"a", b"b", b"c"))
    one.bring(first)
    for path in objects(one):
        os.utime(path, (0, path.stat().st_mtime))
    two.store.begin(whole(content.tree({b"s": b"same", b"other": b"o"})))
    one.bring(second, first)
    one.bring(third, second)
    one.store.records.remove(first.digest)
    one.store.records.remove(second.digest)
    one.bring(content.tree({b"c": b"of c"}), third)
    collect(one.store, Policy(newest=1, age=0.0, grace=600))
    left = {path.read_bytes() for path in objects(one)}
    assert b"same" in left
    assert b"of a" not in left


def test_collecting_a_disk_that_refuses_is_an_error_of_the_store(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions_in_order(host, content, 3, 10)
    crashing(monkeypatch, 0, lambda: OSError(errno.EIO, "broken"))
    with pytest.raises(StoreError, match="broken"):
        collect(host.store, Policy(newest=1, age=0.0, grace=0.0))


def test_a_version_whose_processes_have_not_started_yet_survives_a_save_and_a_full_disk(
    tmp_path: Path, content: Content
) -> None:
    host, other = Host(tmp_path / "home", content), Host(tmp_path / "home", content)
    first, second, third = (content.tree({b"a": number}) for number in (b"1", b"2", b"3"))
    path = host.bring(first)
    host.store.hold(first.digest, "me")
    host.bring(second, first)
    other.bring(third, second, owner="other", replaces=first.digest)
    collect(other.store, Policy(newest=0, age=0.0, grace=0.0))
    assert on_disk(path) == {b"a": b"1"}
    host.store.snapshots.release("me")
    collect(other.store, Policy(newest=0, age=0.0, grace=0.0))
    assert host.store.snapshots.roots() == [third.digest]


def test_what_was_held_counts_for_ten_minutes(host: Host, content: Content) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.bring(first)
    host.store.hold(first.digest, "me")
    host.bring(second, first)
    (note,) = (host.home / "held").iterdir()
    os.utime(note, (0, time.time() - 599))
    collect(host.store, Policy(newest=0, age=0.0, grace=0.0))
    assert host.store.ready(first.digest)
    os.utime(note, (0, time.time() - 601))
    collect(host.store, Policy(newest=0, age=0.0, grace=0.0))
    assert not host.store.ready(first.digest)
    assert not note.exists()


def test_a_version_that_is_there_is_not_collected_while_it_is_finished(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree({b"a": b"1"}), content.tree({b"a": b"2"})
    host.bring(first)
    host.bring(second, first)
    other = Host(host.home, content)
    ready = host.store.snapshots.ready

    collecting = threading.Thread(target=collect, args=(other.store, Policy(newest=0, age=0.0, grace=0.0)))

    def then_collected(root: bytes) -> bool:
        found = ready(root)
        if collecting.ident is None:
            collecting.start()
            collecting.join(0.2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(host.store.snapshots, "ready", then_collected)
        path = host.bring(first, second)
    collecting.join()
    assert on_disk(path) == {b"a": b"1"}


def test_pinned_versions_and_fresh_objects_are_kept(host: Host, content: Content) -> None:
    pinned, on_its_way = content.tree({b"a": b"1"}), content.tree({b"f": bytes(range(100)), b"b": b"small"})
    host.bring(pinned, owner="driver")
    fetch = host.store.begin(whole(on_its_way))
    for digest in list(fetch.missing):
        host.store.add(digest, content.pieces[digest])
    collect(host.store, Policy(newest=0, age=0, grace=0), now=10**12)
    assert host.store.ready(pinned.digest)
    assert on_disk(host.store.finish(on_its_way.digest, base=NOTHING)) != {}


def test_what_vanishes_while_collecting_is_collected(
    host: Host, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.bring(content.tree({b"a": b"1"}))
    (host.home / "versions" / next(iter(host.store.records.trees)).hex()).unlink()
    assert collect(host.store, now=10**12).versions == 0

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from meshgate_sync.relay.commands import Finish
from meshgate_sync.relay.frames import Offer
from meshgate_sync.store.home import open_version
from meshgate_sync.store.store import Store
from meshgate_sync.transport import disk as disk_module
from meshgate_sync.transport.disk import Disk, StoreThread
from meshgate_sync.tree.delta import diff, encode
from meshgate_sync.tree.tree import EMPTY, NOTHING, Directory
from tests.sync.store.store_host import damage, raising
from tests.sync.trees import Content, on_disk

FIRST: dict[bytes, object] = {b"a": b"1", b"d": {b"b": b"2"}, b"e": {b"c": b"3"}}
SECOND: dict[bytes, object] = {**FIRST, b"a": b"changed"}
PERMITS = 100


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(Store(str(tmp_path / "home")), "session")
    yield disk
    disk.store.close()


@pytest.fixture
def content() -> Content:
    return Content()


def sync(disk: Disk, content: Content, tree: Directory, base: Directory = EMPTY) -> str:
    """Does what a relay does with an offer; returns the snapshot."""
    delta = encode(diff(base, tree))
    offer = Offer(tree.digest, base.digest if base.entries else NOTHING, NOTHING, False, delta, ())
    assert disk.add([(digest, content.pieces[digest]) for digest in disk.prepare(offer).missing]) is None
    result = disk.finish(Finish(tree.digest, 1, offer.base, NOTHING))
    assert result.failure is None
    return disk.store.snapshots.path(tree.digest)


def maintain(disk: Disk, tree: Directory, *, held: bool = True) -> int:
    """Returns after how many slices there was no more to do."""
    for count in range(100):
        if not disk.maintain(tree.digest, held=held):
            return count
    raise AssertionError("maintenance does not end")


def test_spares_are_made_once_processes_are_about_to_start(disk: Disk, content: Content) -> None:
    tree = content.tree(FIRST)
    sync(disk, content, tree)
    disk.check(tree.digest)
    maintain(disk, tree, held=False)
    assert disk.store.snapshots.spares() == []
    maintain(disk, tree)
    assert disk.store.snapshots.spares() == [tree.digest] * 2


def test_maintenance_takes_a_slice_at_a_time(disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = content.tree(FIRST)
    sync(disk, content, tree)
    monkeypatch.setattr(disk_module, "_SLICE_SECONDS", 0.0)
    assert maintain(disk, tree) > 6  # two spares with three directories each
    assert disk.store.snapshots.spares() == [tree.digest] * 2


def test_a_version_is_made_from_a_spare_that_was_not_complete_yet(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree(FIRST), content.tree(SECOND)
    sync(disk, content, first)
    monkeypatch.setattr(disk_module, "_SLICE_SECONDS", 0.0)
    assert disk.maintain(first.digest, held=True)
    (partial,) = Path(disk.store.home, "work").glob("*/spare")
    inode = partial.stat().st_ino
    snapshot = sync(disk, content, second, first)
    assert os.stat(snapshot).st_ino == inode
    disk.check(second.digest)
    assert on_disk(snapshot) == SECOND


def test_a_spare_that_cannot_be_completed_does_not_fail_the_next_version(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree(FIRST), content.tree(SECOND)
    sync(disk, content, first)
    monkeypatch.setattr(disk_module, "_SLICE_SECONDS", 0.0)
    assert disk.maintain(first.digest, held=True)
    link, full = os.link, iter([True])

    def link_once_full(source: str, target: bytes) -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "no space left")
        link(source, target)

    monkeypatch.setattr(os, "link", link_once_full)
    assert on_disk(sync(disk, content, second, first)) == SECOND


def test_a_failure_to_make_spares_is_not_repeated_for_the_same_version(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree(FIRST), content.tree(SECOND)
    sync(disk, content, first)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", raising(errno.ENOSPC))
        assert not disk.maintain(first.digest, held=True)
    assert not disk.maintain(first.digest, held=True)
    assert disk.store.snapshots.spares() == []
    sync(disk, content, second, first)
    maintain(disk, second)
    assert disk.store.snapshots.spares() == [second.digest] * 2


def test_a_damaged_file_found_by_the_check_is_reported(disk: Disk, content: Content) -> None:
    first, second = content.tree(FIRST), content.tree(SECOND)
    path = sync(disk, content, first)
    disk.check(first.digest)
    with open_version(disk.store.home, first.digest.hex()):
        maintain(disk, first)
        damage(Path(path, "d", "b"), keep_time=False)
        snapshot = sync(disk, content, second, first)
        assert disk.check(second.digest).damaged
        sync(disk, content, second, first)
        result = disk.check(second.digest)
    assert not result.damaged
    assert result.failure is None
    assert on_disk(snapshot) == SECOND


def test_spares_are_removed_when_the_disk_is_full(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = content.tree(FIRST), content.tree(SECOND)
    sync(disk, content, first)
    maintain(disk, first)
    disk._with_space(lambda: None)
    assert len(disk.store.snapshots.spares()) == 2
    full, rename = iter([True]), os.rename

    def rename_once_full(source: str, target: str) -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "no space left")
        rename(source, target)

    offer = Offer(second.digest, first.digest, NOTHING, False, encode(diff(first, second)), ())
    pieces = [(digest, content.pieces[digest]) for digest in disk.prepare(offer).missing]
    monkeypatch.setattr(os, "rename", rename_once_full)
    assert disk.add(pieces) is None
    assert disk.store.snapshots.spares() == []


def test_a_version_whose_last_pieces_could_not_be_stored_is_not_finished(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = content.tree(FIRST)
    offer = Offer(tree.digest, NOTHING, NOTHING, False, encode(diff(EMPTY, tree)), ())
    missing = disk.prepare(offer).missing
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raising(errno.ENOSPC))
        reason = disk.add([(digest, content.pieces[digest]) for digest in missing])
    # Queued together with the pieces, before anyone knew that they failed.
    assert disk.finish(Finish(tree.digest, 1, offer.base, NOTHING)).incomplete
    assert "no space left" in (reason or "")
    assert on_disk(sync(disk, content, tree)) == FIRST


def test_a_version_that_does_not_fit_is_refused_before_the_disk_is_full(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = content.tree(FIRST)  # three files of a byte each
    offer = Offer(tree.digest, NOTHING, NOTHING, False, encode(diff(EMPTY, tree)), ())
    blocks = SimpleNamespace(f_bavail=1, f_frsize=2, f_blocks=9)
    monkeypatch.setattr(os, "statvfs", lambda path: blocks)
    assert "no space left" in (disk.prepare(offer).failure or "")
    assert os.listdir(Path(disk.store.home, "objects")) == []
    blocks.f_bavail = blocks.f_blocks = 0  # the file system does not know its size
    assert disk.prepare(offer).failure is None


def test_old_snapshots_are_removed_but_their_versions_stay(
    disk: Disk, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [content.tree({**FIRST, b"number": b"%d" % number}) for number in range(7)]
    for number, tree in enumerate(trees):
        sync(disk, content, tree, trees[number - 1] if number else EMPTY)
        disk.check(tree.digest)
        os.utime(Path(disk.store.home, "versions", tree.digest.hex()), (number, number))
    disk.store.hold(trees[0].digest, "session")
    with open_version(disk.store.home, trees[1].digest.hex()):
        disk._collect_at = 0.0
        monkeypatch.setattr(disk_module, "collect", lambda store: None)
        maintain(disk, trees[-1], held=False)
        kept = {trees[0], trees[1], *trees[3:]}
        assert set(disk.store.snapshots.roots()) == {tree.digest for tree in kept}
        assert len(disk.store.records.trees) == 7


class FakeDisk:
    """Records batches; takes a permit of ``gate`` for each."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.failure: str | None = None
        self.gate = threading.Semaphore(PERMITS)

    def add(self, pieces: list[tuple[bytes, bytes]]) -> str | None:
        self.gate.acquire(timeout=30)
        self.batches.append([digest for digest, _ in pieces])
        return self.failure


class Listener:
    def __init__(self) -> None:
        self.events: list[object] = []
        self.done = asyncio.Event()

    def pieces_failed(self, reason: str) -> None:
        self.events.append(reason)

    def disk_behind(self, behind: bool) -> None:
        self.events.append(behind)

    def step_raised(self, error: BaseException) -> None:
        self.events.append(error)

    def step_done(self) -> None:
        self.done.set()


@asynccontextmanager
async def running() -> AsyncIterator[tuple[StoreThread, FakeDisk, Listener]]:
    disk, listener = FakeDisk(), Listener()
    thread = StoreThread(cast("Disk", disk), listener)
    try:
        yield thread, disk, listener
    finally:
        thread.stop()
        disk.gate.release(PERMITS)
        await thread.close()


async def result_of(thread: StoreThread, step: Callable[[], object]) -> object:
    result: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    thread.run(step, result.set_result)
    return await result


async def test_pieces_are_stored_in_one_batch_before_the_next_step() -> None:
    async with running() as (thread, disk, listener):
        thread.add(b"1", b"data")
        thread.add(b"2", b"data")
        thread.flush_if_large()
        assert await result_of(thread, lambda: list(disk.batches)) == [[b"1", b"2"]]
        assert listener.events == []


async def test_a_large_batch_is_stored_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_BATCH_BYTES", 8)
    async with running() as (thread, disk, listener):
        thread.add(b"1", b"data")
        thread.flush_if_large()
        thread.add(b"2", b"data")
        thread.flush_if_large()
        await listener.done.wait()
        assert disk.batches == [[b"1", b"2"]]


async def test_the_disk_is_behind_from_its_limit_until_three_quarters_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_MAX_PENDING_BYTES", 10)
    async with running() as (thread, disk, listener):
        disk.gate = threading.Semaphore(0)
        for digest in (b"1", b"2", b"3"):
            thread.add(digest, b"data")
            thread.flush()
        assert listener.events == [True]
        disk.gate.release()
        await listener.done.wait()
        assert thread.behind  # with 8 bytes of 10
        disk.gate.release(2)
        await result_of(thread, lambda: None)
        assert not thread.behind
        assert listener.events == [True, False]


async def test_a_failure_to_store_is_reported() -> None:
    async with running() as (thread, disk, listener):
        disk.failure = "no space"
        thread.add(b"1", b"data")
        await result_of(thread, lambda: None)
        assert listener.events == ["no space"]


async def test_an_error_of_a_step_is_reported_and_the_next_step_runs() -> None:
    async with running() as (thread, _, listener):
        error = RuntimeError("a defect")

        def fail() -> None:
            raise error

        thread.run(fail, lambda _: pytest.fail("there is no result"))
        assert await result_of(thread, lambda: "next") == "next"
        assert listener.events == [error]


async def test_after_stop_nothing_starts_and_nothing_is_delivered() -> None:
    async with running() as (thread, disk, listener):
        disk.gate = threading.Semaphore(0)
        thread.add(b"1", b"data")
        thread.run(lambda: None, lambda _: pytest.fail("the thread was stopped"))
        thread.stop()
        disk.gate.release()
        thread.run(lambda: pytest.fail("the thread was stopped"), lambda _: None)
        await thread.close()
        assert disk.batches == [[b"1"]]
        assert not listener.done.is_set()

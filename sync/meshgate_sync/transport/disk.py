"""The steps of a relay that touch the disk, each a plain function of its command, for the store's thread.

Errors of the store are returned as values: the relay decides what to do about them. If the disk is full, everything
that is not in use is collected and the step runs again.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..errors import BaseUnknown, ObjectsDamaged, StoreFull, SyncError
from ..relay.commands import Finish, ReadPieces
from ..relay.frames import Offer
from ..store.gc import Policy, collect, stale_snapshots
from ..store.objects import Fetch
from ..store.store import Store
from ..tree.delta import Delta, decode, encode, full_delta
from ..tree.tree import piece_digest

_WHEN_FULL = Policy(keep_newest=1, max_age=0.0, grace_period=0.0)
_COLLECT_SECONDS = 300.0
_SLICE_SECONDS = 0.005  # of the store's thread, between commands

_T = TypeVar("_T")
_BATCH_BYTES = 1024 * 1024
_MAX_PENDING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """The pieces that the store lacks, digest to size; or it does not have the base; or why it failed."""

    missing: Mapping[bytes, int] = field(default_factory=dict)
    base_unknown: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class FinishResult:
    """The version is ready; or why it failed; or its files were damaged and it must be prepared again; or its last
    pieces could not be stored, which ``Disk.add`` has returned."""

    failure: str | None = None
    damaged: bool = False
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Pieces, digests left because of the limit, digests that the store does not have."""

    read: list[tuple[bytes, bytes]]
    unread: tuple[bytes, ...]
    lost: tuple[bytes, ...]


class Disk:
    """Executes commands on ``store``, in one thread."""

    def __init__(self, store: Store, owner: str) -> None:
        self.store = store
        self._owner = owner
        self._job: Iterator[None] | None = None
        self._failed: bytes | None = None
        self._pieces_failed = False  # since a version was prepared
        self._stale: list[bytes] = []
        self._collect_at = time.monotonic() + _COLLECT_SECONDS

    def prepare(self, offer: Offer) -> PrepareResult:
        self._pieces_failed = False
        try:
            delta = decode(offer.delta)
            fetch = self._with_space(lambda: self._prepare(delta, offer.inline))
        except BaseUnknown:
            return PrepareResult(base_unknown=True)
        except SyncError as error:
            return PrepareResult(failure=str(error))
        return PrepareResult(dict(fetch.missing))

    def _prepare(self, delta: Delta, inline: tuple[tuple[bytes, bytes], ...]) -> Fetch:
        fetch = self.store.prepare(delta)
        for digest, data in inline:
            if digest in fetch.missing and piece_digest(data) == digest:
                self.store.add(digest, data)
        return fetch

    def add(self, pieces: list[tuple[bytes, bytes]]) -> str | None:
        """Returns why the pieces could not be stored, or None."""
        try:
            for digest, data in pieces:
                self._with_space(lambda digest=digest, data=data: self.store.add(digest, data))  # type: ignore[misc]
        except SyncError as error:
            self._pieces_failed = True
            return str(error)
        return None

    def finish(self, command: Finish) -> FinishResult:
        # The last pieces and this step are queued together, so this one does not know yet that those failed.
        if self._pieces_failed and not self.store.is_fetched(command.root):
            return FinishResult(incomplete=True)
        replaces = command.replaces if any(command.replaces) else None
        if replaces is None and not self.store.snapshots.spares():
            self._complete_job()
        try:
            self._with_space(
                lambda: self.store.finish(command.root, base=command.base, owner=self._owner, replaces=replaces)
            )
        except ObjectsDamaged:
            return FinishResult(damaged=True)
        except SyncError as error:
            return FinishResult(str(error))
        return FinishResult()

    def _complete_job(self) -> None:
        """Completes a spare in progress, which is quicker than linking all files. If it fails, they are linked."""
        job, self._job = self._job, None
        with contextlib.suppress(SyncError):
            for _ in job or ():
                pass

    def hold(self, root: bytes) -> str | None:
        """Returns why the version could not be held, or None."""
        try:
            self._with_space(lambda: self.store.hold(root, self._owner))
        except SyncError as error:
            return str(error)
        return None

    def read(self, command: ReadPieces) -> ReadResult:
        read: list[tuple[bytes, bytes]] = []
        lost: list[bytes] = []
        size = 0
        for digest in command.digests:
            if size >= command.limit:
                break
            data = self.store.read(digest)
            if data is None:
                lost.append(digest)
            else:
                read.append((digest, data))
                size += len(data)
        return ReadResult(read, command.digests[len(read) + len(lost) :], tuple(lost))

    def full_delta(self, root: bytes) -> bytes | None:
        tree = self.store.tree(root)
        return encode(full_delta(tree)) if tree is not None else None

    def check(self, root: bytes) -> FinishResult:
        """Lets processes run from a version that was finished, once its files are as they were written."""
        try:
            self.store.check(root)
        except ObjectsDamaged:
            return FinishResult(damaged=True)
        except SyncError as error:
            return FinishResult(str(error))
        return FinishResult()

    def maintain(self, newest: bytes, *, held: bool) -> bool:
        """A few milliseconds of the work between versions: spares of the newest, if it is ``held`` or processes ran on
        this host before, and garbage collection. Returns whether there is more to do at once. After an error, spares
        are tried again for the next version."""
        try:
            if self._job is None:
                self._job = self._next_job(newest, held=held)
            return self._job is not None and self._advance(self._job)
        except SyncError:
            self._failed = newest
            self._job = None
            return False

    def _next_job(self, newest: bytes, *, held: bool) -> Iterator[None] | None:
        job = None
        if newest != self._failed and (held or self.store.snapshots.processes_ran()):
            job = self.store.prepare_spare(newest)
        if job is None and time.monotonic() >= self._collect_at:
            self._collect_at = time.monotonic() + _COLLECT_SECONDS
            collect(self.store)
            self._stale = stale_snapshots(self.store)
        while job is None and self._stale:
            job = self.store.remove_snapshot(self._stale.pop())
        return job

    def _advance(self, job: Iterator[None]) -> bool:
        until = time.monotonic() + _SLICE_SECONDS
        for _ in job:
            if time.monotonic() >= until:
                return True
        self._job = None
        return True

    def _with_space(self, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except StoreFull:
            self.store.snapshots.remove_spares()
            collect(self.store, _WHEN_FULL)
            return step()


class StoreListener(Protocol):
    """Is notified of the results of store steps, in the event loop."""

    def pieces_failed(self, reason: str) -> None:
        """Pieces could not be stored."""
        ...

    def disk_behind(self, behind: bool) -> None:
        """The disk does not keep up with the network; or does again."""
        ...

    def step_raised(self, error: BaseException) -> None:
        """A step raised an error that is a defect."""
        ...

    def step_done(self) -> None:
        """Called after each step, once its result was delivered."""
        ...


class StoreThread:
    """``behind``: more than 64 MiB wait to be stored; until less than 48 MiB do. Call ``stop`` first, then
    ``close``."""

    def __init__(self, disk: Disk, listener: StoreListener) -> None:
        self.behind = False
        self._disk = disk
        self._listener = listener
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshgate-store")
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0
        self._pending_bytes = 0
        self._stopped = False

    def run(self, step: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Runs ``step`` in the thread, after all earlier steps and pieces; then ``then`` with its result, in the event
        loop."""
        self.flush()
        self._submit(step, then)

    def add(self, digest: bytes, data: bytes) -> None:
        """Adds a piece to the batch to store: waking the thread costs more than storing most pieces."""
        self._batch.append((digest, data))
        self._batch_bytes += len(data)

    def flush_if_large(self) -> None:
        """Stores the batch if it is large enough to be worth it."""
        if self._batch_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        pieces, self._batch = self._batch, []
        size, self._batch_bytes = self._batch_bytes, 0
        if pieces:
            self._pending_bytes += size
            self._update_behind()
            self._submit(lambda: self._disk.add(pieces), lambda failure: self._stored(size, failure))

    def stop(self) -> None:
        """From now on no step is started and no result is delivered."""
        self._stopped = True

    async def close(self) -> None:
        """Waits for the step that is running, after ``stop``."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _submit(self, step: Callable[[], _T], then: Callable[[_T], None]) -> None:
        if not self._stopped:
            future = asyncio.get_running_loop().run_in_executor(self._thread, step)
            future.add_done_callback(lambda done: self._deliver(done, then))

    def _deliver(self, done: asyncio.Future[_T], then: Callable[[_T], None]) -> None:
        if self._stopped or done.cancelled():
            return
        error = done.exception()
        if error is None:
            then(done.result())
        else:
            self._listener.step_raised(error)
        self._listener.step_done()

    def _stored(self, size: int, failure: str | None) -> None:
        self._pending_bytes -= size
        self._update_behind()
        if failure is not None:
            self._listener.pieces_failed(failure)

    def _update_behind(self) -> None:
        behind = self._pending_bytes > (3 * _MAX_PENDING_BYTES // 4 if self.behind else _MAX_PENDING_BYTES)
        if behind != self.behind:
            self.behind = behind
            self._listener.disk_behind(behind)

"""The thread that a relay's store runs in: its steps run in order, and the event loop never waits for the disk.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from .disk import Disk

_BATCH_BYTES = 1024 * 1024
_MAX_PENDING_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")


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

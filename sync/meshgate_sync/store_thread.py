"""The thread that a relay's store lives in: its steps run in order, and the event loop never waits for the disk.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from .disk import Disk

__all__ = ["StoreThread"]

_KEPT_AT_ONCE = 1024 * 1024
_MOST_UNKEPT = 64 * 1024 * 1024

_T = TypeVar("_T")


class Listener(Protocol):
    """Told what comes of the store's steps, in the event loop."""

    def unkept(self, failure: str) -> None:
        """Pieces could not be kept, and why."""
        ...

    def disk_behind(self, behind: bool) -> None:
        """The disk does not keep up with what comes; or does again."""
        ...

    def store_broke(self, problem: BaseException) -> None:
        """A step raised what it should not."""
        ...

    def store_stepped(self) -> None:
        """The outcome of a step has been told."""
        ...


class StoreThread:
    """``behind``: more than 64 MiB wait to be kept, and not less than 48 since. ``stop`` first, then ``close``."""

    def __init__(self, disk: Disk, listener: Listener) -> None:
        self.behind = False
        self._disk = disk
        self._listener = listener
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshgate-store")
        self._gathered: list[tuple[bytes, bytes]] = []
        self._gathered_bytes = 0
        self._unkept = 0
        self._stopped = False

    def run(self, step: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Runs ``step`` in the thread, after all that was asked for before; then ``then`` with its result, here."""
        self._keep_gathered()
        self._run(step, then)

    def keep(self, digest: bytes, data: bytes) -> None:
        """Gathers pieces, for a turn of the thread costs more than most of them do. Whatever else the store is asked to
        do comes after them."""
        self._gathered.append((digest, data))
        self._gathered_bytes += len(data)

    def keep_many(self) -> None:
        """Has the gathered pieces kept, if they are worth a turn."""
        if self._gathered_bytes >= _KEPT_AT_ONCE:
            self._keep_gathered()

    def stop(self) -> None:
        """From now on nothing is begun, and nothing told."""
        self._stopped = True

    async def close(self) -> None:
        """Waits for what the thread is doing, once it was stopped."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _keep_gathered(self) -> None:
        pieces, self._gathered = self._gathered, []
        size, self._gathered_bytes = self._gathered_bytes, 0
        if pieces:
            self._unkept += size
            self._compare()
            self._run(lambda: self._disk.add(pieces), lambda failure: self._kept(size, failure))

    def _run(self, step: Callable[[], _T], then: Callable[[_T], None]) -> None:
        if not self._stopped:
            future = asyncio.get_running_loop().run_in_executor(self._thread, step)
            future.add_done_callback(lambda done: self._after(done, then))

    def _after(self, done: asyncio.Future[_T], then: Callable[[_T], None]) -> None:
        if self._stopped or done.cancelled():
            return
        problem = done.exception()
        if problem is None:
            then(done.result())
        else:
            self._listener.store_broke(problem)
        self._listener.store_stepped()

    def _kept(self, size: int, failure: str | None) -> None:
        self._unkept -= size
        self._compare()
        if failure is not None:
            self._listener.unkept(failure)

    def _compare(self) -> None:
        if self.behind != (self._unkept > (3 * _MOST_UNKEPT // 4 if self.behind else _MOST_UNKEPT)):
            self.behind = not self.behind
            self._listener.disk_behind(self.behind)

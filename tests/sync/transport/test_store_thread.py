from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from meshgate_sync.transport import store_thread
from meshgate_sync.transport.disk import Disk
from meshgate_sync.transport.store_thread import StoreThread

PERMITS = 100


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


def run(scenario: Callable[[StoreThread, FakeDisk, Listener], Awaitable[None]]) -> None:
    async def main() -> None:
        disk, listener = FakeDisk(), Listener()
        thread = StoreThread(cast("Disk", disk), listener)
        try:
            await asyncio.wait_for(scenario(thread, disk, listener), 30)
        finally:
            thread.stop()
            disk.gate.release(PERMITS)
            await thread.close()

    asyncio.run(main())


async def result_of(thread: StoreThread, step: Callable[[], object]) -> object:
    result: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    thread.run(step, result.set_result)
    return await result


def test_pieces_are_stored_in_one_batch_before_the_next_step() -> None:
    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
        thread.add(b"1", b"data")
        thread.add(b"2", b"data")
        thread.flush_if_large()
        assert await result_of(thread, lambda: list(disk.batches)) == [[b"1", b"2"]]
        assert listener.events == []

    run(scenario)


def test_a_large_batch_is_stored_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "_BATCH_BYTES", 8)

    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
        thread.add(b"1", b"data")
        thread.flush_if_large()
        thread.add(b"2", b"data")
        thread.flush_if_large()
        await listener.done.wait()
        assert disk.batches == [[b"1", b"2"]]

    run(scenario)


def test_the_disk_is_behind_from_its_limit_until_three_quarters_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "_MAX_PENDING_BYTES", 10)

    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
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

    run(scenario)


def test_a_failure_to_store_is_reported() -> None:
    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
        disk.failure = "no space"
        thread.add(b"1", b"data")
        await result_of(thread, lambda: None)
        assert listener.events == ["no space"]

    run(scenario)


def test_an_error_of_a_step_is_reported_and_the_next_step_runs() -> None:
    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
        error = RuntimeError("a defect")

        def fail() -> None:
            raise error

        thread.run(fail, lambda _: pytest.fail("there is no result"))
        assert await result_of(thread, lambda: "next") == "next"
        assert listener.events == [error]

    run(scenario)


def test_after_stop_nothing_starts_and_nothing_is_delivered() -> None:
    async def scenario(thread: StoreThread, disk: FakeDisk, listener: Listener) -> None:
        disk.gate = threading.Semaphore(0)
        thread.add(b"1", b"data")
        thread.run(lambda: None, lambda _: pytest.fail("the thread was stopped"))
        thread.stop()
        disk.gate.release()
        thread.run(lambda: pytest.fail("the thread was stopped"), lambda _: None)
        await thread.close()
        assert disk.batches == [[b"1"]]
        assert not listener.done.is_set()

    run(scenario)

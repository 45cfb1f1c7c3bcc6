"""Actors whose calls are many, long, large or cancelled; ``probes.py`` says why they are apart from the tests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshgate import Actor, concurrent_endpoint, context, current_rank, endpoint
from tests.waiting import wait_for

MB = 2**20


class Flown(Actor):
    """Notes what it runs."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    @endpoint
    def note(self, number: int) -> int:
        self.ran.append(number)
        return number

    @endpoint
    def noted(self) -> list[int]:
        return self.ran

    @endpoint
    def fail_at(self, number: int, every: int) -> int:
        self.ran.append(number)
        if number % every == 0:
            raise ValueError(f"number {number}")
        return number

    @endpoint
    def value(self, number: int) -> Any:
        """Values of several kinds."""
        import numpy as np  # in few of the processes

        kinds: list[Callable[[], Any]] = [
            lambda: number,
            lambda: np.full(3, number),
            lambda: "x" * 200_000,
            threading.Lock,
            lambda: {"rank": dict(current_rank()), "message": context().message_rank.rank},
        ]
        return kinds[number % len(kinds)]()

    @endpoint
    def wait_for(self, number: int, path: str) -> int:
        wait_for(lambda: not path or os.path.exists(path), path)
        return number

    @endpoint
    def die_at(self, number: int, last: int) -> int:
        if number == last:
            os._exit(3)
        return number

    @endpoint
    def stop_at(self, number: int, last: int, ran: str) -> int:
        with open(ran, "a") as file:
            file.write(f"{number}\n")
        if number == last:
            context().actor_instance.stop("enough")
        return number

    @endpoint
    def spawned(self, procs: Any, number: int) -> Any:
        return procs

    @endpoint
    def call_often(self, other: Any, count: int, offset: int) -> list[int]:
        return [other.note.call_one(offset + number).get() for number in range(count)]

    @endpoint
    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]


class AsyncFlown(Actor):
    def __init__(self) -> None:
        self.ran: list[int] = []

    @endpoint
    async def note(self, number: int) -> int:
        self.ran.append(number)
        return number

    @endpoint
    async def noted(self) -> list[int]:
        return self.ran

    @endpoint
    async def fail_at(self, number: int, every: int) -> int:
        self.ran.append(number)
        if number % every == 0:
            raise ValueError(f"number {number}")
        return number

    @endpoint
    async def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    @concurrent_endpoint
    async def note_later(self, number: int) -> int:
        self.ran.append(number)
        return number


class Waiter(Actor):
    """Says what became of its calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.gate = asyncio.Event()

    async def _wait(self, name: str) -> str:
        self.said.append(f"{name} began")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.said.append(f"{name} cancelled")
            raise
        return name

    @endpoint
    async def wait(self, name: str) -> str:
        return await self._wait(name)

    @endpoint
    async def hold(self, path: str) -> None:
        await asyncio.to_thread(wait_for, Path(path).exists, path)

    @concurrent_endpoint
    async def wait_beside(self, name: str) -> str:
        return await self._wait(name)

    @concurrent_endpoint
    async def refuse_to_end(self) -> str:
        try:
            return await self._wait("stubborn")
        except asyncio.CancelledError:
            return await self._wait("stubborn again")

    @concurrent_endpoint
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint
    async def all_said(self) -> list[str]:
        return self.said

    @concurrent_endpoint
    async def said_so_far(self) -> list[str]:
        return list(self.said)

    @endpoint
    async def fail(self, *, number: int, method: str) -> None:
        raise ValueError(f"{method} {number}")

    @endpoint
    async def await_a_cancelled_task(self) -> None:
        task = asyncio.create_task(self.gate.wait())
        task.cancel()
        await task

    @concurrent_endpoint
    async def fail_beside(self, *, number: int, method: str) -> None:
        raise ValueError(f"{method} {number}")


class Blocker(Actor):
    rank: int

    @endpoint
    def block(self, begun: str, path: str) -> None:
        self._touch(f"{begun}-{self.rank}")
        wait_for(Path(path).exists, path)

    @endpoint
    def touch(self, path: str) -> None:
        self._touch(path)

    def _touch(self, path: str) -> None:
        Path(path).touch()


class Giver(Actor):
    """Returns ``size`` bytes on one rank, and its rank on the others."""

    @endpoint
    def give(self, size: int, at: int = 0) -> Any:
        return bytes(size) if self.rank == at else self.rank

    @endpoint
    def size_from(self, givers: Any, size: int, at: int) -> int:
        return max(len(value) for value in givers.give.call(size, at).get().values() if isinstance(value, bytes))

    @endpoint
    def size_of(self, value: bytes) -> int:
        return len(value)

    @endpoint
    def send(self, port: Any, size: int) -> str:
        try:
            port.send(bytes(size))
        except MemoryError as error:
            return str(error)
        return "sent"

    @endpoint
    def count_pickles(self, port: Any) -> int:
        """How often a large message is pickled that is sent once."""
        count = 0

        class Large:
            nbytes = 8 * MB

            def __reduce__(self) -> Any:
                nonlocal count
                count += 1
                return bytes, (self.nbytes,)

        port.send(Large())
        return count


class AsyncGiver(Actor):
    @endpoint
    async def give(self, size: int, at: int = 0) -> Any:
        return bytes(size) if self.rank == at else self.rank

    @endpoint
    async def size_from(self, givers: Any, size: int, at: int) -> int:
        values = await givers.give.call(size, at)
        return max(len(value) for value in values.values() if isinstance(value, bytes))


class ConcurrentGiver(Actor):
    @concurrent_endpoint
    async def give(self, size: int, at: int = 0) -> Any:
        return bytes(size) if self.rank == at else self.rank


class Sender(Actor):
    """Sends numbered messages of 1 MiB from an endpoint that waits, a thread or an event loop."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, port: Any, count: int) -> None:
        for number in range(count):
            port.send((number, bytes(MB)))
            self.sent += 1

    @endpoint
    def from_endpoint(self, port: Any, count: int) -> int:
        self.send(port, count)
        return self.sent

    @endpoint
    def from_thread(self, port: Any, count: int) -> None:
        threading.Thread(target=self.send, args=(port, count), daemon=True).start()

    @endpoint
    def count(self) -> int:
        return self.sent

    @endpoint
    def give(self, port: Any) -> Any:
        return port


class AsyncSender(Actor):
    @endpoint
    async def from_endpoint(self, port: Any, count: int) -> int:
        for number in range(count):
            port.send((number, bytes(MB)))
            await asyncio.sleep(0)
        return count

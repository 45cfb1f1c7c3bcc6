"""Actors that make, keep and take values; ``probes.py`` says why they are apart from the tests."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import Any

from meshgate import Actor, Channel, concurrent_endpoint, endpoint


class Maker(Actor):
    """Makes values, and says whether a value is the object that it made."""

    rank: int

    def __init__(self) -> None:
        self.made: Any = None

    @endpoint
    def make(self, size: int) -> bytearray:
        self.made = made = bytearray([self.rank]) * size
        return made

    @endpoint
    def is_made_here(self, value: Any) -> bool:
        return value is self.made

    @endpoint
    def fail(self, at: int) -> int:
        if self.rank == at:
            raise ValueError("no sample")
        return self.rank

    @endpoint
    def add(self, value: Any, number: int) -> Any:
        return value[0] + number  # of whatever type

    @endpoint
    def die(self) -> None:
        os._exit(3)

    @endpoint
    def make_slow(self, seconds: float) -> SlowToUnpickle:
        return SlowToUnpickle(seconds)

    @endpoint
    def kept(self) -> dict[str, int]:
        """The statistics of this process's store."""
        found: dict[str, int] = sys.modules["_meshgate_kept"].store.statistics()
        return found


class Taker(Actor):
    def __init__(self, value: Any = b"\0") -> None:
        self.first = value[0]

    @endpoint
    async def first_byte(self, value: Any, *, more: Any = None) -> Any:
        return value[0] if more is None else (value[0], more["deep"][0][0])

    @endpoint
    async def all_first_bytes(self, values: Any) -> list[int]:
        return [value[0] for value in values.values()]

    @endpoint
    async def given(self) -> int:
        return int(self.first)


def unpickle_slowly(seconds: float) -> SlowToUnpickle:
    time.sleep(seconds)
    return SlowToUnpickle(seconds)


class SlowToUnpickle:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> Any:
        return unpickle_slowly, (self.seconds,)


class Unhappy(Actor):
    """Raises in its constructor, or once it has been made, without a call that learns it."""

    rank: int

    def __init__(self, at: int, value: Any = None) -> None:
        if self.rank == at:
            raise ValueError("no start")

    @endpoint
    def fail(self) -> None:
        raise ValueError("no end")

    @endpoint
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def take(self, value: Any) -> None:
        pass

    @endpoint
    def take_or_fail(self, value: Any) -> int:
        if self.rank == 0:
            raise ValueError("no sample")
        time.sleep(0.5)  # replies after the call has been answered
        return 1


class Concurrent(Actor):
    rank: int

    @concurrent_endpoint
    async def make(self, size: int) -> bytes:
        await asyncio.sleep(0)
        return bytes([self.rank]) * size


class Opener(Actor):
    @endpoint
    async def open(self) -> Any:
        port, self.receiver = Channel.open()
        return port


class Referrer(Opener):
    """Uses references to values."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    @endpoint
    async def first_byte(self, reference: Any = None) -> Any:
        return (await (reference if reference is not None else self.held))[0]

    @endpoint
    async def all_first_bytes(self, references: Any) -> list[Any]:
        return [(await each)[0] for each in references.values()]

    @endpoint
    async def pass_on(self, reference: Any, others: Any) -> list[Any]:
        """What actors that are called from here find."""
        return list((await others.first_byte.call(reference)).values())

    @endpoint
    async def give_back(self, reference: Any) -> Any:
        return reference

    @endpoint
    async def receive(self) -> Any:
        return (await (await self.receiver.recv()))[0]


class Blocking(Maker):
    """Fetches in an endpoint that is not async."""

    @endpoint
    def first_byte(self, reference: Any) -> Any:
        return reference.get()[0]

    @endpoint
    def is_this(self, reference: Any) -> bool:
        return reference.get() is self.made

    @endpoint
    def make_unpicklable(self) -> Any:
        import threading

        return [threading.Lock()]


class Receiver(Opener):
    @endpoint
    async def receive(self) -> Any:
        """What the next message begins with."""
        value = await self.receiver.recv()
        if isinstance(value, dict):
            return {"all": [each[0] for each in value["all"].values()], "one": value["one"][0][0]}
        return value[0]


class PortReplier(Actor):
    @endpoint(explicit_response_port=True)
    def reply(self, port: Any) -> None:
        port.send([9])


class Buffer(Actor):
    """Has references, as a replay buffer. An endpoint that passes one on has no other to that value afterwards."""

    def __init__(self, *references: Any) -> None:
        self.references = list(references)
        self.receiver: Any = None

    @endpoint
    async def add(self, reference: Any) -> None:
        self.references.append(reference)

    @endpoint
    async def take(self) -> Any:
        return self.references.pop(0)

    @endpoint
    async def clear(self) -> None:
        self.references.clear()

    @endpoint
    async def first_byte(self) -> Any:
        """That of the latest value."""
        return (await self.references[-1])[0]

    @endpoint
    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def push(self, other: Any) -> None:
        await other.add.call_one(self.references.pop(0))

    @endpoint
    async def push_without_waiting(self, other: Any) -> None:
        other.add.broadcast(self.references.pop(0))

    @endpoint
    async def pull(self, other: Any) -> None:
        self.references.append(await other.take.call_one())

    @endpoint
    async def open(self) -> Any:
        port, self.receiver = Channel.open()
        return port

    @endpoint
    async def send_to(self, port: Any) -> None:
        port.send(self.references.pop(0))

    @endpoint
    async def receive(self) -> None:
        self.references.append(await self.receiver.recv())

    @endpoint
    async def play(self, other: Any, rounds: int) -> None:
        for _ in range(rounds):
            await other.add.call_one(self.references.pop(0))
            self.references.append(await other.take.call_one())

    @endpoint
    async def known(self) -> dict[str, int]:
        """The statistics of this process's references."""
        gc.collect()  # the traceback of an exception refers to the reference that has raised it

        found: dict[str, int] = sys.modules["_meshgate_kept"].references.statistics()
        return found

    @endpoint
    async def die(self) -> None:
        os._exit(3)

"""Actors that the tests of meshgate.testing run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from meshgate import Actor, Port, concurrent_endpoint, current_actor_name, current_rank, current_size, endpoint


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("start is negative")
        self.count = start

    @endpoint
    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    @endpoint
    def where(self) -> tuple[int, dict[str, int], int]:
        rank: int = self.rank  # type: ignore[attr-defined]
        return current_rank().rank, current_size(), rank

    @endpoint
    def name(self) -> str:
        return current_actor_name()

    @endpoint
    def fail_on(self, rank: int) -> None:
        if current_rank().rank == rank:
            raise KeyError("no such key")

    @endpoint
    def fail_with_an_unpicklable_error(self) -> None:
        raise Unpicklable(threading.Lock())

    @endpoint
    def first(self, values: Any) -> Any:
        values[0] = 7
        return values

    @endpoint
    def send(self, port: Port[str], value: str) -> None:
        port.send(value)

    @endpoint
    def wait(self, event_name: str) -> None:
        EVENTS[event_name].wait(30)


EVENTS: dict[str, threading.Event] = {}


class Unpicklable(Exception):
    pass


class Slow(Actor):
    """Its endpoints are async."""

    def __init__(self) -> None:
        self.order: list[str] = []

    @endpoint
    async def add(self, text: str) -> list[str]:
        self.order.append(text)
        return self.order


class Answering(Actor):
    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[int], value: int) -> None:
        port.send(value + 1)

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Port[int], reason: str) -> None:
        port.exception(LookupError(reason))

    @endpoint
    def send_refusal(self, port: Port[int], reason: str) -> None:
        port.exception(LookupError(reason))


class Concurrent(Actor):
    def __init__(self) -> None:
        self.released = asyncio.Event()

    @concurrent_endpoint
    async def wait(self) -> str:
        await self.released.wait()
        return "released"

    @concurrent_endpoint
    async def release(self) -> None:
        self.released.set()

"""Actors of the end-to-end tests, imported by name in the workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from meshgate import Actor, current_rank, endpoint


class Refused(Exception):
    """An exception of the user's own."""


class Point2:
    """A value of the user's own."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point2) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


class Worker(Actor):
    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.seen: list[int] = []

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def coordinates(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    @endpoint
    def record(self, number: int) -> int:
        self.seen.append(number)
        return number

    @endpoint
    def recorded(self) -> list[int]:
        return self.seen

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def doubled(self, array: Any) -> Any:
        array *= 2  # what arrives may be written to, as with Monarch itself
        return array

    @endpoint
    def array(self, length: int) -> Any:
        return np.arange(length, dtype=np.float32)

    @endpoint
    def fail(self, message: str = "no") -> None:
        raise Refused(message)

    @endpoint
    def fail_if(self, ranks: list[int]) -> int:
        rank = int(current_rank().rank)
        if rank in ranks:
            raise Refused(f"rank {rank} refuses")
        return rank

    @endpoint
    def type_of(self, value: Any) -> str:
        return f"{type(value).__module__}.{type(value).__qualname__}"

    @endpoint
    def call_others(self, others: Any, amount: int) -> list[int]:
        return sorted(others.add.call(amount).get().values())

    @endpoint
    def give(self, mesh: Any) -> Any:
        return mesh

    @endpoint
    def send_to(self, port: Any, count: int, size: int = 0) -> None:
        for number in range(count):
            port.send((number, bytes(size)) if size else number)

    @endpoint
    def say(self, text: str, end: str = "\n", error: bool = False) -> None:
        print(text, end=end, flush=True, file=sys.stderr if error else sys.stdout)

    @endpoint
    def hang(self) -> None:
        threading.Event().wait()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Ported(Actor):
    @endpoint(explicit_response_port=True)
    def answer(self, port: Any, value: int) -> None:
        port.send(value + 1)


class Refusing(Actor):
    def __init__(self) -> None:
        raise Refused("not today")

    @endpoint
    def ping(self) -> str:
        return "pong"


class Async(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


class Ranked(Actor):
    """Reads its rank as Kubetorch's programs do; ``named`` has one of its own making."""

    def __init__(self, named: bool = False) -> None:
        if named:
            self.rank = "mine"

    @endpoint
    def own(self) -> object:
        return self.rank

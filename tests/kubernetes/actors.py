"""Actors of the cluster tests. Its classes are pickled by value, because pods do not have this module."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import cloudpickle

from meshgate import Actor, endpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Trainer(Actor):
    @endpoint
    def train_step(self, batch_size: int) -> str:
        return f"step of {batch_size} on {os.uname().nodename}"

    @endpoint
    def pod(self) -> str:
        return os.uname().nodename

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def die(self, last_words: str) -> None:
        os.write(1, f"{last_words}\n".encode())
        os._exit(1)

    @endpoint
    def process(self) -> str:
        return str(os.getpid())

    @endpoint
    def wait_ended(self, process: str) -> None:
        """Returns when another process of this pod has ended, whether or not its parent has noticed."""
        while os.path.exists(f"/proc/{process}"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as status:
                if status.read().rpartition(")")[2].split()[0] == "Z":
                    return
            time.sleep(0.02)

    @endpoint
    def fill(self, megabytes: int) -> int:
        return len(bytearray(b"x") * (megabytes << 20))

    @endpoint
    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "waited"

    @endpoint
    def capabilities(self) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))


class Hanging(Actor):
    @endpoint
    async def hang(self) -> None:
        """Never returns, and leaves the process to its other actors."""
        await asyncio.Event().wait()


class Counter(Actor):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    def add(self, number: int, payload: bytes) -> bytes:
        self.numbers.append(number)
        return payload

    @endpoint
    def all(self) -> list[int]:
        return self.numbers


class Waiter(Actor):
    @endpoint
    async def wait_until_cancelled(self, text: str) -> None:
        print(f"{text} begins", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print(f"{text} ends", flush=True)

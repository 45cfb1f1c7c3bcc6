"""Actors that print, apart from the tests: ranks that import less reply sooner after their start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

from meshgate import Actor, Port, concurrent_endpoint, endpoint

MB = 2**20


def write(text: str) -> None:
    os.write(1, text.encode())


class Speaker(Actor):
    @endpoint
    def say(self, text: str) -> int:
        print(text)
        return self.rank

    @endpoint
    def warn(self, text: str) -> None:
        print(text, file=sys.stderr)

    @endpoint
    def raise_error(self, text: str) -> None:
        print(text)
        raise ValueError(text)

    @endpoint(explicit_response_port=True)
    def send(self, port: Port[int], text: str) -> None:
        print(text)
        port.send(self.rank)

    @endpoint
    def say_in_a_child(self, text: str) -> None:
        subprocess.run(["echo", text], check=True)

    @endpoint
    def say_in_a_fork(self, text: str) -> None:
        child = multiprocessing.get_context("fork").Process(target=write, args=(f"{text}\n",))
        child.start()
        child.join()

    @endpoint
    def say_at_length(self, text: str) -> None:
        print(f"{'x' * MB}\n{text}")

    @endpoint
    def say_although_redirected(self, text: str) -> None:
        """Another file takes the place of standard output, and a copy of it is what the process prints to."""
        copy = os.dup(1)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os.write(copy, f"{text}\n".encode())
        os.dup2(copy, 1)
        os.close(copy)

    @endpoint
    def say_then_ask(self, other: Any, text: str) -> list[int]:
        """The other ranks print, too, and reply to this one."""
        print(text)
        return sorted(other.say.call(text).get().values())


class AsyncSpeaker(Actor):
    @endpoint
    async def say(self, text: str) -> int:
        print(text)
        return self.rank

    @endpoint
    async def raise_error(self, text: str) -> None:
        print(text)
        raise ValueError(text)

    @endpoint
    async def say_then_ask(self, other: Any, text: str) -> list[int]:
        print(text)
        return sorted((await other.say.call(text)).values())


class ConcurrentSpeaker(Actor):
    @concurrent_endpoint
    async def say(self, text: str) -> int:
        print(text)
        return self.rank

    @endpoint
    async def loaded(self) -> None:
        pass

"""Actors of Monarch's documentation, written with meshgate's names: the imports are all that differs."""

from __future__ import annotations

import asyncio
from typing import Any

from meshgate import Actor, Channel, Port, context, current_rank, endpoint, get_or_spawn_controller


class Counter(Actor):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    @endpoint
    def increment(self, amount: int = 1) -> None:
        self.value += amount

    @endpoint
    def get_value(self) -> int:
        return self.value


class PingPong(Actor):
    """Two meshes that call each other: each has the other's handle."""

    def __init__(self, name: str) -> None:
        self.name, self.other = name, None

    @endpoint
    async def init(self, other: Any) -> None:
        self.other = other

    @endpoint
    async def send(self, message: str) -> list[str]:
        assert self.other is not None
        replies = await self.other.recv.call(f"{message} from {self.name}")
        return [reply for _, reply in replies.items()]

    @endpoint
    async def recv(self, message: str) -> str:
        return f"{self.name} {current_rank()['gpus']} got {message}"


class Member(Actor):
    """An actor that reaches other ranks of its own mesh."""

    def __init__(self) -> None:
        self.mesh: Any = None
        self.tasks: list[asyncio.Task[None]] = []

    @endpoint
    async def set_mesh(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    async def secret(self) -> int:
        return 40 + int(context().actor_instance.rank.rank)

    @endpoint
    async def ask(self, rank: int) -> int:
        answer: int = await self.mesh.flatten("rank").slice(rank=rank).secret.call_one()
        return answer

    @endpoint
    async def collect(self, each: int) -> list[int]:
        port, receiver = Channel[int].open()
        self.mesh.slice(gpus=1).produce.broadcast(port, each)
        return [await receiver.recv() for _ in range(each)]

    @endpoint
    async def produce(self, port: Port[int], count: int) -> None:
        async def stream() -> None:
            for number in range(count):
                port.send(number)

        self.tasks.append(asyncio.create_task(stream()))


class Registry(Actor):
    """A controller that any actor finds by its name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @endpoint
    def register(self, name: str) -> int:
        self.names.append(name)
        return len(self.names)


class Registered(Actor):
    @endpoint
    async def register(self) -> int:
        registry = await get_or_spawn_controller("docs_registry", Registry)
        count: int = await registry.register.call_one(str(context().actor_instance.rank.rank))
        return count


class Responder(Actor):
    """Replies through the port of the call, as often as it likes."""

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[str], question: str) -> None:
        port.send(f"{question} answered")

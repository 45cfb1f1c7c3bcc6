"""Actors of the cases. They run on the workers, where they are ordinary Monarch actors."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import sys
from typing import Any

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    Port,
    ValueMesh,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from monarch.rdma import RDMABuffer


class CustomError(Exception):
    """An exception of the program's own, with an attribute."""

    def __init__(self, message: str, code: int = 7) -> None:
        super().__init__(message, code)
        self.code = code


class Worker(Actor):
    """State, values, ranks and failures."""

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value, self.step = start, step
        self.seen: list[int] = []

    @endpoint
    def add(self, amount: int = 1, *, times: int = 1) -> int:
        self.value += amount * times * self.step
        return self.value

    @endpoint
    def note(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def noted(self) -> list[int]:
        return self.seen

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def coordinates(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def mesh_sizes(self) -> dict[str, int]:
        return dict(current_size())

    @endpoint
    def name(self) -> str:
        return current_actor_name()

    @endpoint
    def rank_by_context(self) -> int:
        return int(context().actor_instance.rank.rank)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, message: str = "no") -> None:
        raise CustomError(message)

    @endpoint
    def fail_on(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise CustomError(f"rank {rank}")
        return int(current_rank().rank)

    @endpoint
    def leave(self, code: int = 3) -> None:
        os._exit(code)

    @endpoint
    def kill_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def print(self, text: str) -> None:
        print(text)
        sys.stdout.flush()

    @endpoint
    def print_error(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @endpoint
    def parent_pid(self) -> int:
        return os.getppid()

    @endpoint
    def log(self, text: str) -> None:
        self.logger.warning(text)

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Child(Worker):
    """Endpoints are inherited, and may be overridden."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return ("child", value)


class Asynchronous(Actor):
    """Async endpoints of one actor run one after the other."""

    def __init__(self) -> None:
        self.running = 0

    @endpoint
    async def overlap(self) -> int:
        self.running += 1
        seen = self.running
        await asyncio.sleep(0.05)
        self.running -= 1
        return seen

    @endpoint
    async def fail(self) -> None:
        raise CustomError("async")


class Concurrent(Actor):
    """Concurrent endpoints overlap."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @concurrent_endpoint
    async def wait(self) -> str:
        await self.opened.wait()
        return "opened"

    @concurrent_endpoint
    async def open(self) -> None:
        self.opened.set()


class BadConstructor(Actor):
    def __init__(self) -> None:
        raise CustomError("constructor")

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Ports(Actor):
    """Sends through ports of others, and hands out ports of its own."""

    @endpoint
    def send(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def send_rank(self, port: Port[int]) -> None:
        port.send(int(current_rank().rank))

    @endpoint
    def send_exception(self, port: Port[Any], message: str) -> None:
        port.exception(CustomError(message))

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[Any], value: Any) -> None:
        port.send(("explicit", value))

    @endpoint(explicit_response_port=True)
    def answer_exception(self, port: Port[Any], message: str) -> None:
        port.exception(ValueError(message))


class Asking(Actor):
    """Opens a channel inside an actor."""

    @endpoint
    async def ask(self, other: Any, value: Any) -> Any:
        port, receiver = Channel[Any].open()
        other.send.broadcast(port, [value])
        return await receiver.recv()


class Owner(Actor):
    """Uses and creates meshes from inside an actor."""

    @endpoint
    async def call(self, workers: Any, value: Any) -> list[Any]:
        answers: ValueMesh[Any] = await workers.echo.call(value)
        return [answer for _, answer in answers.items()]

    @endpoint
    async def total(self, workers: Any) -> int:
        return sum([value for _, value in (await workers.rank.call()).items()])

    @endpoint
    async def size_of(self, mesh: Any) -> dict[str, int]:
        return dict(mesh.sizes)

    @endpoint
    async def spawn_here(self) -> Any:
        return this_proc().spawn("inner", Worker, 5)

    @endpoint
    async def spawn_on(self, procs: Any) -> Any:
        return procs.spawn("on", Worker, 9)

    @endpoint
    async def spawn_procs_here(self) -> int:
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        workers = procs.spawn("workers", Worker)
        total = sum([value for _, value in (await workers.rank.call()).items()])
        await procs.stop()
        return total

    @endpoint
    async def spawn_two(self) -> list[Any]:
        procs = this_proc()
        return [procs.spawn("first", Worker, 1), procs.spawn("second", Worker, 2)]

    @endpoint
    async def spawn_workers(self, count: int) -> Any:
        return this_host().spawn_procs(per_host={"gpus": count}).spawn("workers", Worker)

    @endpoint
    async def send_spawned(self, port: Port[Any]) -> None:
        port.send(this_proc().spawn("sent", Worker, 7))

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def accumulated(self, workers: Any) -> int:
        total: int = await Accumulator(workers.rank, 0, operator.add).accumulate()
        return total

    @endpoint
    async def controller_value(self, amount: int) -> int:
        counter = await get_or_spawn_controller("conformance_counter", Worker)
        return int(await counter.add.call_one(amount))


class Supervisor(Actor):
    """Handles the failure of actors that it spawned."""

    def __init__(self) -> None:
        self.failures = 0
        self.failed = asyncio.Event()

    async def __supervise__(self, failure: Any) -> bool:
        self.failures += 1
        self.failed.set()
        return True

    @endpoint
    async def lose_a_worker(self) -> int:
        worker = this_host().spawn_procs(per_host={"gpus": 1}).spawn("worker", Worker)
        await worker.rank.call()
        worker.leave.broadcast()
        await self.failed.wait()
        return self.failures

    @endpoint
    async def alive(self) -> bool:
        return True


def rdma_over_tcp() -> None:
    """A bootstrap: RDMA without its hardware."""
    from monarch.config import configure

    configure(rdma_disable_ibverbs=True)


class Memory(Actor):
    """Shares memory, and reads and writes that of others."""

    def __init__(self) -> None:
        self.memory = bytearray(range(256))
        self.buffer: Any = None

    @endpoint
    async def share(self) -> Any:
        self.buffer = RDMABuffer(memoryview(self.memory))
        return self.buffer

    @endpoint
    async def content(self) -> bytes:
        return bytes(self.memory)

    @endpoint
    async def read(self, buffer: Any) -> bytes:
        return await _read(buffer)

    @endpoint
    async def read_nested(self, shared: dict[str, list[Any]]) -> bytes:
        return await _read(shared["buffers"][0])

    @endpoint
    async def read_from(self, owner: Any) -> bytes:
        return await _read(await owner.share.call_one())

    @endpoint
    async def write(self, buffer: Any, data: bytes) -> None:
        await buffer.write_from(memoryview(bytearray(data)))


async def _read(buffer: Any) -> bytes:
    memory = bytearray(256)
    await buffer.read_into(memoryview(memory))
    return bytes(memory)

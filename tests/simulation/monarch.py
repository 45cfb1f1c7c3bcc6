"""Stands for Monarch and the job's hosts: worker processes whose one actor records what reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshgate.testing.fake_process import unpickle
from meshgate_gateway.engine.monarch.interface import OnFault
from meshgate_gateway.engine.objects.regions import ranks_of
from tests.gateway.engine.fakes import FakeMesh, FakeMonarch, FakePort
from tests.simulation.processes import Process, current_process

__all__ = ["SimulatedMonarch", "Worker", "Workers"]


@dataclass
class Workers:
    """The worker processes of a simulation: those that live, and by name what each has recorded."""

    alive: list[Worker] = field(default_factory=list)
    recorded: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class SimulatedMonarch(FakeMonarch):
    """The Monarch of one engine. Its actors are ``Worker`` processes, whatever their class."""

    def __init__(self, transport: str | None, on_fault: OnFault) -> None:
        super().__init__()
        self._engine = current_process()
        self._workers: Workers = self._engine.world.facts["workers"]
        self._ranks: dict[str, list[Worker]] = {}

    def spawn_procs(
        self, hosts: Any, per_host: Mapping[str, int], name: str, bootstrap: Any, launch: Any = None
    ) -> Any:
        mesh = super().spawn_procs(hosts, per_host, name, bootstrap, launch)
        count = len(self.attached[0][1]) * math.prod(per_host.values())
        address, secret, number = bootstrap.args[:3]
        self._ranks[name] = [Worker(self._workers, self._engine, name, rank) for rank in range(count)]
        for worker in self._ranks[name]:
            worker.start(address, secret, number)
        return mesh

    def spawn_actors(self, procs: FakeMesh, name: str, *_: Any) -> FakeMesh:
        self._ranks[name] = self._ranks[procs.name]
        return super().spawn_actors(procs, name)

    def payload(self, data: Any, buffers: Any = (), objects: Any = ()) -> Any:
        return [bytes(b"".join(data)), *(bytes(b"".join(each)) for each in buffers)], objects

    def payload_at(self, payload: Any, position: int, region: Any) -> Any:
        return payload

    def port_argument(self, port: Any) -> Any:
        return port

    def cast(self, actors: FakeMesh, endpoint: str, explicit_port: bool, payload: Any, port: FakePort | None) -> None:
        workers = self._ranks[actors.name]
        for rank in range(len(workers)) if actors.region is None else ranks_of(actors.region):
            workers[rank].deliver(endpoint, payload, port)


class Worker:
    """A process that runs endpoints one after the other, and ends with its engine."""

    def __init__(self, workers: Workers, engine: Process, mesh: str, rank: int) -> None:
        self.process = Process(engine.world, f"worker {rank} of {engine.name}", self._ended)
        self._workers, self.engine, self.rank = workers, engine, rank
        self.recorded = workers.recorded.setdefault(self.process.name, {})
        self._mailbox: asyncio.Queue[tuple[str, Any, FakePort | None]] = asyncio.Queue()
        workers.alive.append(self)

    def start(self, address: str, secret: str, mesh: int) -> None:
        with self.process._current():
            self.process.start(self._run(address.removeprefix("unix:"), secret, mesh))

    def _ended(self, code: int) -> None:
        self._workers.alive.remove(self)

    def deliver(self, endpoint: str, payload: Any, port: FakePort | None) -> None:
        if self.process.alive:
            self.process.loop.call_soon_threadsafe(self._mailbox.put_nowait, (endpoint, payload, port))

    async def _run(self, path: str, secret: str, mesh: int) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:  # the engine has ended
            return
        hello = {"secret": secret, "mesh": mesh, "rank": self.rank, "pid": 1, "stream": "stdout"}
        writer.write(json.dumps(hello).encode() + b"\n")
        serving = asyncio.ensure_future(self._serve(writer))
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the end of the session
        serving.cancel()
        writer.close()

    async def _serve(self, output: asyncio.StreamWriter) -> None:
        while True:
            endpoint, (buffers, objects), port = await self._mailbox.get()
            args, _ = unpickle(buffers, objects)
            result = await getattr(self, endpoint)(output, *args)
            if port is not None:
                self._send(port, result)

    def _send(self, port: FakePort, value: object) -> None:
        if self.engine.alive:
            self.engine.loop.call_soon_threadsafe(port.put, pickle.dumps(value, 5), self.rank)

    # --- the endpoints of ``driver.Recorder``

    async def record(self, output: asyncio.StreamWriter, caller: str, number: int) -> int:
        self.recorded.setdefault(caller, []).append(number)
        return number

    async def wait(self, output: asyncio.StreamWriter, number: int, seconds: float) -> int:
        self.recorded.setdefault("slow", []).append(number)
        await asyncio.sleep(seconds)
        return number

    async def echo(self, output: asyncio.StreamWriter, number: int, data: bytes) -> tuple[int, bytes]:
        self.recorded.setdefault("large", []).append(number)
        return number, data

    async def say(self, output: asyncio.StreamWriter, number: int) -> int:
        self.recorded.setdefault("lines", []).append(number)
        output.write(b"line %d\n" % number)
        await output.drain()
        return number

    async def answer(self, output: asyncio.StreamWriter, port: FakePort, number: int) -> int:
        self.recorded.setdefault("messages", []).append(number)
        self._send(port, number)
        return number

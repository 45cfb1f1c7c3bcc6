"""Stands for Monarch and the job's hosts: worker processes whose one actor records what reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshgate.testing.fake_process import unpickle
from meshgate_gateway.engine.monarch.interface import BatchedReply, OnFault, Reply
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.on_worker.kept_values import KeptStore, describe
from tests.gateway.engine.fakes import FakeMesh, FakeMonarch, FakePort
from tests.simulation.code import Agent, agents_called, call_in, open_version
from tests.simulation.processes import Process, current_process

AGENTS = "meshgate_code"
KEEPERS = "KeptValuesActor"
MESH = "procs"  # the processes of the drivers' actors
SENT_EARLY = 0.2  # of the replies in a batch: they leave before the batch ends


@dataclass
class Workers:
    """The worker processes of a simulation: those that live, the sync agents that live, and by name what each worker of
    the drivers' mesh has recorded."""

    alive: list[Worker] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    recorded: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class SimulatedMonarch(FakeMonarch):
    """The Monarch of one engine. Its actors are ``Worker`` processes, whatever their class."""

    def __init__(self, transport: str | None, on_fault: OnFault) -> None:
        super().__init__()
        self._engine = current_process()
        self._workers: Workers = self._engine.world.facts["workers"]
        self._ranks: dict[str, list[Worker]] = {}
        self._agents: dict[FakeMesh, list[Agent]] = {}
        self._reloaders: dict[FakeMesh, list[Worker]] = {}

    def spawn_procs(
        self, hosts: Any, per_host: Mapping[str, int], name: str, bootstrap: Any, launch: Any = None
    ) -> Any:
        mesh = super().spawn_procs(hosts, per_host, name, bootstrap, launch)
        if name == AGENTS:
            return self._spawn_agents(hosts, mesh)
        count = len(self.attached[0][1]) * math.prod(per_host.values())
        address, secret, number, code = bootstrap.args[:4]
        version = code[1] if code is not None else ""
        self._ranks[name] = [Worker(self._workers, self._engine, name, rank) for rank in range(count)]
        for worker in self._ranks[name]:
            worker.start(address, secret, number, version)
        return mesh

    def _spawn_agents(self, hosts: FakeMesh, mesh: FakeMesh) -> FakeMesh:
        ranks = range(len(self.attached[0][1])) if hosts.region is None else ranks_of(hosts.region)
        agents = self._agents[mesh] = [Agent(self._workers, self._engine, host) for host in ranks]
        for rank, agent in enumerate(agents):
            agent.start(*mesh.bootstrap.args[:3], rank)
        return mesh

    def spawn_engine_actors(self, procs: FakeMesh, name: str, class_name: str, *args: Any) -> FakeMesh:
        mesh = super().spawn_engine_actors(procs, name, class_name, *args)
        if procs in self._agents:
            self._agents[mesh] = self._agents[procs]
        elif class_name == KEEPERS:
            self._ranks[KEEPERS] = self._ranks[procs.name]
        else:
            self._reloaders[mesh] = self._ranks[procs.name]
        return mesh

    def slice_actors(self, actors: FakeMesh, region: Any) -> FakeMesh:
        mesh = super().slice_actors(actors, region)
        if actors in self._agents:
            self._agents[mesh] = [self._agents[actors][rank] for rank in ranks_of(region)]
        return mesh

    async def call_engine_actors(self, actors: FakeMesh, count: int, endpoint: str, *args: Any) -> list[Any]:
        if actors in self._agents:
            return await asyncio.gather(*agents_called(self._agents[actors], endpoint, args))
        if actors.name == KEEPERS:
            workers = self._workers_of(actors)
            return await asyncio.gather(
                *(call_in(each.process, self._engine, functools.partial(each.keep, endpoint, args)) for each in workers)
            )
        return await asyncio.gather(
            *(
                call_in(worker.process, self._engine, functools.partial(worker.load, args[0]))
                for worker in self._reloaders[actors]
            )
        )

    def spawn_actors(self, procs: FakeMesh, name: str, *_: Any) -> FakeMesh:
        self._ranks[name] = self._ranks[procs.name]
        return super().spawn_actors(procs, name)

    def payload(self, data: Any, buffers: Any = (), objects: Any = ()) -> Any:
        return [bytes(b"".join(data)), *(bytes(b"".join(each)) for each in buffers)], objects

    def payload_at(self, payload: Any, position: int, region: Any) -> Any:
        return payload

    def payload_keeping(self, payload: Any, number: int, label: str) -> Any:
        return *payload, (number, label)

    def payload_making_room(self, payload: Any, numbers: Sequence[int]) -> Any:
        return *payload, numbers

    def port_argument(self, port: Any) -> Any:
        return port

    def cast(self, actors: FakeMesh, endpoint: str, explicit_port: bool, payload: Any, port: FakePort | None) -> None:
        if actors in self._agents:
            for agent in self._agents[actors]:
                agent.request(endpoint, *payload)
            return
        for worker in self._workers_of(actors):
            if actors.name == KEEPERS:
                worker.serve(endpoint, payload, port)
            else:
                worker.deliver([(endpoint, payload, 0)], port, batch=False)

    def size_in_batch(self, payload: Any) -> int | None:
        buffers, *objects = payload
        return None if any(objects) or len(buffers) > 1 else len(buffers[0])

    def call_batch(self, actors: FakeMesh, calls: Sequence[tuple[str, Any, int]]) -> FakePort:
        port, receiver = self.open_port()
        if len(calls) > 1:
            self._engine.world.facts["batched"] += len(calls)
        for worker in self._workers_of(actors):
            worker.deliver(calls, port, batch=True)
        return receiver

    def _workers_of(self, actors: FakeMesh) -> list[Worker]:
        workers = self._ranks[actors.name]
        return workers if actors.region is None else [workers[rank] for rank in ranks_of(actors.region)]


class Worker:
    """A process that runs endpoints one after the other, and ends with its engine."""

    def __init__(self, workers: Workers, engine: Process, mesh: str, rank: int) -> None:
        self.process = Process(engine.world, f"worker {rank} of {engine.name}", self._ended)
        self._workers, self.engine, self.rank = workers, engine, rank
        self.recorded = workers.recorded.setdefault(self.process.name, {}) if mesh == MESH else {}
        self.mesh, self.store = mesh, KeptStore(None)
        self._held: dict[int, int] = {}  # the objects of the references that ``hold`` has got
        self._engine_of_references: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._mailbox: asyncio.Queue[tuple[Sequence[tuple[str, Any]], FakePort | None, bool]] = asyncio.Queue()
        workers.alive.append(self)

    def start(self, address: str, secret: str, mesh: int, version: str) -> None:
        with self.process._current():
            self.process.start(self._run(address.removeprefix("unix:"), secret, mesh, version))

    def _ended(self, code: int) -> None:
        self._workers.alive.remove(self)

    def deliver(self, calls: Sequence[tuple[str, Any, int]], port: FakePort | None, *, batch: bool) -> None:
        """A message of Monarch's: a call, or several. Replies go to ``port``, those to a ``batch`` together."""
        if self.process.alive:
            self.process.loop.call_soon_threadsafe(self._mailbox.put_nowait, (calls, port, batch))

    def serve(self, endpoint: str, args: Sequence[Any], port: FakePort | None) -> None:
        """A message to the actor of this process that serves kept values, beside the other actor's."""

        async def serve() -> None:
            result = await self.keep(endpoint, args)
            if port is not None:
                self._send(port, result)

        if self.process.alive:
            self.process.loop.call_soon_threadsafe(lambda: self.process.loop.create_task(serve()))

    async def keep(self, endpoint: str, args: Sequence[Any]) -> Any:
        """As ``KeptValuesActor``, of values of which each rank takes its own."""
        if endpoint == "put":
            (number, label), named = self._unpickled(*args)
            return self.store.add(number, self.rank, label, named["value"])
        if endpoint in ("read", "describe"):
            kept = self.store.find(args[0], self.rank)
            assert kept is not None, f"rank {self.rank} has lost what it kept"
            return kept.value if endpoint == "read" else describe(kept.value)
        if endpoint != "deliver":
            return getattr(self.store, endpoint)(*args)
        delivery, target, _, requests = args
        self.store.expect(delivery, target)
        await asyncio.sleep(self.process.world.chance.choice((0, 0.001, 0.1)))
        found = {index: self.store.find(number, self.rank) for index, number, *_ in requests}
        forgotten = delivery not in self.store._delivered  # a process has died: the values may be gone, too
        assert forgotten or all(found.values()), f"rank {self.rank} has lost what it kept"
        self.store.deliver(delivery, {index: kept.value for index, kept in found.items() if kept is not None})
        return None

    def _unpickled(self, buffers: Sequence[bytes], objects: Sequence[Any], released: Sequence[int] = ()) -> Any:
        self.store.make_room((), released)
        return unpickle(buffers, [self._argument(*each) if isinstance(each, tuple) else each for each in objects])

    def _argument(self, kind: str, number: int, *place: Any) -> Any:
        """What a kept value, or a reference to one, becomes in the arguments of a call; a reference, its object."""
        return self.store.take(number, *place) if kind == "take" else number

    async def _tell_engine(self, line: bytes) -> None:
        """As ``kept_references.ProcessReferences``, on a connection of its own."""
        with contextlib.suppress(OSError):  # the engine has ended, and this process is about to
            if self._engine_of_references is None:
                self._engine_of_references = await self._connect("references")
            reader, writer = self._engine_of_references
            writer.write(line)
            if line.startswith(b"+"):
                await reader.readline()

    async def _connect(self, stream: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path, hello = self._place
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(json.dumps({**hello, "stream": stream}).encode() + b"\n")
        return reader, writer

    async def _run(self, path: str, secret: str, mesh: int, version: str) -> None:
        self._place = path, {"secret": secret, "mesh": mesh, "rank": self.rank, "pid": 1}
        try:
            reader, writer = await self._connect("stdout")
        except OSError:  # the engine has ended
            return
        serving = asyncio.ensure_future(self._serve(writer, version))
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the end of the session
        serving.cancel()
        writer.close()

    async def load(self, version: str) -> None:
        self._file = await open_version(self.process, self.rank, version)

    async def _serve(self, output: asyncio.StreamWriter, version: str) -> None:
        if version:
            await self.load(version)
        while True:
            calls, port, batch = await self._mailbox.get()
            replies: list[BatchedReply] = []
            for number, (endpoint, (buffers, objects, *others), _) in enumerate(calls):
                keep = [each for each in others if isinstance(each, tuple)]
                args, _ = self._unpickled(buffers, objects, *(each for each in others if each not in keep))
                start = self.process.loop.time()
                result = await getattr(self, endpoint)(output, *args)
                for kept, label in keep:
                    result = self.store.add(kept, self.rank, label, result)
                if port is not None and not batch:
                    self._send(port, result)
                elif port is not None:
                    seconds = self.process.loop.time() - start
                    replies.append(BatchedReply(number, seconds, Reply(self.rank, False, pickle.dumps(result, 5), ())))
                    if number == len(calls) - 1 or self.process.world.chance.random() < SENT_EARLY:
                        self._reply(port, replies)
                        replies = []

    def _reply(self, port: FakePort, replies: list[BatchedReply]) -> None:
        if self.engine.alive:
            self.engine.loop.call_soon_threadsafe(port.messages.put_nowait, replies)

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

    async def make(self, output: asyncio.StreamWriter, number: int) -> list[int]:
        await asyncio.sleep(number % 3 / 10)
        return [number]

    async def use(self, output: asyncio.StreamWriter, caller: str, value: list[int]) -> int:
        self.recorded.setdefault(caller, []).append(*value)
        return value[0]

    async def hold(self, output: asyncio.StreamWriter, number: int, reference: int) -> None:
        """A driver that takes over may do so again, with another object."""
        await self._tell_engine(b"+%d\n" % reference)
        await self.let_go(output, number)
        self._held[number] = reference

    async def use_held(self, output: asyncio.StreamWriter, number: int) -> int:
        """Uses a value that nothing else keeps any more, after a while."""
        await asyncio.sleep(number % 3 / 10)
        kept = self.store.find(self._held[number], self.rank)
        assert kept is not None, f"rank {self.rank} has lost the value of a reference"
        await self.use(output, "held", kept.value)
        await self.let_go(output, number)
        return number

    async def let_go(self, output: asyncio.StreamWriter, *numbers: int) -> None:
        """Of these references, or of all."""
        for number in numbers or [*self._held]:
            if (reference := self._held.pop(number, None)) is not None:
                await self._tell_engine(b"-%d\n" % reference)

    async def version(self, output: asyncio.StreamWriter) -> int:
        return int(self._file.read_text().split()[0])

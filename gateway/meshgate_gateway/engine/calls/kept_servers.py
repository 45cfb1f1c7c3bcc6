"""The actors of the engine's own that serve kept values, one in each process that keeps or uses some.

They are spawned when the mesh of a process first keeps or uses values (``on_worker/code_actors.py``). What they are
asked to drop is collected for a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshgate_gateway.engine.calls.pending_calls import PendingCall
from meshgate_gateway.engine.failures import RequestFailed, invalid
from meshgate_gateway.engine.monarch.interface import (
    Arguments,
    CallSender,
    EngineActors,
    Payloads,
    Readiness,
    error_text,
)
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import extent_of, rank_region, ranks_of
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_gateway.engine.on_worker.kept_references import MODULE
from meshgate_wire.messages import Failed, Failure, MeshRef, Region, stream_of

CLASS = "KeptValuesActor"
CLASS_DATA = (f"c{MODULE}\n{CLASS}\n.".encode(),)  # a pickle that refers to it by name


class KeptMessaging(Payloads, CallSender, EngineActors, Arguments, Readiness, Protocol):
    """What kept values need of Monarch."""


class Calls(Protocol):
    """What kept values need of ``calling.Calling``."""

    def start(self, pending: PendingCall, mesh: ActorMesh, actors: Any, payload: Any, stream: int) -> None: ...

    def fail(self, mesh: ActorMesh) -> None: ...


@dataclass(slots=True, eq=False)
class Servers:
    """The actors that serve the kept values of processes, ``ranks`` of ``procs``."""

    actors: ActorMesh
    procs: ProcMesh
    ranks: frozenset[int]
    up: asyncio.Future[None]
    dropping: dict[asyncio.Future[Any], list[int]] = field(default_factory=dict)  # what processes may not have dropped
    targets: dict[int, set[int]] = field(default_factory=dict)  # of deliveries, with their actors that have ended


@dataclass(slots=True, eq=False)
class _Watch:
    """``died`` is done once one of the processes ``ranks`` of ``procs`` has died."""

    procs: ProcMesh
    ranks: Collection[int]
    died: asyncio.Future[None]


class KeptServers:
    """The actors that serve the kept values of a session. Set ``calls`` before any is spawned."""

    calls: Calls

    def __init__(self, objects: ObjectTable, lookup: Lookup, monarch: KeptMessaging) -> None:
        self._objects, self._lookup, self._monarch = objects, lookup, monarch
        self._loop = asyncio.get_running_loop()
        self._servers: dict[ProcMesh, list[Servers]] = {}
        self._watches: dict[_Watch, None] = {}
        self._dropped: dict[tuple[Servers, bool], list[int]] = {}  # what to drop in this turn of the event loop

    async def get(self, procs: ProcMesh, region: Region) -> Servers:
        """The actors in the processes ``region``. Raises RequestFailed if there can be none."""
        ranks = frozenset(ranks_of(region))
        known = self._servers.setdefault(procs, [])
        while True:
            servers = next((each for each in known if ranks <= each.ranks), None)
            if servers is None:
                servers = self._spawn(procs, region)
                known.append(servers)
            try:
                await asyncio.shield(servers.up)
            except Exception as error:
                if servers in known:
                    known.remove(servers)
                self._objects.require(procs.number)  # raises why the processes did not come up, if they did not
                if procs.dead.keys() & servers.ranks:
                    continue  # perhaps in a process that this call does not use: again, without it
                message = f"cannot keep values in the processes of {procs.name!r}: {error_text(error)}"
                raise RequestFailed(Failure(kind="supervision", message=message, mesh=procs.name)) from error
            return servers

    def _spawn(self, procs: ProcMesh, region: Region) -> Servers:
        """Starts the actors in all processes or, if some have ended, in ``region``, where none may have."""
        if dead := sorted(procs.dead.keys() & set(ranks_of(region))):
            raise RequestFailed(
                Failure(kind="supervision", message=procs.dead[dead[0]], mesh=procs.name, ranks=tuple(dead))
            )
        region = region if procs.dead else procs.region
        mesh = self._lookup.part(procs, region)
        per_host = extent_of(procs.region) // len(procs.host_names) if procs.host_names else 1
        spawned = self._monarch.spawn_engine_actors(mesh, "meshgate_kept", CLASS, per_host)
        actors = ActorMesh(spawned, procs.name, CLASS, (), region, procs, mesh)
        ranks = frozenset(ranks_of(region))
        return Servers(actors, procs, ranks, asyncio.ensure_future(self._wait_up(actors, procs, ranks)))

    async def _wait_up(self, actors: ActorMesh, procs: ProcMesh, ranks: Collection[int]) -> None:
        """Waits until the processes have their stores. Raises RequestFailed if one dies before, as it never answers."""
        answering = asyncio.ensure_future(self._wait_stores(actors))
        try:
            with self.watching((procs, ranks)) as died:
                await asyncio.wait((answering, died), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise invalid("a process has ended")
            answering.result()
        finally:
            answering.cancel()

    async def _wait_stores(self, actors: ActorMesh) -> None:
        """Asks the processes: Monarch may report actors before their constructors have run."""
        actors.unique_name = await self._monarch.wait_actors_initialized(actors.actors)
        await self._monarch.call_engine_actors(actors.actors, extent_of(actors.region), "statistics")

    # --- messages to them

    def part(self, servers: Servers, region: Region) -> tuple[Any, Sequence[int]]:
        """Monarch's mesh of the actors in the processes ``region``, and their base ranks."""
        _, actors, ranks = self._lookup.actors(servers.actors, MeshRef(object=0, region=region))
        return actors, ranks

    def dump(self, servers: Servers, region: Region) -> Any:
        """What lets other processes call the actors in the processes ``region``."""
        actors, _ = self.part(servers, region)
        return self._monarch.dump_actors(CLASS_DATA, CLASS, actors, region, servers.actors.procs_mesh)

    def start(self, pending: PendingCall, servers: Servers, region: Region, payload: Any, target: int) -> None:
        """Sends a call of the client's. Its answer goes out on the stream of the object ``target``."""
        self.calls.start(pending, servers.actors, self.part(servers, region)[0], payload, stream_of(target))

    def cast(self, servers: Servers, ranks: Iterable[int], endpoint: str, *args: Any) -> None:
        """Sends a message to each of these processes that lives."""
        if servers.procs.stopping:
            return
        payload = self._monarch.engine_payload(*args)
        for rank in set(ranks) - servers.procs.dead.keys():
            self._monarch.cast(self.part(servers, rank_region(rank))[0], endpoint, False, payload, None)

    def drop(self, servers: Servers, number: int, *, late: bool) -> None:
        """Makes the processes drop values. ``late``: also those that are yet to come."""
        if not self._dropped:
            self._loop.call_soon(self._send_dropped)
        self._dropped.setdefault((servers, late), []).append(number)

    def _send_dropped(self) -> None:
        dropped, self._dropped = self._dropped, {}
        for (servers, late), numbers in dropped.items():
            procs = servers.procs
            if procs.stopping:
                continue
            if procs.dead:
                self.cast(servers, servers.ranks, "drop", numbers, late)
                continue
            drop = self._monarch.call_engine_actors(servers.actors.actors, len(servers.ranks), "drop", numbers, late)
            dropping = asyncio.ensure_future(drop)
            servers.dropping[dropping] = numbers
            dropping.add_done_callback(functools.partial(_dropped, servers))

    def with_room(self, payload: Any, servers: Servers) -> Any:
        """``payload`` of a message that keeps something. It may overtake those that drop what was released, which are
        for other actors: it drops the same before, so that there is room, and waits for none of them."""
        if self._dropped:
            self._send_dropped()
        released = [number for numbers in servers.dropping.values() for number in numbers]
        return self._monarch.payload_making_room(payload, released) if released else payload

    # --- what becomes of processes

    @contextlib.contextmanager
    def watching(self, *processes: tuple[ProcMesh, Collection[int]]) -> Iterator[asyncio.Future[None]]:
        """A future that is done once one of these ranks of proc meshes has died or was stopped, perhaps before."""
        died = self._loop.create_future()
        watches = [_Watch(procs, ranks, died) for procs, ranks in processes]
        if any(not procs.dead.keys().isdisjoint(ranks) for procs, ranks in processes):
            died.set_result(None)
        self._watches.update(dict.fromkeys(watches))
        try:
            yield died
        finally:
            for watch in watches:
                del self._watches[watch]

    def process_died(self, procs: ProcMesh, rank: int, report: str) -> None:
        """Ends what waits for a process that has died or was stopped."""
        for watch in self._watches:
            if watch.procs is procs and rank in watch.ranks and not watch.died.done():
                watch.died.set_result(None)
        for servers in self._servers.get(procs, ()):
            if rank in servers.ranks:
                servers.actors.dead[rank] = report
                for dropping in servers.dropping:
                    dropping.cancel()  # no call waits for a process that is dead
                self.calls.fail(servers.actors)

    def process_back(self, procs: ProcMesh, rank: int) -> None:
        """A process that was taken for dead has answered."""
        for servers in self._servers.get(procs, ()):
            servers.actors.dead.pop(rank, None)

    def has(self, procs: ProcMesh | None) -> bool:
        return procs is not None and procs in self._servers

    def actors_ended(self, procs: ProcMesh | None, number: int, ended: set[int]) -> None:
        """These ranks of the actors ``number`` have ended: processes that live on forget what their calls have not
        taken."""
        for servers in self._servers.get(procs, ()) if procs is not None else ():
            if (known_ended := servers.targets.get(number)) is not None:
                self.cast(servers, (ended & servers.ranks) - known_ended, "forget_calls_of", [number])
                known_ended |= ended


def require_living(pending: PendingCall, procs: ProcMesh) -> None:
    """Raises RequestFailed if a process that ``pending`` is for has ended."""
    response = pending.ranks_died(procs.dead)
    if response is not None:
        assert isinstance(response.header, Failed)
        raise RequestFailed(response.header.failure)


def _dropped(servers: Servers, dropping: asyncio.Future[Any]) -> None:
    del servers.dropping[dropping]
    if not dropping.cancelled():
        dropping.exception()  # of a process that has ended, with all its values

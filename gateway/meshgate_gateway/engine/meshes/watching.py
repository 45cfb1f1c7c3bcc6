"""Watches the processes of meshes that endpoints returned, of which Monarch does not report the death.

Such a mesh belongs to an actor: Monarch supervises it for that actor only, and its processes have no connection to this
engine, unless the session has spawned them itself, as those of an actor that spawns in its own process. To others a
watcher, an actor of the engine's own, opens one from each process. The kernel closes it when the process ends, and then
calls on the mesh fail. The owner decides what else a death means: it is not reported as a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshgate_gateway.engine.interfaces import StartTask
from meshgate_gateway.engine.monarch.error_texts import error_text
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Region


class WatcherSpawner(Protocol):
    """What watching needs of Monarch; ``interface.Monarch`` documents it."""

    def process_ids(self, procs: Any) -> tuple[str, ...]: ...

    def spawn_engine_actors(self, procs: Any, name: str, class_name: str, *args: Any) -> Any: ...

    async def wait_actors_initialized(self, actors: Any) -> str: ...


class Listener(Protocol):
    """Where watchers connect to."""

    secret: str
    address: str


@dataclass(slots=True)
class _Watch:
    """Some processes, whose ``meshes`` the session got one or more times, and their watchers."""

    ids: tuple[str, ...]
    ranks: list[int]
    meshes: list[ProcMesh] = field(default_factory=list)
    watchers: Any = None
    connected: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)  # base rank to the reason


class Watching:
    """``ranks_died(mesh)`` is called after ranks of an actor mesh died."""

    def __init__(
        self,
        objects: ObjectTable,
        monarch: WatcherSpawner,
        listener: Listener,
        *,
        start_task: StartTask,
        ranks_died: Callable[[ActorMesh], None],
    ) -> None:
        self._objects, self._monarch, self._listener = objects, monarch, listener
        self._start_task, self._ranks_died = start_task, ranks_died
        self._by_processes: dict[tuple[tuple[str, ...], Region], _Watch] = {}
        self._by_number: dict[int, _Watch] = {}  # by the number of the first of its meshes
        self._spawned: dict[ProcMesh, tuple[str, ...]] = {}  # by the session: the ids of the processes

    def watch(self, number: int, procs: ProcMesh) -> None:
        """Watches the processes of object ``number`` if an endpoint returned it and they are not watched yet."""
        if procs.host_names or any(procs in watch.meshes for watch in self._by_number.values()):
            return
        ids = self._monarch.process_ids(procs.mesh)
        watch = self._by_processes.get((ids, procs.region))
        if watch is None:
            watch = _Watch(ids, ranks_of(procs.region))
            self._by_processes[ids, procs.region] = self._by_number[number] = watch
            if not self._are_spawned(watch):
                self._start_task(self._start(number, watch, procs.mesh))
        watch.meshes.append(procs)
        procs.dead.update(watch.dead)

    def _are_spawned(self, watch: _Watch) -> bool:
        """Whether the session has spawned all these processes itself. Notes those that are dead already."""
        dead: dict[str, str | None] = {}
        for known in self._objects.values():
            if isinstance(known, ProcMesh) and known.host_names and known.up is not None and known.up.done():
                if known not in self._spawned:
                    if known.stopping:
                        continue  # Monarch takes the mesh back
                    self._spawned[known] = self._monarch.process_ids(known.mesh)
                dead.update((each, known.dead.get(rank)) for rank, each in enumerate(self._spawned[known]))
        for position, each in enumerate(watch.ids):
            if report := dead.get(each):
                watch.dead[watch.ranks[position]] = report
        return bool(watch.ids) and all(each in dead for each in watch.ids)

    async def _start(self, number: int, watch: _Watch, mesh: Any) -> None:
        listener = self._listener
        try:
            watch.watchers = self._monarch.spawn_engine_actors(
                mesh, "meshgate_watcher", "ProcessWatcher", listener.address, listener.secret, number
            )
            await self._monarch.wait_actors_initialized(watch.watchers)
        except Exception as error:  # noqa: BLE001 - Monarch's exceptions have no common base
            report = f"the process does not answer: {error_text(error)}"
            silent = [rank for at, rank in enumerate(watch.ranks) if at not in watch.connected]
            self._died(watch, silent, report)

    def connected(self, number: int, position: int) -> None:
        """A watcher has connected, from the process at ``position`` of the mesh ``number``."""
        if (watch := self._by_number.get(number)) is not None:
            watch.connected.add(position)

    def process_ended(self, number: int, position: int, pid: int) -> bool:
        """The connection of a process has closed. Returns whether it was a watcher's."""
        watch = self._by_number.get(number)
        if watch is None:
            self._spawned_ended(number, position, pid)
            return False
        if position < len(watch.ranks):
            self._position_died(watch, position, pid)
        return True

    def _spawned_ended(self, number: int, rank: int, pid: int) -> None:
        """A process of mesh ``number``, which the session has spawned, has ended."""
        known = self._objects.get(number)
        ids = self._spawned.get(known, ()) if isinstance(known, ProcMesh) else ()
        if rank >= len(ids):
            return
        for watch in self._by_number.values():
            if ids[rank] in watch.ids:
                self._position_died(watch, watch.ids.index(ids[rank]), pid)

    def _position_died(self, watch: _Watch, position: int, pid: int) -> None:
        rank = watch.ranks[position]
        self._died(watch, [rank], f"process {pid} of rank {rank} of a mesh that an endpoint returned ended")

    def _died(self, watch: _Watch, ranks: list[int], report: str) -> None:
        fresh = dict.fromkeys((rank for rank in ranks if rank not in watch.dead), report)
        watch.dead.update(fresh)
        for procs in watch.meshes:
            procs.dead.update(fresh)
        for known in self._objects.values():
            if isinstance(known, ActorMesh) and known.procs in watch.meshes and fresh:
                known.dead.update(fresh)
                self._ranks_died(known)

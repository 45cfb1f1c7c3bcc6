"""Watches the processes of meshes that endpoints returned, of which Monarch does not report the death.

Such a mesh belongs to an actor: Monarch supervises it for that actor only, and its processes have no connection to this
engine. So a watcher, an actor of the engine's own, opens one from each process. The kernel closes it when the process
ends, and then calls on the mesh fail. The owner decides what else a death means: it is not reported as a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshgate_gateway.engine.interfaces import StartTask
from meshgate_gateway.engine.monarch.error_texts import error_text
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import ObjectTable


class WatcherSpawner(Protocol):
    """What watching needs of Monarch; ``interface.Monarch`` documents it."""

    def identity(self, procs: Any) -> str: ...

    def spawn_engine_actors(self, procs: Any, name: str, class_name: str, *args: Any) -> Any: ...

    async def wait_actors_initialized(self, actors: Any) -> str: ...


class Listener(Protocol):
    """Where watchers connect to."""

    secret: str
    address: str


@dataclass(slots=True)
class _Watch:
    """The watchers of some processes, whose ``meshes`` the session got one or more times."""

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
        start_task: StartTask,
        ranks_died: Callable[[ActorMesh], None],
    ) -> None:
        self._objects, self._monarch, self._listener = objects, monarch, listener
        self._start_task, self._ranks_died = start_task, ranks_died
        self._by_identity: dict[bytes, _Watch] = {}
        self._by_number: dict[int, _Watch] = {}  # by the number of the first of its meshes

    def watch(self, number: int, procs: ProcMesh) -> None:
        """Watches the processes of object ``number`` if an endpoint returned it and they are not watched yet."""
        if procs.host_names or any(procs in watch.meshes for watch in self._by_number.values()):
            return
        identity = hashlib.blake2b(self._monarch.identity(procs.mesh).encode()).digest()
        watch = self._by_identity.get(identity)
        if watch is None:
            watch = self._by_identity[identity] = self._by_number[number] = _Watch(ranks_of(procs.region))
            self._start_task(self._start(number, watch, procs.mesh))
        watch.meshes.append(procs)
        procs.dead.update(watch.dead)

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
            return False
        if position < len(watch.ranks):
            rank = watch.ranks[position]
            self._died(watch, [rank], f"process {pid} of rank {rank} of a mesh that an endpoint returned ended")
        return True

    def _died(self, watch: _Watch, ranks: list[int], report: str) -> None:
        fresh = dict.fromkeys((rank for rank in ranks if rank not in watch.dead), report)
        watch.dead.update(fresh)
        for procs in watch.meshes:
            procs.dead.update(fresh)
        for known in self._objects.values():
            if isinstance(known, ActorMesh) and known.procs in watch.meshes and fresh:
                known.dead.update(fresh)
                self._ranks_died(known)

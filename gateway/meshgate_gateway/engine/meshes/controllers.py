"""The session's controllers: actors of which there is one for each name, for the client and for all actors.

Monarch keeps them in the process of its root client, which is this engine: it could not import the user's classes, and
they would share a process with the gateway's. So the actor that keeps them runs in a process on the first host, which
is spawned when the client, or an actor of the session, asks for a controller for the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from meshgate_gateway.engine.failures import RequestFailed, invalid
from meshgate_gateway.engine.interfaces import Handler
from meshgate_gateway.engine.objects.records import ActorMesh, HostMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import GetControllers, MeshRef, Region, SpawnActors, SpawnProcs

NAME = "controllers"
_NO_ARGUMENTS = b"\x80\x05)}\x86."  # the pickle of ((), {})


class ControllerActors(Protocol):
    """What controllers need of Monarch; ``interface.Monarch`` documents it."""

    controllers_class: ClassVar[bytes]

    async def wait_actors_initialized(self, actors: Any) -> str: ...

    def dump_actors(self, class_data: Sequence[bytes], name: str, actors: Any, region: Region, procs: Any) -> bytes: ...


class RequestSpawner(Protocol):
    """Spawns as for a message of the client."""

    latest_code: tuple[str | None, tuple[str, ...]]

    async def spawn_procs(self, header: SpawnProcs, buffers: Sequence[Fragments]) -> None: ...

    async def spawn_actors(self, header: SpawnActors, buffers: Sequence[Fragments]) -> None: ...


class Controllers:
    def __init__(self, objects: ObjectTable, monarch: ControllerActors, spawner: RequestSpawner) -> None:
        self._objects, self._monarch, self._spawner = objects, monarch, spawner
        self._starting: asyncio.Future[ActorMesh] | None = None

    def handlers(self) -> Mapping[type, Handler]:
        return {GetControllers: self._get}

    async def _get(self, header: GetControllers, buffers: Sequence[Fragments]) -> None:
        if header.hosts:
            with contextlib.suppress(RequestFailed):  # another mesh may have hosts
                await self._objects.wait(header.hosts)
        self._objects.add(header.object, await self._keeper((header.version, header.paths)))

    async def dump(self) -> bytes:
        """A pickle of the actor mesh that keeps the controllers, for a worker."""
        keeper = await self._keeper(self._spawner.latest_code)
        await self._monarch.wait_actors_initialized(keeper.actors)
        data = [bytes(part) for part in keeper.class_data]
        return self._monarch.dump_actors(data, keeper.name, keeper.actors, keeper.region, keeper.procs_mesh)

    async def _keeper(self, code: tuple[str | None, tuple[str, ...]]) -> ActorMesh:
        """The actor that keeps the controllers, started once, and again if it has died."""
        if self._starting is None or (self._starting.done() and _has_ended(self._starting)):
            self._starting = asyncio.ensure_future(self._start(*code))
        return await asyncio.shield(self._starting)

    async def _start(self, version: str | None, paths: tuple[str, ...]) -> ActorMesh:
        procs, actors = self._objects.reserve(), self._objects.reserve()
        host = MeshRef(object=self._first_hosts(), region=Region(labels=(), offset=0, sizes=(), strides=()))
        await self._spawner.spawn_procs(
            SpawnProcs(object=procs, hosts=host, per_host={}, name=NAME, version=version, paths=paths), ()
        )
        await self._spawner.spawn_actors(
            SpawnActors(object=actors, procs=MeshRef(object=procs), name=NAME, class_name=NAME, kind="sync"),
            [Fragments((self._monarch.controllers_class,)), Fragments((_NO_ARGUMENTS,))],
        )
        keeper = await self._objects.wait(actors)
        if not isinstance(keeper, ActorMesh):
            raise invalid("the controllers are not actors")
        return keeper

    def _first_hosts(self) -> int:
        for number, known in self._objects.items():
            if isinstance(known, HostMesh) and 0 in ranks_of(known.region) and not known.missing:
                return number
        raise invalid("there is no host for controllers: all meshes of hosts of this session have lost hosts")


def _has_ended(starting: asyncio.Future[ActorMesh]) -> bool:
    if starting.cancelled() or starting.exception() is not None:
        return True
    keeper = starting.result()
    return bool(keeper.failed or keeper.dead or keeper.stopping)


def answer(work: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
    """``work`` with its outcome as bytes: ``+`` and the result, or ``-`` and the error's text."""

    async def outcome() -> bytes:
        try:
            return b"+" + await work()
        except RequestFailed as error:
            return b"-" + error.failure.message.encode()
        except Exception as error:  # noqa: BLE001 - passed on to the worker that asked
            return b"-" + f"{type(error).__name__}: {error}".encode()

    return outcome

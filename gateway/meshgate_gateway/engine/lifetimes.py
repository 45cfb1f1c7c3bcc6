"""How meshes of a session come to their end: who waits for one to be up, who stops it, and what is let go then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshgate_gateway.engine.objects import Actors, Channel, Hosts, Object, Procs, invalid, ranks_of, ranks_within
from meshgate_wire import Fragments
from meshgate_wire.messages import Done, Initialized, Region, Stop, stream_of

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine, Handler

STOP_TIMEOUT = 5.0
STOP_WITHOUT_HOST = 1.0


class Lifetimes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handlers(self) -> dict[type, Handler]:
        return {Initialized: self._initialized, Stop: self._stop}

    async def _initialized(self, header: Initialized, buffers: Sequence[Fragments]) -> None:
        # Beside the lane: others must not wait for a mesh to come up.
        self._engine.start(self._tell_initialized(header))

    async def _tell_initialized(self, header: Initialized) -> None:
        engine = self._engine

        async def wait() -> None:
            known = await engine.objects.when(header.target.object)
            if isinstance(known, Hosts):
                if header.whole:
                    await engine.meshes.whole(known, header.target.region)
                await engine.binding.initialized(engine.meshes.mesh_of(known))
            elif isinstance(known, Procs):
                await engine.binding.initialized(known.mesh)
            elif isinstance(known, Actors):
                await engine.binding.actors_initialized(known.inner)

        await self._answered(header, wait())

    async def _stop(self, header: Stop, buffers: Sequence[Fragments]) -> None:
        known = await self._engine.objects.when(header.target.object)
        if isinstance(known, Channel):
            raise invalid(f"object {header.target.object} is a port: there is nothing to stop")
        ended = self._ended_by(known, header.target.region)
        for mesh, ranks in ended:
            mesh.stopping = mesh.stopping or ranks is None
        self._engine.start(self._answered(header, self._stop_now(header, known, ended)))

    def _ended_by(self, known: Object, region: Region | None) -> list[tuple[Procs | Actors, set[int] | None]]:
        """The meshes that end with ``known``, and which of their base ranks, where not all."""
        if isinstance(known, Channel):
            return []
        if isinstance(known, Hosts):
            same = self._same_hosts(known)
            spawned = [each for each in self._engine.objects.each() if isinstance(each, Procs)]
            return [end for procs in spawned if procs.hosts in same for end in self._ended_by(procs, None)]
        ranks = None
        if region is not None and region != known.region:
            ranks = set(ranks_within(region, known.region, known.name))
        ended: list[tuple[Procs | Actors, set[int] | None]] = [(known, ranks)]
        if isinstance(known, Procs):
            actors = [each for each in self._engine.objects.each() if isinstance(each, Actors)]
            ended += [(each, ranks) for each in actors if each.procs is known]
        return ended

    def _same_hosts(self, known: Hosts) -> list[Hosts]:
        """``known`` and whatever else of the session is attached to the same hosts."""
        if not all(known.addresses):
            return [known]  # an endpoint returned it: where its hosts are is not known
        attached = [each for each in self._engine.objects.each() if isinstance(each, Hosts)]
        return [each for each in attached if (each.name, each.addresses) == (known.name, known.addresses)]

    async def _stop_now(
        self, header: Stop, known: Object, ended: Sequence[tuple[Procs | Actors, set[int] | None]]
    ) -> None:
        binding = self._engine.binding
        if isinstance(known, Actors):
            await binding.stop_actors(self._engine.calling.actors_at(known, header.target)[1], header.reason)
        elif isinstance(known, Procs):
            await binding.stop_procs((await self._engine.meshes.mesh(header.target, Procs))[1], header.reason)
        elif isinstance(known, Hosts) and header.shutdown:
            await binding.shut_down_hosts(self._engine.meshes.mesh_of(known))
        elif isinstance(known, Hosts):
            same = self._same_hosts(known)
            await asyncio.gather(*(binding.stop_hosts(self._engine.meshes.mesh_of(hosts)) for hosts in same))
            for hosts in same:
                hosts.moved = True  # Monarch takes what it stopped for good; the hosts are there for whoever comes next
        for mesh, ranks in ended:
            why = f"mesh {mesh.name!r} was stopped: {header.reason}"
            mesh.dead.update(dict.fromkeys(ranks if ranks is not None else ranks_of(mesh.region), why))
            if isinstance(mesh, Actors):
                self._engine.calling.fail(mesh)

    def release(self, number: int) -> None:
        """The laptop holds ``number`` no longer. Meshes that were spawned here stay until the session ends: hosts were
        seen to end where Monarch's objects of stopped meshes are dropped before that."""
        if number > 0 and isinstance(self._engine.objects.known(number), (Procs, Actors)):
            return
        self._engine.objects.release(number)

    async def _answered(self, header: Stop | Initialized, work: Any) -> None:
        stream = stream_of(header.target.object)
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the laptop is told whatever it is
            self._engine._refuse(header, error)
        else:
            self._engine.send(Done(call=header.call), stream=stream)

    async def stop_all(self, reason: str) -> None:
        """Stops every proc mesh, and with it every actor, within ``STOP_TIMEOUT``; sooner where a host is lost, for
        Monarch would wait for it. What is left ends when its connection does."""
        procs = [known for known in self._engine.objects.each() if isinstance(known, Procs)]
        for mesh in procs:
            mesh.stopping = True
        for actors in self._engine.objects.each():
            if isinstance(actors, Actors):
                actors.stopping = True
        stops = [
            asyncio.ensure_future(self._engine.binding.stop_procs(mesh.mesh, reason))
            for mesh in procs
            if mesh.host_names
        ]
        if stops:
            timeout = STOP_WITHOUT_HOST if self._engine.meshes.lost_hosts else STOP_TIMEOUT
            _, late = await asyncio.wait(stops, timeout=timeout)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)

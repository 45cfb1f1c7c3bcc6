"""Waits until meshes are up, stops them and releases them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from meshgate_gateway.engine.failures import FailureReports, RequestFailed, invalid
from meshgate_gateway.engine.interfaces import Handler, Send, StartTask
from meshgate_gateway.engine.objects.records import ActorMesh, Channel, HostMesh, ProcMesh, SessionObject
from meshgate_gateway.engine.objects.regions import ranks_of, ranks_within
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Done, Initialized, Region, Release, Stop, stream_of

# Seconds that the meshes of an ending session have to stop: the three that Monarch gives a `__cleanup__`, which may be
# saving something, and the way there. An actor that is in an endpoint, or that has a flood of calls before it, would
# take longer.
STOP_TIMEOUT = 3.5
STOP_TIMEOUT_HOST_LOST = 1.0  # the same if a host is lost, since Monarch would wait for it until the timeout


class Stopper(Protocol):
    """What lifetimes need of Monarch; ``interface.Monarch`` documents it."""

    async def wait_initialized(self, mesh: Any) -> None: ...

    async def wait_actors_initialized(self, actors: Any) -> str: ...

    async def stop_actors(self, actors: Any, reason: str) -> None: ...

    async def stop_procs(self, procs: Any, reason: str) -> None: ...

    async def stop_hosts(self, hosts: Any) -> None: ...

    async def shut_down_hosts(self, hosts: Any) -> None: ...


class _Stopped(NamedTuple):
    """A mesh that a Stop request stops; ``ranks`` are its base ranks that stop, or None for all."""

    mesh: ProcMesh | ActorMesh
    ranks: set[int] | None


class Lifetimes:
    """``wait_available(hosts, region)`` waits for lost hosts to return. ``lost_hosts`` are those that have not.
    ``ranks_stopped(mesh)`` is called after ranks of an actor mesh were stopped."""

    def __init__(
        self,
        objects: ObjectTable,
        lookup: Lookup,
        monarch: Stopper,
        send: Send,
        start_task: StartTask,
        failures: FailureReports,
        *,
        wait_available: Callable[[HostMesh, Region | None], Awaitable[None]],
        lost_hosts: Mapping[str, str],
        ranks_stopped: Callable[[ActorMesh], None],
    ) -> None:
        self._objects, self._lookup, self._monarch, self._send = objects, lookup, monarch, send
        self._start_task, self._failures = start_task, failures
        self._wait_available, self._lost_hosts, self._ranks_stopped = wait_available, lost_hosts, ranks_stopped

    def handlers(self) -> Mapping[type, Handler]:
        return {Initialized: self.initialized, Stop: self.stop, Release: self.release}

    def initialized(self, header: Initialized, buffers: Sequence[Fragments]) -> None:
        self._start_task(self._answer(header, self._wait_initialized(header)))  # later messages need not wait for it

    async def _wait_initialized(self, header: Initialized) -> None:
        failure = self._objects.failure(header.target.object)
        if failure is not None and failure.kind == "actor":
            raise RequestFailed(failure)  # a bootstrap raised, as Monarch's `initialized` reports
        known = await self._objects.wait(header.target.object)
        if isinstance(known, HostMesh):
            if header.whole:
                await self._wait_available(known, header.target.region)
            await self._wait_attached(known)
        elif isinstance(known, ProcMesh):
            await self._monarch.wait_initialized(known.mesh)
        elif isinstance(known, ActorMesh):
            await self._monarch.wait_actors_initialized(known.actors)

    async def _wait_attached(self, known: HostMesh) -> None:
        wait = asyncio.ensure_future(self._monarch.wait_initialized(self._lookup.attached(known)))
        known.waits.add(wait)
        try:
            await wait
        except asyncio.CancelledError:
            if not known.refused:
                raise
            raise invalid(known.refused) from None
        finally:
            known.waits.discard(wait)

    async def stop(self, header: Stop, buffers: Sequence[Fragments]) -> None:
        known = await self._objects.wait(header.target.object)
        if isinstance(known, Channel):
            raise invalid(f"object {header.target.object} is a port; only meshes can be stopped")
        stopped = self._stopped_with(known, header.target.region)
        for mesh, ranks in stopped:
            mesh.stopping = mesh.stopping or ranks is None
        self._start_task(self._answer(header, self._stop(header, known, stopped)))

    def _stopped_with(self, known: HostMesh | ProcMesh | ActorMesh, region: Region | None) -> list[_Stopped]:
        """The proc and actor meshes that stop with ``region`` of ``known``."""
        if isinstance(known, HostMesh):
            same = self._same_hosts(known)
            spawned = [each for each in self._objects.values() if isinstance(each, ProcMesh) and each.hosts in same]
            return [stopped for procs in spawned for stopped in self._stopped_with(procs, None)]
        ranks = None
        if region is not None and region != known.region:
            ranks = set(ranks_within(region, known.region, known.name))
        stopped = [_Stopped(known, ranks)]
        if isinstance(known, ProcMesh):
            actors = [each for each in self._objects.values() if isinstance(each, ActorMesh) and each.procs is known]
            stopped += [_Stopped(each, ranks) for each in actors]
        return stopped

    def _same_hosts(self, known: HostMesh) -> list[HostMesh]:
        """``known`` and every other mesh of the session that is attached to the same hosts."""
        if not all(known.addresses):
            return [known]  # an endpoint returned it: its addresses are unknown
        attached = [each for each in self._objects.values() if isinstance(each, HostMesh)]
        return [each for each in attached if (each.name, each.addresses) == (known.name, known.addresses)]

    async def _stop(self, header: Stop, known: SessionObject, stopped: Sequence[_Stopped]) -> None:
        if isinstance(known, ActorMesh):
            await self._monarch.stop_actors(self._lookup.actors(known, header.target)[1], header.reason)
        elif isinstance(known, ProcMesh):
            await self._monarch.stop_procs((await self._lookup.procs(header.target))[1], header.reason)
        elif isinstance(known, HostMesh) and header.shutdown:
            await self._monarch.shut_down_hosts(self._lookup.attached(known))
        elif isinstance(known, HostMesh):
            same = self._same_hosts(known)
            await asyncio.gather(*(self._monarch.stop_hosts(self._lookup.attached(hosts)) for hosts in same))
            for hosts in same:
                hosts.must_attach = True  # Monarch's mesh is unusable now, although the host processes run on
        for mesh, ranks in stopped:
            report = f"mesh {mesh.name!r} was stopped: {header.reason}"
            mesh.dead.update(dict.fromkeys(ranks if ranks is not None else ranks_of(mesh.region), report))
            if isinstance(mesh, ActorMesh):
                self._ranks_stopped(mesh)

    async def _answer(self, header: Stop | Initialized, work: Awaitable[None]) -> None:
        async def done() -> None:
            await work
            self._send(Done(call=header.call), stream=stream_of(header.target.object))

        await self._failures.guard(header, done())

    def release(self, header: Release, buffers: Sequence[Fragments]) -> None:
        """The client no longer refers to these objects.

        Meshes that this session spawned stay in the table until it ends: hosts crash if Monarch's objects of stopped
        meshes are dropped earlier.
        """
        for number in header.objects:
            known = self._objects.get(number)
            if number > 0 and isinstance(known, (ProcMesh, ActorMesh)):
                continue
            if isinstance(known, Channel):
                known.stop_reading()
            self._objects.release(number)

    async def stop_all(self, reason: str) -> None:
        """Stops every proc mesh that this session spawned, and with it every actor, within the timeout.

        Processes that are left end when their connection to the engine closes.
        """
        for known in self._objects.values():
            if isinstance(known, (ProcMesh, ActorMesh)):
                known.stopping = True
        stops = [
            asyncio.ensure_future(self._monarch.stop_procs(known.mesh, reason))
            for known in self._objects.values()
            if isinstance(known, ProcMesh) and known.host_names
        ]
        if stops:
            timeout = STOP_TIMEOUT_HOST_LOST if self._lost_hosts else STOP_TIMEOUT
            _, late = await asyncio.wait(stops, timeout=timeout)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)

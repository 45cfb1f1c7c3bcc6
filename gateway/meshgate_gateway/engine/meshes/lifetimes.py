"""Waits until meshes are up, stops them and releases them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from meshgate_gateway.engine.failures import FailureReports, RequestFailed, invalid
from meshgate_gateway.engine.interfaces import CONTROL_STREAM, Handler, Send, StartTask
from meshgate_gateway.engine.monarch.interface import Stopper
from meshgate_gateway.engine.objects.records import ActorMesh, Channel, HostMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of, ranks_within
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Done, Failure, Initialized, Region, Release, Stop, stream_of

# Seconds that meshes have to stop if their session ends or one of their hosts is lost: the three that Monarch gives a
# `__cleanup__`, which may be saving something, and the way there. An actor that is in an endpoint, or that has a flood
# of calls before it, would take longer.
STOP_TIMEOUT = 3.5
STOP_TIMEOUT_HOST_LOST = 1.0  # the same if a host is lost, since Monarch would wait for it until the timeout


class _Stopped(NamedTuple):
    """A mesh that a Stop request stops; ``ranks`` are its base ranks that stop, or None for all. ``lost`` had ended
    before the request: what is known of their ends is kept."""

    mesh: ProcMesh | ActorMesh
    ranks: set[int] | None
    lost: frozenset[int]


class ReleaseKept(Protocol):
    def __call__(self, kept: KeptMesh, *, at_once: bool) -> None:
        """The client no longer refers to values that stay in processes. ``at_once``: no matter who else does."""


class Lifetimes:
    """``wait_available(hosts, region)`` waits for lost hosts to return. ``lost_hosts`` are those that have not.
    ``ranks_stopped(mesh)`` is called after ranks of an actor mesh were stopped, ``process_stopped(mesh, rank, report)``
    for each of a proc mesh; ``end_processes(mesh)`` ends those of the proc mesh with this number."""

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
        process_stopped: Callable[[ProcMesh, int, str], None],
        end_processes: Callable[[int], None],
        release_kept: ReleaseKept,
    ) -> None:
        self._objects, self._lookup, self._monarch, self._send = objects, lookup, monarch, send
        self._release_kept, self._process_stopped = release_kept, process_stopped
        self._parts: dict[int, int] = {}  # of releases that have not arrived completely
        self._start_task, self._failures = start_task, failures
        self._wait_available, self._lost_hosts, self._ranks_stopped = wait_available, lost_hosts, ranks_stopped
        self._end_processes = end_processes

    def handlers(self) -> Mapping[type, Handler]:
        return {Initialized: self.initialized, Stop: self.stop, Release: self.release}

    def initialized(self, header: Initialized, buffers: Sequence[Fragments]) -> None:
        self._start_task(self._answer(header, self._wait_initialized(header)))  # later messages need not wait for it

    async def _wait_initialized(self, header: Initialized) -> None:
        known = await self._objects.wait(header.target.object)
        if isinstance(known, HostMesh):
            if header.whole:
                await self._wait_available(known, header.target.region)
            while not await self._wait_attached(known) and header.whole:  # a host was lost meanwhile
                await self._wait_available(known, header.target.region)
        elif isinstance(known, ProcMesh):
            await self._wait_up(header.target.object, known)
        elif isinstance(known, ActorMesh):
            await self._monarch.wait_actors_initialized(known.actors)

    async def _wait_attached(self, known: HostMesh) -> bool:
        """Waits until all hosts have answered. Returns whether they have: one may be lost before it has."""
        if known.cut_short:
            return False
        wait = asyncio.ensure_future(self._monarch.wait_initialized(self._lookup.attached(known)))
        known.waits[wait] = None
        try:
            await asyncio.wait((wait,))
        finally:
            known.waits.pop(wait)
            wait.cancel()
        if known.refused:
            raise invalid(known.refused)
        if wait.cancelled():
            return False
        wait.result()
        return True

    async def _wait_up(self, number: int, known: ProcMesh) -> None:
        """Waits until the processes are up, but not for those on a lost host, on which Monarch gives up much later."""
        wait = asyncio.ensure_future(self._monarch.wait_initialized(known.mesh))
        try:
            await asyncio.wait((wait,) if known.up is None else (wait, known.up), return_when=asyncio.FIRST_COMPLETED)
            if known.given_up:
                self._require_created(number)
            await wait
        finally:
            wait.cancel()

    async def stop(self, header: Stop, buffers: Sequence[Fragments]) -> None:
        known = await self._objects.wait(header.target.object)
        if isinstance(known, (Channel, KeptMesh)):
            kind = "a port" if isinstance(known, Channel) else "kept values"
            raise invalid(f"object {header.target.object} is {kind}; only meshes can be stopped")
        stopped = self._stopped_with(known, header.target.region)
        for mesh, ranks, _ in stopped:
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
        stopped = [_Stopped(known, ranks, frozenset(known.dead))]
        if isinstance(known, ProcMesh):
            actors = [each for each in self._objects.values() if isinstance(each, ActorMesh) and each.procs is known]
            stopped += [_Stopped(each, ranks, frozenset(each.dead)) for each in actors]
        return stopped

    def _same_hosts(self, known: HostMesh) -> list[HostMesh]:
        """``known`` and every other mesh of the session that is attached to the same hosts."""
        if not all(known.addresses):
            return [known]  # an endpoint returned it: its addresses are unknown
        attached = [each for each in self._objects.values() if isinstance(each, HostMesh)]
        return [each for each in attached if (each.name, each.addresses) == (known.name, known.addresses)]

    async def _stop(self, header: Stop, known: HostMesh | ProcMesh | ActorMesh, stopped: Sequence[_Stopped]) -> None:
        unusable: list[HostMesh] = []  # afterwards, although the host processes run on
        work: Awaitable[Any]
        if isinstance(known, ActorMesh):
            work = self._stop_actors(known, header)
        elif isinstance(known, ProcMesh):
            work = self._monarch.stop_procs((await self._lookup.procs(header.target))[1], header.reason)
        elif header.shutdown:
            work = self._monarch.shut_down_hosts(self._lookup.attached(known))
        else:
            unusable = self._same_hosts(known)
            work = asyncio.gather(
                *(self._monarch.stop_hosts(self._lookup.attached(hosts)) for hosts in unusable),
                *(self._monarch.stop_procs(procs.mesh, header.reason) for procs in _spawned_apart(stopped)),
            )
        asked = known.procs if isinstance(known, ActorMesh) else known
        complete = await self._wait_stopped(work, asked, stopped[0].ranks if stopped else None)
        for hosts in unusable:
            hosts.must_attach = True
        for mesh, ranks, lost in stopped:
            report = f"mesh {mesh.name!r} was stopped: {header.reason}"
            ended = ranks if ranks is not None else ranks_of(mesh.region)
            mesh.dead.update(
                {rank: report for rank in ended if rank not in lost or rank not in mesh.dead}, stopped=True
            )
            if isinstance(mesh, ActorMesh):
                self._ranks_stopped(mesh)
                if ranks is None:
                    mesh.forget_timelines()
                continue
            for rank in ended:
                self._process_stopped(mesh, rank, report)
            if not complete and ranks is None and mesh.number:
                self._end_processes(mesh.number)

    async def _stop_actors(self, known: ActorMesh, header: Stop) -> None:
        actors = self._lookup.actors(known, header.target)[1]
        try:
            await self._monarch.stop_actors(actors, header.reason)
        except Exception as error:
            procs = known.procs
            if procs is not None:  # whose ends are not passed on to actors that stop
                known.dead.add_from(procs.dead, ranks_of(known.region))
            died = sorted(known.dead.keys() - known.dead.stopped)
            if not died:
                raise
            known.stopping = procs is not None and procs.stopping
            self._ranks_stopped(known)
            raise RequestFailed(Failure.of_stop(known.name, died[0], known.dead[died[0]])) from error

    async def _wait_stopped(
        self, work: Awaitable[Any], known: HostMesh | ProcMesh | None, ranks: set[int] | None
    ) -> bool:
        """Waits for ``work``, by which Monarch stops these ranks of ``known``, or actors there. None: all.

        Monarch waits for more than a minute for the answer of a lost host. If there is one, this waits no longer
        than the others, which are asked at the same time, may take, and returns False. Monarch may not have stopped
        them, if it knew of the loss.
        """
        stop = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((stop,), timeout=STOP_TIMEOUT))[0]:
                if self._has_lost(known, ranks):
                    return False
            stop.result()
            return True
        finally:
            stop.cancel()

    def _has_lost(self, known: HostMesh | ProcMesh | None, ranks: set[int] | None) -> bool:
        """Whether a host that is asked is lost, or had been before another took its place."""
        if isinstance(known, ProcMesh):
            asked = known.host_names if ranks is None else [known.host_of(rank) for rank in ranks]
            return not known.lost_hosts.isdisjoint(asked)
        return known is not None and any(name in self._lost_hosts for name in known.names)

    async def _answer(self, header: Stop | Initialized, work: Awaitable[None]) -> None:
        number = header.target.object
        known = self._objects.get(number)
        created = known.up if isinstance(known, (ProcMesh, ActorMesh)) else None

        async def done() -> None:
            try:
                await work
            except Exception:
                if created is not None:  # it knows why the mesh could not be created; Monarch may only know that
                    await asyncio.wait([created])
                self._require_created(number)
                raise
            # After what was sent about the hosts: that they are attached, or no longer about to end.
            of_hosts = isinstance(self._objects.get(number), HostMesh)
            self._send(Done(call=header.call), stream=CONTROL_STREAM if of_hosts else stream_of(number))

        await self._failures.guard(header, done())

    def _require_created(self, number: int) -> None:
        """Raises RequestFailed if the object could not be created: with the exception of a bootstrap, as Monarch's
        ``initialized``."""
        failure = self._objects.failure(number)
        if failure is not None:
            raise RequestFailed(failure if failure.kind == "actor" else failure.as_cause())

    def release(self, header: Release, buffers: Sequence[Fragments]) -> None:
        """The client no longer refers to these objects.

        Meshes that this session spawned stay in the table until it ends: hosts crash if Monarch's objects of stopped
        meshes are dropped earlier.
        """
        for number in header.objects:
            if header.parts > 1 and not self._is_last(number, header.parts):
                continue
            known = self._objects.get(number)
            if number > 0 and isinstance(known, (ProcMesh, ActorMesh)):
                continue
            if isinstance(known, Channel):
                known.stop_reading()
            elif isinstance(known, KeptMesh):
                self._release_kept(known, at_once=header.at_once)
            self._objects.release(number)

    def _is_last(self, number: int, parts: int) -> bool:
        """Whether all ``parts`` of a release have arrived: messages before them may name the object."""
        self._parts[number] = arrived = self._parts.get(number, 0) + 1
        if arrived < parts:
            return False
        del self._parts[number]
        return True

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


def _spawned_apart(stopped: Sequence[_Stopped]) -> list[ProcMesh]:
    """Those of the stopped proc meshes that Monarch does not stop with their hosts: an attachment stops only what was
    spawned through it, and each part of a mesh without some hosts has one of its own."""
    return [
        mesh
        for mesh, _, _ in stopped
        if isinstance(mesh, ProcMesh)
        and mesh.hosts is not None
        and mesh.hosts.apart
        and not mesh.dead.keys() >= set(ranks_of(mesh.region))
    ]

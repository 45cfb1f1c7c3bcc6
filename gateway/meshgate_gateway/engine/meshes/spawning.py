"""Spawns processes and actors, and the session's controllers: one actor for each name.

A mesh is in the table as soon as its creation has been handed to Monarch, so that requests that depend on it proceed
at once. If Monarch reports later that the creation failed, the failure replaces the mesh, and everything that depends
on it fails with that step as the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from meshgate_gateway.engine.failures import FailureReports, RequestFailed, invalid
from meshgate_gateway.engine.interfaces import Handler, SetUpProcess, StartTask
from meshgate_gateway.engine.monarch.interface import (
    BootstrapFailed,
    ControllerActors,
    Spawner,
    error_text,
    unreachable_addresses,
)
from meshgate_gateway.engine.objects.records import ActorMesh, HostMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import procs_region, rank_region, ranks_of
from meshgate_gateway.engine.objects.table import HostsMissing, Lookup, ObjectTable, Taker
from meshgate_wire import Fragments
from meshgate_wire.handshake import monarch_version
from meshgate_wire.messages import Failure, GetControllers, MeshRef, Region, SpawnActors, SpawnProcs

MAX_HOSTS_NAMED = 8
NAME = "controllers"
_NO_ARGUMENTS = b"\x80\x05)}\x86."  # the pickle of ((), {})


class Code(Protocol):
    """What spawning needs of the code that processes run."""

    async def wait_for_version(self, version: str, hosts: Sequence[str]) -> str:
        """Waits until ``hosts`` have ``version`` or, if another has replaced it, that one; returns which."""

    def process_code(self, version: str | None, paths: Sequence[str]) -> Any:
        """What ``on_worker.set_up_process`` starts a process from."""


class BringUpToDate(Protocol):
    async def __call__(self, target: MeshRef, procs: ProcMesh, mesh: Any, version: str, paths: Sequence[str]) -> None:
        """Reloads running processes, ``mesh`` of Monarch's, so that they run ``version``."""


class DeliverKept(Protocol):
    async def __call__(self, taker: Taker, arguments: Sequence[Any]) -> tuple[Any, Callable[[None], None]]:
        """Gets the kept values among ``arguments`` into processes, as ``KeptValues.deliver``."""


class Spawning:
    """``end_processes(mesh)`` ends all processes of a mesh; ``actors_up(mesh)`` and ``actors_failed(mesh)`` are called
    when the constructors of an actor mesh have run, or one has raised; ``watch(number, procs)`` when actors are spawned
    in the processes of an object. ``version_problem(hosts)`` is what earlier actors there found, or empty."""

    def __init__(
        self,
        objects: ObjectTable,
        lookup: Lookup,
        monarch: Spawner,
        code: Code,
        *,
        start_task: StartTask,
        failures: FailureReports,
        set_up_process: SetUpProcess,
        bring_up_to_date: BringUpToDate,
        end_processes: Callable[[int], None],
        actors_up: Callable[[ActorMesh], None],
        actors_failed: Callable[[ActorMesh], None],
        watch: Callable[[int, ProcMesh], None],
        version_problem: Callable[[Sequence[str]], str],
        deliver_kept: DeliverKept,
    ) -> None:
        self._objects, self._lookup, self._monarch, self._code = objects, lookup, monarch, code
        self._start_task, self._failures, self._set_up_process = start_task, failures, set_up_process
        self._bring_up_to_date, self._end_processes = bring_up_to_date, end_processes
        self._report_up, self._report_failed, self._watch = actors_up, actors_failed, watch
        self._version_problem, self._deliver_kept = version_problem, deliver_kept
        self.latest_code: tuple[str | None, tuple[str, ...]] = (None, ())
        """The version and paths that the client's latest processes were spawned with."""

    def handlers(self) -> Mapping[type, Handler]:
        return {SpawnProcs: self.spawn_procs, SpawnActors: self.spawn_actors}

    async def spawn_procs(self, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        self.latest_code = (header.version, header.paths)
        hosts, mesh, names, version = await self._hosts_with_code(header)
        procs_shape = procs_region(header.hosts.region or hosts.region, header.per_host)
        bootstrap = self._lookup.payload(buffers[:1], ()) if buffers else None
        code = self._code.process_code(version, header.paths)
        per_host = math.prod(header.per_host.values())
        setup = self._set_up_process(header.object, code, bootstrap, header.name, per_host)
        spawned = self._monarch.spawn_procs(mesh, header.per_host, header.name, setup, header.launch)
        procs = ProcMesh(spawned, header.name, procs_shape, names, hosts, version, number=header.object)
        self._objects.add(header.object, procs)
        procs.initialized = initialized = asyncio.ensure_future(self._monarch.wait_initialized(spawned))
        procs.up = self._start_task(self._watch_procs(header, hosts, procs, initialized))

    async def _hosts_with_code(self, header: SpawnProcs) -> tuple[HostMesh, Any, tuple[str, ...], str | None]:
        """The hosts, Monarch's mesh of them, their names, and the version that all of them have.

        Nothing may be awaited between this and the spawn, which would not be given up if a host were lost meanwhile.
        Raises RequestFailed if a host is lost.
        """
        version = header.version
        while True:
            try:
                hosts, mesh = await self._lookup.hosts(header.hosts)
            except HostsMissing as error:
                raise RequestFailed(_spawn_failure(header, error.failure.message)) from None
            names = tuple(hosts.names[rank] for rank in ranks_of(header.hosts.region or hosts.region))
            if missing := hosts.missing_among(names):
                raise RequestFailed(_spawn_failure(header, missing))
            if version is None:
                return hosts, mesh, names, None
            attached = hosts.hosts
            try:
                version = await self._code.wait_for_version(version, names)
            except RequestFailed:
                if missing := hosts.missing_among(names):  # a host was lost meanwhile, which explains the failure
                    raise RequestFailed(_spawn_failure(header, missing)) from None
                if hosts.hosts is attached:
                    raise
                version = header.version  # the host that has taken the place of the lost one has yet to get it
                continue
            # If a host was replaced meanwhile, the mesh leads to the old one, and Monarch would wait for its answer.
            if hosts.hosts is attached and not hosts.missing_among(names):
                return hosts, mesh, names, version

    async def _watch_procs(
        self, header: SpawnProcs, hosts: HostMesh, procs: ProcMesh, initialized: asyncio.Future[None]
    ) -> None:
        try:
            await initialized
        except (Exception, asyncio.CancelledError) as error:
            missing = procs.given_up or hosts.missing_among(procs.host_names)
            if isinstance(error, asyncio.CancelledError) and not missing:
                raise
            if isinstance(error, BootstrapFailed) and not missing:
                failure = _spawn_failure(header, str(error), "actor")
            else:
                # An actor that the setup spawns fails with the reason, and the next one because the first has.
                reason = missing or self._version_problem(procs.host_names)
                failure = _spawn_failure(header, reason or explain_unreachable(hosts, error_text(error)))
            self._failures.object_failed(header.object, failure)
            self._end_processes(header.object)  # some may have come up

    async def spawn_actors(self, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        procs, mesh = await self._lookup.procs(header.procs)
        if len(buffers) < 2:
            raise invalid("the message has no pickled class or no pickled arguments")
        if header.version is not None:
            await self._bring_up_to_date(header.procs, procs, mesh, header.version, header.paths)
        class_data = buffers[0].fragments
        arguments: Sequence[Any] = await self._lookup.arguments(header.arguments)
        forget: Callable[[None], None] | None = None
        region = header.procs.region or procs.region
        self._watch(header.procs.object, procs)  # which knows the deaths in processes that an endpoint returned
        if any(argument.kind == "kept" for argument in header.arguments):
            taker = Taker(f"{header.name}.__init__", procs, region, header.object, cast=True)
            arguments, forget = await self._deliver_kept(taker, arguments)
        try:
            _require_living(header, procs, region)
            payload = self._lookup.payload(buffers[1:], arguments)
            spawned = self._monarch.spawn_actors(mesh, header.name, header.class_name, header.kind, class_data, payload)
        except Exception as error:  # Monarch itself may know before the engine that the processes did not come up
            if forget is not None:
                forget(None)
            if failure := await self._procs_failure(header, procs):
                raise RequestFailed(failure) from error
            raise
        actors = ActorMesh(spawned, header.name, header.class_name, class_data, region, procs, mesh)
        self._objects.add(header.object, actors)
        actors.up = self._start_task(self._watch_actors(header, actors, procs))

    async def _watch_actors(self, header: SpawnActors, actors: ActorMesh, procs: ProcMesh) -> None:
        try:
            actors.unique_name = await self._monarch.wait_actors_initialized(actors.actors)
        except Exception as error:  # noqa: BLE001 - Monarch's exceptions have no common base
            failure = await self._procs_failure(header, procs)
            if failure is None:
                if actors.stopping:
                    return
                failure = Failure.of_spawn(header.name, header.class_name, error_text(error))
            actors.failed = failure.as_cause()
            self._failures.object_failed(header.object, failure, lambda: self._report_failed(actors))
        else:
            self._report_up(actors)

    async def _procs_failure(self, header: SpawnActors, procs: ProcMesh) -> Failure | None:
        """The failure of the actors' proc mesh, which explains theirs. Waits until it is known."""
        if procs.up is not None:
            await asyncio.wait([procs.up])
        try:
            self._objects.require(header.procs.object)
        except RequestFailed as error:
            return error.failure
        return None


def explain_unreachable(hosts: HostMesh, report: str) -> str:
    """``report`` of Monarch's, preceded by which hosts did not answer and what to check, if that is the cause."""
    silent = set(unreachable_addresses(report, hosts.addresses))
    if not silent:
        return report
    names = [f"{host.name} ({host.address})" for host in hosts.hosts if host.address in silent]
    more = f" and {len(names) - MAX_HOSTS_NAMED} more" if len(names) > MAX_HOSTS_NAMED else ""
    return (
        f"no Monarch worker answers at {', '.join(names[:MAX_HOSTS_NAMED])}{more}. Check that a worker runs there and "
        f"listens on this port, that it has the gateway's release of torchmonarch ({monarch_version()}), and that no "
        f"network policy blocks the gateway\n{report}"
    )


def _spawn_failure(header: SpawnProcs, message: str, kind: Literal["actor", "supervision"] = "supervision") -> Failure:
    step = f"spawn_procs({dict(header.per_host)}, name={header.name!r})"
    return Failure(kind=kind, message=message, step=step, mesh=header.name)


def _require_living(header: SpawnActors, procs: ProcMesh, region: Region) -> None:
    """Raises RequestFailed if a process is known to have ended: Monarch would wait for it for half a minute, and then
    fail too."""
    if dead := [rank for rank in ranks_of(region) if rank in procs.dead]:
        report = procs.dead[dead[0]]
        raise RequestFailed(Failure.of_spawn_on_dead(header.name, header.class_name, procs.name, dead, report))


# The session's controllers: actors of which there is one for each name, for the client and for all actors.
#
# Monarch keeps them in the process of its root client, which is this engine: it could not import the user's classes,
# and they would share a process with the gateway's. So the actor that keeps them runs in a process on the first host,
# which is spawned when the client, or an actor of the session, asks for a controller for the first time.


class SessionControllers:
    def __init__(self, objects: ObjectTable, monarch: ControllerActors, spawner: Spawning) -> None:
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
        host = MeshRef(object=self._first_hosts(), region=rank_region(0))
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

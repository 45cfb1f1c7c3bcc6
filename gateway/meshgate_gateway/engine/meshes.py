"""The meshes of a session: made, sliced, watched.

A mesh is in the table as soon as its creation has been handed to Monarch, so that what depends on it goes on at
once; when Monarch says later that it failed, its failure takes its place and everything that depends on it learns
which step it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshgate_gateway.engine import on_worker
from meshgate_gateway.engine.monarch import Fault, Forward, silent_at, told
from meshgate_gateway.engine.objects import (
    Actors,
    Channel,
    Hosts,
    Object,
    Procs,
    RequestFailed,
    attached,
    cached,
    invalid,
    procs_region,
    ranks_of,
    ranks_within,
    require_reasonable,
)
from meshgate_gateway.engine.worker_streams import Source
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Adopt,
    Argument,
    AttachHosts,
    Failure,
    Host,
    HostsAttached,
    MeshRef,
    Region,
    SpawnActors,
    SpawnProcs,
)
from meshgate_wire.messages import Fault as FaultMessage

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine, Handler

log = logging.getLogger(__name__)

BACK = "it is back, and can be used when no host of its mesh is missing"  # for Monarch attaches to all or none
SAME_PLACE = "it was started again at its old address, where Monarch reaches it in a new session only"
REASON_TIMEOUT = 1.5  # seconds that Monarch has to say why a process whose connection closed is gone
RETURN_TIMEOUT = 600.0  # seconds until a host that has ended must be back
HOST_REASON_TIMEOUT = 3.0  # and then whoever watches the host, where all of its processes are gone


class Meshes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unclaimed: list[Fault] = []
        self.lost_hosts: dict[str, str] = {}
        self._ended: set[str] = set()  # addresses of hosts that have ended
        self._gone: set[str] = set()  # names of hosts that have ended for good
        self._changed = asyncio.Event()  # a host has ended, or there is one again
        self._unexplained: dict[str, list[tuple[int, Procs, int]]] = {}  # by host: who ended, and nobody said why

    def handlers(self) -> dict[type, Handler]:
        return {
            SpawnProcs: self._spawn_procs,
            SpawnActors: self._spawn_actors,
            Adopt: self._adopt,
        }

    # --- making -----------------------------------------------------------------------------------------

    async def attach(self, header: AttachHosts, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        hosts = await engine.find_hosts(header.mesh)
        if again := [host.name for host in hosts if host.address in self._ended]:
            raise invalid(f"mesh {header.mesh!r} cannot be attached to: {', '.join(again)}: {SAME_PLACE}")
        mesh = engine.binding.attach(header.mesh, [host.address for host in hosts])
        known = attached(mesh, header.mesh, hosts)
        engine.objects.add(header.object, known)
        engine.code.hosts_attached(known)
        engine.send(HostsAttached(object=header.object, hosts=tuple(hosts)))

    async def _spawn_procs(self, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        hosts, mesh = await self.mesh(header.hosts, Hosts)
        assert isinstance(hosts, Hosts)
        of = header.hosts.region or hosts.region
        region = procs_region(of, header.per_host)
        names = tuple(hosts.names[rank] for rank in ranks_of(of))
        if lost := _lost_among(hosts, names):
            raise RequestFailed(_failed_spawn(header, lost))
        version = header.version
        if version is not None:
            version = await engine.code.need(version, names)
        bootstrap: Any = Forward(buffers[0].fragments) if buffers else None
        code = engine.code.code_of(version, header.paths)
        begin = functools.partial(
            on_worker.begin, engine.streams.address, engine.streams.secret, header.object, code, bootstrap
        )
        spawned = engine.binding.spawn_procs(mesh, header.per_host, header.name, begin)
        procs = Procs(spawned, header.name, region, names, hosts, version)
        engine.objects.add(header.object, procs)
        procs.up = engine.start(self._procs_up(header, hosts, procs))

    async def _procs_up(self, header: SpawnProcs, hosts: Hosts, procs: Procs) -> None:
        try:
            await self._engine.binding.initialized(procs.mesh)
        except (Exception, asyncio.CancelledError) as error:
            lost = _lost_among(hosts, procs.host_names)
            if isinstance(error, asyncio.CancelledError) and not lost:
                raise
            self._engine.object_failed(header.object, _failed_spawn(header, lost or _not_up(hosts, told(error))))
            self._engine.streams.drop(header.object)  # those that did come up are nobody's

    async def _spawn_actors(self, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        procs, mesh = await self.mesh(header.procs, Procs)
        assert isinstance(procs, Procs)
        if len(buffers) < 2:
            raise invalid("an actor came without its class or its arguments")
        if header.version is not None:
            await engine.code.reloading.bring(header.procs, procs, mesh, header.version, header.paths)
        class_data = buffers[0].fragments
        payload = engine.calling.payload(buffers[1:], await self.arguments(header.arguments))
        inner = engine.binding.spawn_actors(mesh, header.name, header.class_name, header.kind, class_data, payload)
        region = header.procs.region or procs.region
        actors = Actors(inner, header.name, header.class_name, class_data, region, procs, mesh)
        actors.dead.update({rank: why for rank, why in procs.dead.items() if rank in set(ranks_of(region))})
        engine.objects.add(header.object, actors)
        engine.start(self._actors_up(header, actors))

    async def _actors_up(self, header: SpawnActors, actors: Actors) -> None:
        engine = self._engine
        try:
            actors.unique = await engine.binding.actors_initialized(actors.inner)
        except Exception as error:  # noqa: BLE001 - whatever Monarch raises is the reason
            if actors.stopping:
                return
            assert actors.procs is not None
            if actors.procs.up is not None:
                await asyncio.wait([actors.procs.up])
            step = f"spawn({header.name!r}, {header.class_name})"
            failure = Failure(kind="supervision", message=told(error), step=step, mesh=header.name)
            try:
                engine.objects.now(header.procs.object)
            except Exception as cause:  # noqa: BLE001 - the proc mesh's own failure is the better reason
                failure = getattr(cause, "failure", failure)
            actors.failed = failure
            engine.calling.fail(actors)
            engine.object_failed(header.object, failure)
            return
        claimed = [fault for fault in self._unclaimed if fault.mesh == actors.unique]
        for fault in claimed:
            self._unclaimed.remove(fault)
            self.fault(fault)

    async def _adopt(self, header: Adopt, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        reference = engine.objects.adopt(header.object) if header.kind != "port" else None
        made: Object
        if header.kind == "port":
            made = Channel(engine.binding.port_at(header.address), None)
        elif header.region is None:
            raise invalid("a mesh that arrived from a worker came without its region")
        elif header.kind == "hosts":
            unnamed = (Host(name=""),) * (max(ranks_of(header.region), default=0) + 1)
            mesh = engine.binding.adopt_hosts(reference, header.region)
            made = Hosts(mesh, header.name, unnamed, header.region)
        elif header.kind == "procs":
            hosts = (await self.mesh(header.parent, Hosts))[1] if header.parent is not None else None
            root = header.root or header.region
            require_reasonable(header.region)
            require_reasonable(root)
            made = Procs(engine.binding.adopt_procs(reference, hosts, header.region, root), "", header.region, ())
        else:
            require_reasonable(header.region)
            parent, part = await self.mesh(header.parent, Procs) if header.parent is not None else (None, None)
            class_data = buffers[0].fragments if buffers else ()
            procs = parent if isinstance(parent, Procs) else None
            made = Actors(reference, header.name, header.name, class_data, header.region, procs, part)
        engine.objects.add(header.object, made)

    # --- finding ----------------------------------------------------------------------------------------

    async def mesh(self, ref: MeshRef, kind: type[Hosts] | type[Procs]) -> tuple[Object, Any]:
        """The host or proc mesh behind ``ref``, and Monarch's object for the part it names."""
        found = await self._engine.objects.when(ref.object)
        if not isinstance(found, kind):
            raise invalid(f"object {ref.object} is not a {kind.__name__.lower()} mesh")
        mesh = self.mesh_of(found) if isinstance(found, Hosts) else found.mesh
        if ref.region is None or ref.region == found.region:
            return found, mesh
        ranks_within(ref.region, found.region, found.name)
        return found, cached(found.parts, ref.region, lambda region: self._engine.binding.part(mesh, region))

    def mesh_of(self, hosts: Hosts) -> Any:
        """Monarch's mesh of these hosts, as they are now."""
        if hosts.moved:
            hosts.mesh = self._engine.binding.attach(hosts.name, hosts.addresses)
            hosts.moved = False
            hosts.parts.clear()
        return hosts.mesh

    async def arguments(self, arguments: Sequence[Argument]) -> list[Any]:
        """Monarch's own objects for what a pickled argument refers to."""
        return [await self._argument(argument) for argument in arguments]

    async def _argument(self, argument: Argument) -> Any:
        engine, ref = self._engine, argument.ref
        if argument.kind == "hosts":
            return (await self.mesh(ref, Hosts))[1]
        if argument.kind == "procs":
            return (await self.mesh(ref, Procs))[1]
        found = await engine.objects.when(ref.object)
        if argument.kind == "port":
            if not isinstance(found, Channel):
                raise invalid(f"object {ref.object} is not a port")
            return engine.binding.port_argument(found.port)
        actors, inner, _ = engine.calling.actors_at(found, ref)
        if not actors.unique:
            await engine.binding.actors_initialized(actors.inner)
        region = ref.region or actors.region
        return engine.binding.actors_argument(actors.class_data, actors.name, inner, region, actors.procs_part)

    def describe(self, mesh: int, rank: int) -> Source:
        """Who the process is, for people; nameless where its mesh is not there, or failed."""
        known = self._engine.objects.known(mesh)
        if not isinstance(known, Procs):
            return Source("", "")
        names = [
            actors.name
            for actors in self._engine.objects.each()
            if isinstance(actors, Actors) and actors.procs is known
        ]
        return Source(names[0] if len(names) == 1 else known.name, known.host_of(rank))

    # --- watching ---------------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> None:
        """A supervision event of Monarch's."""
        for number, known in self._engine.objects.items():
            if isinstance(known, Actors) and known.unique == fault.mesh and fault.mesh:
                self._died(number, known, fault.ranks or tuple(ranks_of(known.region)), fault.report)
                return
        self._unclaimed.append(fault)
        del self._unclaimed[:-64]

    async def whole(self, hosts: Hosts, region: Region | None) -> None:
        """Waits until those of ``hosts`` are there that have ended. Raises RequestFailed where one will not return."""
        deadline = asyncio.get_running_loop().time() + RETURN_TIMEOUT
        while lost := _lost_among(hosts, [hosts.names[rank] for rank in ranks_of(region or hosts.region)]):
            left = deadline - asyncio.get_running_loop().time()
            if left < 0 or any(host in self._gone or why == SAME_PLACE for host, why in hosts.lost.items()):
                step = f"{hosts.name}.initialized"
                raise RequestFailed(Failure(kind="supervision", message=lost, step=step, mesh=hosts.name))
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def host_lost(self, host: str, reason: str, *, returns: bool = False) -> None:
        """The server knows why a host ended; reports of what ends with it will say so, and no spawn waits for it."""
        self.lost_hosts[host] = reason
        if not returns:
            self._gone.add(host)
        self._changed.set()
        for known in self._engine.objects.each():
            if isinstance(known, Hosts) and host in known.names:
                known.lost[host] = reason
                self._ended.add(known.addresses[known.names.index(host)])
        for known in self._engine.objects.each():
            if isinstance(known, Procs) and known.up is not None and host in known.host_names:
                known.up.cancel()  # where it still waits: Monarch would give up half a minute later
        self._engine.code.host_lost(host, reason)
        self._tell_unexplained(host)

    def host_back(self, mesh: str, rank: int, host: Host) -> None:
        """There is a host again in the place of one that was lost."""
        for number, known in self._engine.objects.items():
            if not (isinstance(known, Hosts) and known.name == mesh and rank < len(known.hosts)):
                continue
            before = known.hosts[rank]
            self._changed.set()
            known.hosts = (*known.hosts[:rank], host, *known.hosts[rank + 1 :])
            self.lost_hosts.pop(before.name, None)
            known.lost.pop(before.name, None)
            known.lost[host.name] = SAME_PLACE if host.address in self._ended else BACK
            if host.name != before.name:
                self._engine.code.host_left(before.name)
            if all(why == BACK for why in known.lost.values()):
                known.lost.clear()
                known.moved = True
                self._engine.code.hosts_attached(known)
                self._engine.send(HostsAttached(object=number, hosts=known.hosts))

    def _why(self, report: str, hosts: Iterable[str]) -> str:
        reasons = [f"{host}: {self.lost_hosts[host]}" for host in dict.fromkeys(hosts) if host in self.lost_hosts]
        return f"{report} ({'; '.join(reasons)})" if reasons else report

    def process_ended(self, mesh: int, rank: int, pid: int) -> None:
        """A process's connection closed: if its mesh is not being stopped, it died."""
        procs = self._engine.objects.known(mesh)
        if isinstance(procs, Procs) and not procs.stopping and rank not in procs.dead:
            report = f"process {pid} of rank {rank} on {procs.host_of(rank) or 'its host'} ended"
            procs.dead[rank] = report
            self._engine.code.reloading.process_died(mesh, rank, report)
            asyncio.get_running_loop().call_later(REASON_TIMEOUT, self._ended_silently, mesh, procs, rank)

    def _ended_silently(self, mesh: int, procs: Procs, rank: int) -> None:
        """Monarch has had its time to say why. Where it is silent and nothing of the host is left, the host has ended
        as well: how, its container's status says a moment later."""
        host = procs.host_of(rank)
        if self._told(procs, rank) or host in self.lost_hosts or not self._all_ended_on(host):
            self._tell_ended(mesh, procs, rank)
            return
        self._unexplained.setdefault(host, []).append((mesh, procs, rank))
        asyncio.get_running_loop().call_later(HOST_REASON_TIMEOUT, self._tell_unexplained, host)

    def _told(self, procs: Procs, rank: int) -> bool:
        known = [each for each in self._engine.objects.each() if isinstance(each, Actors) and each.procs is procs]
        return any(rank in actors.dead for actors in known)

    def _all_ended_on(self, host: str) -> bool:
        """Whether this session had processes on ``host``, and has none there any more."""
        there = [each for each in self._engine.objects.each() if isinstance(each, Procs) and host in each.host_names]
        return bool(host) and all(
            rank in procs.dead for procs in there for rank in ranks_of(procs.region) if procs.host_of(rank) == host
        )

    def _tell_unexplained(self, host: str) -> None:
        for mesh, procs, rank in self._unexplained.pop(host, []):
            self._tell_ended(mesh, procs, rank)

    def _tell_ended(self, mesh: int, procs: Procs, rank: int) -> None:
        """The meshes that Monarch has not told of learn of it now."""
        if procs.stopping:
            return
        told = False
        for number, known in self._engine.objects.items():
            if isinstance(known, Actors) and known.procs is procs:
                told = told or rank in known.dead
                if rank not in known.dead and rank in set(ranks_of(known.region)):
                    self._died(number, known, (rank,), procs.dead[rank])
                    told = True
        if not told:
            hosts = {rank: procs.host_of(rank)}
            report = self._why(procs.dead[rank], hosts.values())
            self._engine.send(FaultMessage(object=mesh, mesh=procs.name, ranks=(rank,), hosts=hosts, report=report))

    def _died(self, number: int, actors: Actors, ranks: Sequence[int], report: str) -> None:
        fresh = [rank for rank in ranks if rank not in actors.dead]
        if not fresh or actors.stopping:
            return
        hosts = {rank: actors.host_of(rank) for rank in fresh[:64]}
        report = self._why(report, hosts.values())
        actors.dead.update(dict.fromkeys(fresh, report))
        self._engine.send(FaultMessage(object=number, mesh=actors.name, ranks=tuple(fresh), hosts=hosts, report=report))
        self._engine.calling.fail(actors)


def _not_up(hosts: Hosts, report: str) -> str:
    """``report`` of Monarch's, with who did not answer and what to look at, where that is the reason."""
    silent = set(silent_at(report, hosts.addresses))
    if not silent:
        return report
    named = [f"{host.name} ({host.address})" for host in hosts.hosts if host.address in silent]
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return (
        f"no Monarch worker answers at {', '.join(named[:8])}{more}: see whether one runs there, on this port, of the "
        f"gateway's release of torchmonarch, and whether a network policy keeps the gateway out\n{report}"
    )


def _lost_among(hosts: Hosts, names: Sequence[str]) -> str:
    """Which of ``names`` have ended, and what to do; nothing where all of them are there."""
    lost = [f"{name}: {hosts.lost[name]}" for name in dict.fromkeys(names) if name in hosts.lost]
    if not lost:
        return ""
    return f"mesh {hosts.name!r} has lost hosts ({'; '.join(lost)}). Spawn on a slice of those that are left"


def _failed_spawn(header: SpawnProcs, message: str) -> Failure:
    step = f"spawn_procs({dict(header.per_host)}, name={header.name!r})"
    return Failure(kind="supervision", message=message, step=step, mesh=header.name)

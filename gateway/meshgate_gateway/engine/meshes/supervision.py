"""Reports dead processes and failed actors to the client, with the best reason available.

A death has up to three sources, usually in this order: the connection of a process closes at once, Monarch's
supervision gives its reason within a second or two, and the host provider may report that the whole host ended. The
client gets one report per rank, so a report waits a moment for a better reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshgate_gateway.engine.interfaces import CallLater, Send, StartTask
from meshgate_gateway.engine.monarch.interface import (
    EngineActors,
    Fault,
    Readiness,
    error_text,
    exit_code,
    running_positions,
)
from meshgate_gateway.engine.objects.records import ActorMesh, Deaths, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_gateway.engine.output.worker_streams import WorkerStreams
from meshgate_wire.messages import Fault as FaultMessage
from meshgate_wire.messages import Region

REASON_TIMEOUT = 1.5  # seconds that Monarch has to report why a process whose connection closed is dead
HOST_REASON_TIMEOUT = 3.0  # seconds that the host provider then has, if no process of the host is left
TERMINATED = "Killed(sig=15)"  # in Monarch's report: what ends a whole job sends SIGTERM, for a reason
TERMINATED_TIMEOUT = 10.0  # seconds that the host provider has then
HOST_LOST = "its host "  # begins the report of a process that was lost with its host
PROCESS_ENDED = re.compile(r"process \d+ of rank \d+ .*ended$")  # a report without a reason
MAX_UNCLAIMED = 64
MAX_HOSTS_NAMED = 64
MAX_RANKS_REPORTED = 32_768  # in one message


@dataclass(slots=True)
class _Unexplained:
    """Deaths on a host that are reported once it says why it ended, or after the longest ``timeout`` of them."""

    reports: list[Callable[[], None]] = field(default_factory=list)
    timeout: float = 0.0


class Supervision:
    """``host_reasons`` maps hosts that have ended, or are about to, to why. ``ranks_died(mesh)`` is called after ranks
    of an actor mesh died, ``process_died(procs, rank, report)`` as soon as a process did. Set ``job_lost`` when no host
    of the job is left and none follows: faults then say so."""

    def __init__(
        self,
        objects: ObjectTable,
        send: Send,
        call_later: CallLater,
        *,
        host_reasons: Mapping[str, str],
        ranks_died: Callable[[ActorMesh], None],
        process_died: Callable[[ProcMesh, int, str], None],
    ) -> None:
        self._objects, self._send, self._call_later = objects, send, call_later
        self._host_reasons, self._ranks_died, self._process_died = host_reasons, ranks_died, process_died
        self.job_lost = False
        self._unclaimed: list[Fault] = []  # of meshes whose unique name is not known yet
        self._unexplained: dict[str, _Unexplained] = {}  # by host

    def fault(self, fault: Fault) -> None:
        """Monarch reports that ranks of an actor mesh failed."""
        for number, known in self._objects.items():
            if isinstance(known, ActorMesh) and known.unique_name == fault.mesh and fault.mesh:
                spawned = ranks_of(known.region)  # on a slice of processes, whose ranks are others than Monarch's
                failed = tuple(spawned[at] for at in fault.ranks if at < len(spawned))
                ranks = failed or tuple(spawned)
                if known.procs is not None and (code := exit_code(fault.report)) is not None:
                    known.procs.dead.exited(failed, code)
                report = functools.partial(self._died, number, known, ranks, fault.report)
                if TERMINATED in fault.report:
                    if known.procs is not None:
                        known.procs.terminated.update(dict.fromkeys(ranks, fault.report))
                    self._terminated(known, ranks, report)
                else:
                    report()
                return
        self._unclaimed.append(fault)
        del self._unclaimed[:-MAX_UNCLAIMED]

    def _terminated(self, actors: ActorMesh, ranks: Sequence[int], report: Callable[[], None]) -> None:
        """Reports what SIGTERM ended once the hosts on which nothing of this session is left may say why."""
        if self._wait_for_hosts(actors, ranks, report):
            return
        if all(actors.host_of(rank) in self._host_reasons for rank in ranks):
            report()
        else:  # Monarch may know of the end of some processes before the connections of the others close
            self._call_later(REASON_TIMEOUT, self._still_terminated, actors, ranks, report)

    def _still_terminated(self, actors: ActorMesh, ranks: Sequence[int], report: Callable[[], None]) -> None:
        if not self._wait_for_hosts(actors, ranks, report):
            report()

    def _wait_for_hosts(self, actors: ActorMesh, ranks: Sequence[int], report: Callable[[], None]) -> bool:
        for host in dict.fromkeys(map(actors.host_of, ranks)):
            if host not in self._host_reasons and self._all_dead_on(host):
                self._wait_for_reason(host, report, TERMINATED_TIMEOUT)
                return True
        return False

    def version_problem(self, hosts: Iterable[str]) -> str:
        """What an actor of the engine's own reported that found other versions on one of ``hosts``; else empty. It
        explains one failed spawn, and no later one."""
        heads = tuple(f"worker {host} has Python " for host in hosts)
        found = [fault for fault in self._unclaimed if fault.report.startswith(heads)]
        self._unclaimed = [fault for fault in self._unclaimed if fault not in found]
        return found[0].report if found else ""

    def actors_up(self, actors: ActorMesh) -> None:
        """The unique name of ``actors`` is known: reports the faults that arrived before it was."""
        claimed = [fault for fault in self._unclaimed if fault.mesh == actors.unique_name]
        for fault in claimed:
            self._unclaimed.remove(fault)
            self.fault(fault)

    def process_ended(self, mesh: int, rank: int, pid: int) -> None:
        """The connection of a process closed. Unless its mesh is being stopped, the process died."""
        procs = self._objects.get(mesh)
        if isinstance(procs, ProcMesh) and not procs.stopping and rank not in procs.dead:
            report = f"process {pid} of rank {rank} on {procs.host_of(rank) or 'its host'} ended"
            procs.dead[rank] = report
            self._process_died(procs, rank, report)
            self._call_later(REASON_TIMEOUT, self._reason_timeout_expired, mesh, procs, rank)

    def _reason_timeout_expired(self, mesh: int, procs: ProcMesh, rank: int) -> None:
        """Reports the death, or, if the whole host seems to have ended, waits for the reason from its provider."""
        host = procs.host_of(rank)
        if self._reported(procs, rank) or host in self._host_reasons or not self._all_dead_on(host):
            self._report(mesh, procs, rank)
            return
        self._wait_for_reason(host, functools.partial(self._report, mesh, procs, rank), HOST_REASON_TIMEOUT)

    def _wait_for_reason(self, host: str, report: Callable[[], None], timeout: float) -> None:
        unexplained = self._unexplained.setdefault(host, _Unexplained())
        unexplained.reports.append(report)
        if timeout > unexplained.timeout:
            unexplained.timeout = timeout
            self._call_later(timeout, self._wait_over, host, unexplained, timeout)

    def _wait_over(self, host: str, unexplained: _Unexplained, timeout: float) -> None:
        if timeout == unexplained.timeout and self._unexplained.get(host) is unexplained:
            self.report_unexplained(host)

    def _reported(self, procs: ProcMesh, rank: int) -> bool:
        return any(rank in actors.dead for _, actors in self._actors_on(procs))

    def _actors_on(self, procs: ProcMesh) -> list[tuple[int, ActorMesh]]:
        return [
            (number, known)
            for number, known in self._objects.items()
            if isinstance(known, ActorMesh) and known.procs is procs
        ]

    def _all_dead_on(self, host: str) -> bool:
        """Whether every process that this session had on ``host`` is dead."""
        there = [known for known in self._objects.values() if isinstance(known, ProcMesh) and host in known.host_names]
        return bool(host) and all(
            rank in procs.dead for procs in there for rank in ranks_of(procs.region) if procs.host_of(rank) == host
        )

    def host_lost(self, host: str) -> None:
        """The provider reports that ``host`` ended. Its processes are dead, also those whose connections do not close,
        since a machine without power closes none."""
        self.report_unexplained(host)
        self._call_later(REASON_TIMEOUT, self._report_silent, host)

    def _report_silent(self, host: str) -> None:
        if host not in self._host_reasons:  # it has returned
            return
        for number, procs in list(self._objects.items()):
            if not isinstance(procs, ProcMesh) or procs.stopping or host not in procs.host_names:
                continue
            for rank in ranks_of(procs.region):
                if procs.host_of(rank) == host and rank not in procs.dead:
                    report = procs.dead[rank] = f"{HOST_LOST}{host} is lost"
                    self._process_died(procs, rank, report)
                    self._report(number, procs, rank)

    def report_unexplained(self, host: str) -> None:
        """Reports the deaths on ``host`` that waited for the reason why the host ended."""
        if (unexplained := self._unexplained.pop(host, None)) is not None:
            for report in unexplained.reports:
                report()

    def _report(self, mesh: int, procs: ProcMesh, rank: int) -> None:
        """Reports the death to each actor mesh on the process that Monarch has not reported it to."""
        self._note_host_reasons(procs, (rank,))
        if procs.stopping:
            return
        reported = False
        for number, actors in self._actors_on(procs):
            if rank in actors.dead:
                reported = True
            elif rank in set(ranks_of(actors.region)):
                self._died(number, actors, (rank,), procs.terminated.get(rank, procs.dead[rank]))
                reported = True
        if not reported:
            hosts = {rank: procs.host_of(rank)}
            report = self._with_host_reasons(procs.dead[rank], hosts.values())
            self._send_fault(mesh, procs, (rank,), hosts, report)

    def _died(self, number: int, actors: ActorMesh, ranks: Sequence[int], report: str) -> None:
        fresh = [rank for rank in ranks if rank not in actors.dead]
        if not fresh or actors.stopping:
            return
        hosts = {rank: actors.host_of(rank) for rank in fresh[:MAX_HOSTS_NAMED]}
        report = self._with_host_reasons(report, hosts.values())
        actors.dead.update(dict.fromkeys(fresh, report))
        self._note_host_reasons(actors, fresh)
        self._ranks_died(actors)
        for start in range(0, len(fresh), MAX_RANKS_REPORTED):
            self._send_fault(number, actors, tuple(fresh[start : start + MAX_RANKS_REPORTED]), hosts, report)

    def _send_fault(
        self, number: int, mesh: ProcMesh | ActorMesh, ranks: tuple[int, ...], hosts: dict[int, str], report: str
    ) -> None:
        fault = FaultMessage(
            object=number, mesh=mesh.name, ranks=ranks, hosts=hosts, report=report, job_lost=self.job_lost
        )
        self._send(fault)

    def _note_host_reasons(self, mesh: ProcMesh | ActorMesh, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if reason := self._host_reasons.get(mesh.host_of(rank)):
                mesh.dead.explain(rank, reason)

    def _with_host_reasons(self, report: str, hosts: Iterable[str]) -> str:
        names = [host for host in dict.fromkeys(hosts) if host in self._host_reasons]
        reasons = "; ".join(f"{host}: {self._host_reasons[host]}" for host in names)
        return f"{report} ({reasons})" if reasons else report


# Watches the processes of meshes that endpoints returned, of which Monarch does not report the death.
#
# Such a mesh belongs to an actor: Monarch supervises it for that actor only, and its processes have no connection to
# this engine, unless the session has spawned them itself, as those of an actor that spawns in its own process. To
# others a watcher, an actor of the engine's own, opens one from each process. The kernel closes it when the process
# ends, and then calls on the mesh fail. The owner decides what else a death means: it is not reported as a fault.


class WatcherSpawner(EngineActors, Readiness, Protocol):
    """What watching needs of Monarch."""


@dataclass(slots=True)
class _Watch:
    """Some processes, whose ``meshes`` the session got one or more times, and their watchers."""

    ids: tuple[str, ...]
    ranks: list[int]
    meshes: list[ProcMesh] = field(default_factory=list)
    watchers: Any = None
    connected: set[int] = field(default_factory=set)  # by position
    silent: set[int] = field(default_factory=set)  # base ranks that are dead because they did not answer
    dead: Deaths = field(default_factory=Deaths)


class Watching:
    """``ranks_died(mesh)`` is called after ranks of an actor mesh died, ``process_died(procs, rank, report)`` for each
    proc mesh with a process that did, and ``process_back(procs, rank)`` if it was only slow."""

    def __init__(
        self,
        objects: ObjectTable,
        monarch: WatcherSpawner,
        listener: WorkerStreams,
        *,
        start_task: StartTask,
        ranks_died: Callable[[ActorMesh], None],
        process_died: Callable[[ProcMesh, int, str], None],
        process_back: Callable[[ProcMesh, int], None],
    ) -> None:
        self._objects, self._monarch, self._listener = objects, monarch, listener
        self._start_task, self._ranks_died, self._process_died = start_task, ranks_died, process_died
        self._process_back = process_back
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
        procs.dead.add_from(watch.dead, watch.ranks)

    def _are_spawned(self, watch: _Watch) -> bool:
        """Whether the session has spawned all these processes itself. Notes those that are dead already."""
        spawned: dict[str, tuple[ProcMesh, int]] = {}  # by the id of the process
        for known in self._objects.values():
            if isinstance(known, ProcMesh) and known.host_names and known.up is not None and known.up.done():
                if known not in self._spawned:
                    if known.stopping:
                        continue  # Monarch takes the mesh back
                    self._spawned[known] = self._monarch.process_ids(known.mesh)
                spawned.update((each, (known, rank)) for rank, each in enumerate(self._spawned[known]))
        for position, each in enumerate(watch.ids):
            procs, rank = spawned.get(each, (None, 0))
            if procs is not None and rank in procs.dead:
                reports = {watch.ranks[position]: procs.dead[rank]}
                watch.dead.update(reports, stopped=rank in procs.dead.stopped)
        return bool(watch.ids) and all(each in spawned for each in watch.ids)

    async def _start(self, number: int, watch: _Watch, mesh: Any) -> None:
        listener = self._listener
        try:
            watch.watchers = self._monarch.spawn_engine_actors(
                mesh, "meshgate_watcher", "ProcessWatcher", listener.address, listener.secret, number
            )
            await self._monarch.wait_actors_initialized(watch.watchers)
        except Exception as error:  # noqa: BLE001 - Monarch's exceptions have no common base
            report = error_text(error)
            answering = watch.connected | running_positions(report)  # those that run may be about to connect
            silent = [rank for at, rank in enumerate(watch.ranks) if at not in answering]
            watch.silent.update(silent)
            self._died(watch, silent, f"the process does not answer: {report}")

    def connected(self, number: int, position: int) -> None:
        """A watcher has connected, from the process at ``position`` of the mesh ``number``."""
        watch = self._by_number.get(number)
        if watch is None or position >= len(watch.ranks):
            return
        watch.connected.add(position)
        rank = watch.ranks[position]
        if rank in watch.silent:  # it was only slow
            watch.silent.remove(rank)
            dead = [watch.dead, *(procs.dead for procs in watch.meshes)]
            for known in (*dead, *(actors.dead for actors in self._actors_on(watch))):
                known.pop(rank, None)
            for procs in watch.meshes:
                self._process_back(procs, rank)

    def _actors_on(self, watch: _Watch) -> list[ActorMesh]:
        every = self._objects.values()
        return [known for known in every if isinstance(known, ActorMesh) and known.procs in watch.meshes]

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
        stopped = isinstance(known, ProcMesh) and known.stopping
        for watch in self._by_number.values():
            if ids[rank] in watch.ids:
                self._position_died(watch, watch.ids.index(ids[rank]), pid, stopped=stopped)

    def _position_died(self, watch: _Watch, position: int, pid: int, *, stopped: bool = False) -> None:
        rank = watch.ranks[position]
        report = f"process {pid} of rank {rank} of a mesh that an endpoint returned ended"
        self._died(watch, [rank], report, stopped=stopped)

    def _died(self, watch: _Watch, ranks: list[int], report: str, *, stopped: bool = False) -> None:
        fresh = dict.fromkeys((rank for rank in ranks if rank not in watch.dead), report)
        watch.dead.update(fresh, stopped=stopped)
        for procs in watch.meshes:
            procs.dead.update(fresh, stopped=stopped)
            for rank in fresh:
                self._process_died(procs, rank, report)
        for known in self._actors_on(watch) if fresh else ():
            known.dead.update(fresh, stopped=stopped)
            self._ranks_died(known)

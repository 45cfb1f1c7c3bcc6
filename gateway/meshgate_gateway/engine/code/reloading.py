"""Brings running processes to another version of the code: for ``reload()``, and before actors are spawned in them.

What a rank runs is unknown while it is being reloaded, and afterwards if that failed. The next spawn there then reloads
it again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshgate_gateway.engine.calls.calling import Calling
from meshgate_gateway.engine.calls.pending_calls import PendingCall
from meshgate_gateway.engine.code.host_agents import PROCESS_MODULES, run_until, worker_sources
from meshgate_gateway.engine.failures import FailureReports, RequestFailed, invalid, stale_code
from meshgate_gateway.engine.interfaces import Handler, StartTask
from meshgate_gateway.engine.monarch.interface import EngineActors
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh, remember
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import Lookup
from meshgate_wire import Fragments
from meshgate_wire.messages import Failure, MeshRef, Region, Reload, stream_of


@dataclass(slots=True)
class _Reloaders:
    """The actors that reload the processes ``ranks``."""

    actors: ActorMesh
    ranks: Sequence[int]
    broken: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Why one of these processes is dead."""


class Reloading:
    """``wait_for_version(version, hosts)`` waits until hosts have a version of the code; see ``CodeSync``.

    Set ``watch`` before a message is handled: ``watch(number, procs)`` is called for what ``reload()`` reloads."""

    watch: Callable[[int, ProcMesh], None]

    def __init__(
        self,
        lookup: Lookup,
        monarch: EngineActors,
        calls: Calling,
        *,
        wait_for_version: Callable[[str, Sequence[str]], Awaitable[str]],
        start_task: StartTask,
        failures: FailureReports,
    ) -> None:
        self._lookup, self._monarch, self._calls = lookup, monarch, calls
        self._wait_for_version, self._start_task, self._failures = wait_for_version, start_task, failures
        self._reloaders: dict[ProcMesh, dict[Region, _Reloaders]] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {Reload: self.reload}

    async def bring_up_to_date(
        self, target: MeshRef, procs: ProcMesh, mesh: Any, version: str, paths: Sequence[str]
    ) -> None:
        """Reloads the processes ``target`` of ``procs``, Monarch's ``mesh``, before actors are spawned in them.

        Does nothing if they run ``version`` already, or if an endpoint returned the mesh. Raises RequestFailed.
        """
        if procs.hosts is None or procs.runs(version, ranks_of(target.region or procs.region)):
            return
        reloaders, version = await self._reloaders_of(target, procs, mesh, version)
        reload = procs.reload_started(reloaders.ranks)
        work = self._monarch.call_engine_actors(
            reloaders.actors.actors, len(reloaders.ranks), "reload", version, list(paths)
        )
        try:
            done = await run_until((reloaders.broken,), work)
        except Exception as error:
            raise _reload_failed(procs, error) from error
        if not done:
            died = _reload_failed(procs, reloaders.broken.result()).failure
            raise RequestFailed(died.model_copy(update={"kind": "supervision", "mesh": procs.name}))
        procs.reload_finished(reload, reloaders.ranks, version)

    async def reload(self, header: Reload, buffers: Sequence[Fragments]) -> None:
        self._start_task(self._failures.guard(header, self._reload(header)))

    async def _reload(self, header: Reload) -> None:
        procs, mesh = await self._lookup.procs(header.target)
        self.watch(header.target.object, procs)
        reloaders, version = await self._reloaders_of(header.target, procs, mesh, header.version)
        actors, ranks = reloaders.actors, reloaders.ranks
        pending = PendingCall(header.call, "call", procs.name, "reload", ranks, actors.host_of)
        reload = procs.reload_started(ranks)
        pending.on_success = functools.partial(procs.reload_finished, reload, ranks, version)
        payload = self._monarch.engine_payload(version, list(header.paths))
        self._calls.start(pending, actors, actors.actors, payload, stream_of(header.target.object))

    async def _reloaders_of(self, target: MeshRef, procs: ProcMesh, mesh: Any, version: str) -> tuple[_Reloaders, str]:
        """The actors that reload the processes ``target``, and the version that their hosts have."""
        region = target.region or procs.region
        ranks = ranks_of(region)
        if dead := sorted(procs.dead.keys() & set(ranks)):
            named = f" {procs.name!r}" if procs.name else ""  # a mesh that an endpoint returned has none
            raise invalid(
                f"cannot reload{named}: ranks {dead} are dead. Use a slice without them, or spawn new processes"
            )
        names = [procs.host_of(rank) for rank in ranks]
        try:
            version = await self._wait_for_version(version, names)
        except RequestFailed:
            if procs.hosts is not None and (missing := procs.hosts.missing_among(names)):
                raise RequestFailed(Failure(kind="supervision", message=missing, mesh=procs.name)) from None
            raise
        known = self._reloaders.setdefault(procs, {})
        reloaders = known.get(region)
        if reloaders is None:
            sources = worker_sources(PROCESS_MODULES)
            actors = self._monarch.spawn_engine_actors(mesh, "meshgate_code", "ProcessReloader", sources)
            mesh_record = ActorMesh(actors, procs.name, "ProcessReloader", (), region, procs)
            reloaders = remember(known, region, _Reloaders(mesh_record, ranks))
        return reloaders, version

    def process_died(self, procs: ProcMesh, rank: int, report: str) -> None:
        """Fails the reloads that wait for a dead process."""
        for reloaders in self._reloaders.get(procs, {}).values():
            if rank in reloaders.ranks:
                reloaders.actors.dead[rank] = report
                self._calls.fail(reloaders.actors)
                if not reloaders.broken.done():
                    reloaders.broken.set_result(report)

    def process_back(self, procs: ProcMesh, rank: int) -> None:
        """A process that was taken for dead has answered: the next reload spawns other actors there."""
        known = self._reloaders.get(procs, {})
        for region in [region for region, reloaders in known.items() if rank in reloaders.ranks]:
            del known[region]


def _reload_failed(procs: ProcMesh, reason: object) -> RequestFailed:
    return stale_code(f"cannot spawn actors: the processes of {procs.name!r} could not load the newest code: {reason}")

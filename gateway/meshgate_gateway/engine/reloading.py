"""Running processes, brought to another version of the code: by ``reload()``, and before actors are spawned in them.

While a rank is on its way, and where it did not arrive, nobody knows what it runs; so the next spawn there brings it
again rather than trusting that it is current.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshgate_gateway.engine.calling import HostsOf
from meshgate_gateway.engine.calls import Pending
from meshgate_gateway.engine.library import OF_PROCESSES, library
from meshgate_gateway.engine.objects import Actors, Procs, cached, invalid, ranks_of
from meshgate_gateway.engine.races import before
from meshgate_wire import Fragments
from meshgate_wire.messages import MeshRef, Region, Reload, stream_of

if TYPE_CHECKING:
    from meshgate_gateway.engine.code import Code
    from meshgate_gateway.engine.engine import Engine

__all__ = ["Reloading"]


@dataclass(slots=True)
class _Reloaders:
    """The actors that reload the processes ``ranks``. ``broken``: why one of these is gone."""

    actors: Actors
    ranks: Sequence[int]
    broken: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Reloading:
    def __init__(self, engine: Engine, code: Code) -> None:
        self._engine, self._code = engine, code
        self._known: dict[int, dict[Region, _Reloaders]] = {}

    async def bring(self, target: MeshRef, procs: Procs, mesh: Any, version: str, paths: Sequence[str]) -> None:
        """Brings the processes ``target`` of ``procs``, to Monarch ``mesh``, to ``version`` before actors are spawned
        in them. Leaves alone those that run it, and meshes that an endpoint returned. Raises RequestFailed.
        """
        if procs.hosts is None or procs.run(version, ranks_of(target.region or procs.region)):
            return
        reloaders, version = await self._reloaders(target, procs, mesh, version)
        behind = f"the processes of {procs.name!r} could not be brought to the newest code"
        move = procs.leave(reloaders.ranks)
        reloading = self._engine.binding.ask_own(
            reloaders.actors.inner, len(reloaders.ranks), "reload", version, list(paths)
        )
        try:
            done = await before((reloaders.broken,), reloading)
        except Exception as error:
            raise self._code.stale(f"{behind}: {error}") from error
        if not done:
            raise self._code.stale(f"{behind}: {reloaders.broken.result()}")
        procs.arrive(move, reloaders.ranks, version)

    async def reload(self, header: Reload, buffers: Sequence[Fragments]) -> None:
        self._engine.start(self._engine.guarded(header, self._reload(header)))

    async def _reload(self, header: Reload) -> None:
        procs, mesh = await self._engine.meshes.mesh(header.target, Procs)
        assert isinstance(procs, Procs)
        reloaders, version = await self._reloaders(header.target, procs, mesh, header.version)
        actors, ranks = reloaders.actors, reloaders.ranks
        pending = Pending(header.call, "call", procs.name, "reload", ranks, HostsOf(actors))
        move = procs.leave(ranks)
        pending.succeeded = functools.partial(procs.arrive, move, ranks, version)
        arguments = self._engine.binding.own_arguments(version, list(header.paths))
        self._engine.calling.start(pending, actors, actors.inner, arguments, stream_of(header.target.object))

    async def _reloaders(self, target: MeshRef, procs: Procs, mesh: Any, version: str) -> tuple[_Reloaders, str]:
        """The actors that reload the processes ``target``, and the version that their hosts have by now."""
        from meshgate_gateway.engine.code_on_worker import ProcessCode  # noqa: PLC0415 - it imports Monarch

        region = target.region or procs.region
        ranks = ranks_of(region)
        if procs.version is None:
            raise invalid(f"the processes of {procs.name!r} were spawned before sync(): spawn them again")
        if dead := sorted(procs.dead.keys() & set(ranks)):
            raise invalid(f"ranks {dead} of {procs.name!r} are dead: use a slice of the others, or spawn anew")
        version = await self._code.need(version, [procs.host_of(rank) for rank in ranks])

        def spawned(region: Region) -> _Reloaders:
            inner = self._engine.binding.spawn_own(mesh, "meshgate_code", ProcessCode, "sync", library(OF_PROCESSES))
            return _Reloaders(Actors(inner, procs.name, "ProcessCode", (), region, procs), ranks)

        return cached(self._known.setdefault(target.object, {}), region, spawned), version

    def process_died(self, number: int, rank: int, why: str) -> None:
        """Ends what waits for a process that is gone."""
        for reloaders in self._known.get(number, {}).values():
            if rank in reloaders.ranks:
                reloaders.actors.dead[rank] = why
                self._engine.calling.fail(reloaders.actors)
                if not reloaders.broken.done():
                    reloaders.broken.set_result(why)

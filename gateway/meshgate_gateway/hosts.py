"""Where a job's Monarch hosts are: a table of providers, one for each kind of mesh.

A mesh has as many hosts as its ranks for its whole life. None is started again here, but what started them may do so
(a StatefulSet makes a pod anew), and then the mesh is whole again. A host that has ended is told at once, with the
reason, where attaching to it would take Monarch a minute to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from meshgate_wire.messages import Host

__all__ = ["Host", "HostProvider", "Hosts", "HostsUnavailable", "OnBack", "OnLost", "StaticHosts"]

OnLost: TypeAlias = Callable[[str, str, str], None]
OnBack: TypeAlias = Callable[[str, int, Host], None]


class HostsUnavailable(Exception):
    """The mesh cannot be attached to. The message says why and what to do."""


class HostProvider(Protocol):
    """Some meshes of a job and their hosts."""

    def meshes(self) -> Mapping[str, int]:
        """The number of hosts of each mesh."""

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        """The hosts of one of ``meshes()``, in rank order, once they can be attached to.

        Raises HostsUnavailable. Cancelling only stops the waiting.
        """

    def present(self, mesh: str) -> tuple[Host, ...]:
        """Those hosts of one of ``meshes()`` that are not known to be missing now."""

    def made_anew(self, mesh: str) -> bool:
        """Whether a host of one of ``meshes()`` that has ended may come back, or another in its place."""

    async def came_up(self) -> None:
        """Returns once all hosts of all meshes have been there, which some have from the start."""

    def watch(self, on_lost: OnLost, on_back: OnBack) -> None:
        """Has ``on_lost(mesh, host, why)`` called on the loop when a host that was handed out has ended, and
        ``on_back(mesh, rank, host)`` when there is one in its place."""

    async def close(self) -> None:
        """Lets go of the hosts; ends those that were started here, with all they started."""


class StaticHosts:
    """Hosts that someone else runs."""

    def __init__(self, meshes: Mapping[str, Sequence[str]]) -> None:
        """``meshes``: for each its Monarch addresses."""
        self._meshes = {
            mesh: tuple(Host(name=f"{mesh}-{rank}", address=address) for rank, address in enumerate(addresses))
            for mesh, addresses in meshes.items()
        }

    def meshes(self) -> Mapping[str, int]:
        return {mesh: len(hosts) for mesh, hosts in self._meshes.items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        return self._meshes[mesh]

    def present(self, mesh: str) -> tuple[Host, ...]:
        return self._meshes[mesh]

    def made_anew(self, mesh: str) -> bool:
        return False

    async def came_up(self) -> None:
        return None

    def watch(self, on_lost: OnLost, on_back: OnBack) -> None:
        return None

    async def close(self) -> None:
        return None


class Hosts:
    """All meshes of the job, whoever provides them. Is a HostProvider itself."""

    def __init__(self, providers: Sequence[HostProvider]) -> None:
        self._providers = tuple(providers)

    def meshes(self) -> Mapping[str, int]:
        return {mesh: count for provider in self._providers for mesh, count in provider.meshes().items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        """As HostProvider.hosts; HostsUnavailable also for a mesh that the job does not have."""
        for provider in self._providers:
            if mesh in provider.meshes():
                return await provider.hosts(mesh)
        known = ", ".join(sorted(self.meshes())) or "none"
        raise HostsUnavailable(f"this job has no mesh {mesh!r}; its meshes: {known}")

    def present(self, mesh: str) -> tuple[Host, ...]:
        return next((p.present(mesh) for p in self._providers if mesh in p.meshes()), ())

    def made_anew(self, mesh: str) -> bool:
        return any(p.made_anew(mesh) for p in self._providers if mesh in p.meshes())

    async def came_up(self) -> None:
        for provider in self._providers:
            await provider.came_up()

    def watch(self, on_lost: OnLost, on_back: OnBack) -> None:
        for provider in self._providers:
            provider.watch(on_lost, on_back)

    async def close(self) -> None:
        await asyncio.gather(*(provider.close() for provider in self._providers))

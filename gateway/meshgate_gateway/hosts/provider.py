"""The interface of host providers, one for each kind of mesh.

The number of hosts of a mesh never changes. The gateway restarts no host, but a controller may replace one (a
StatefulSet recreates its pods), and the mesh is then complete again. A provider reports a lost host and the reason at
once; attaching to it would fail only after Monarch's timeout of a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from meshgate_wire.fields import Host

__all__ = [
    "Host",
    "HostProvider",
    "CombinedHosts",
    "HostsUnavailable",
    "JobEnd",
    "MeshIncomplete",
    "OnRestored",
    "OnLost",
    "StaticHosts",
]

OnLost: TypeAlias = Callable[[str, str, str], None]
OnRestored: TypeAlias = Callable[[str, int, Host], None]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The cluster is going to end the job, and all its hosts: why, and when, in seconds since 1970. ``notice`` is a
    line about that for the job's users."""

    reason: str
    at: float
    notice: str


class HostsUnavailable(Exception):
    """The mesh cannot be attached to. The message says why and what to do."""


class MeshIncomplete(HostsUnavailable):
    """Some hosts of the mesh are lost for good. A session can use the others: ``hosts`` are all of them, in rank order,
    and ``lost`` says by name why those ended."""

    def __init__(self, message: str, hosts: Sequence[Host], lost: Mapping[str, str]) -> None:
        super().__init__(message)
        self.hosts, self.lost = tuple(hosts), dict(lost)


class HostProvider(Protocol):
    """Provides the hosts of some meshes of a job."""

    def meshes(self) -> Mapping[str, int]:
        """The number of hosts of each mesh."""

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        """The hosts of a mesh, in rank order, once they are ready to attach to.

        Raises HostsUnavailable: MeshIncomplete if some are lost for good. Cancellation only ends the wait.
        """

    def present(self, mesh: str) -> Mapping[int, Host]:
        """The hosts of a mesh that are ready and not known to be lost, by rank."""

    def replaces_hosts(self, mesh: str) -> bool:
        """Whether a lost host of a mesh may be replaced."""

    def all_lost(self) -> bool:
        """Whether every host has ended and none may be replaced. A host that still starts is not lost."""

    async def wait_ready(self) -> None:
        """Returns once the hosts of every mesh have been ready."""

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        """Registers callbacks on the event loop: ``on_lost(mesh, host, reason)`` when a host that ``hosts`` returned
        has ended, and ``on_restored(mesh, rank, host)`` when it has been replaced."""

    async def close(self) -> None:
        """Releases the hosts; stops those that the gateway started, with all their processes."""


class StaticHosts:
    """Hosts at fixed addresses, managed outside the gateway."""

    def __init__(self, meshes: Mapping[str, Sequence[str]]) -> None:
        """``meshes``: the Monarch addresses of each mesh, as ``tcp://HOST:PORT`` or ``IDENTITY@tcp://HOST:PORT``."""
        self._meshes = {
            mesh: tuple(_static_host(f"{mesh}-{rank}", address) for rank, address in enumerate(addresses))
            for mesh, addresses in meshes.items()
        }

    def meshes(self) -> Mapping[str, int]:
        return {mesh: len(hosts) for mesh, hosts in self._meshes.items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        return self._meshes[mesh]

    def present(self, mesh: str) -> Mapping[int, Host]:
        return dict(enumerate(self._meshes[mesh]))

    def replaces_hosts(self, mesh: str) -> bool:
        return False

    def all_lost(self) -> bool:
        return False

    async def wait_ready(self) -> None:
        return None

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        return None

    async def close(self) -> None:
        return None


def _static_host(name: str, address: str) -> Host:
    identity, at, rest = address.partition("@")
    if at and "://" not in identity:
        return Host(name=name, address=rest, identity=identity)
    return Host(name=name, address=address)


class CombinedHosts:
    """A HostProvider for the meshes of several providers."""

    def __init__(self, providers: Sequence[HostProvider]) -> None:
        self._providers = tuple(providers)

    def meshes(self) -> Mapping[str, int]:
        return {mesh: count for provider in self._providers for mesh, count in provider.meshes().items()}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        """Raises HostsUnavailable also for a mesh that the job does not have."""
        for provider in self._providers:
            if mesh in provider.meshes():
                return await provider.hosts(mesh)
        known = ", ".join(sorted(self.meshes())) or "none"
        raise HostsUnavailable(f"this job has no mesh {mesh!r}; its meshes: {known}")

    def present(self, mesh: str) -> Mapping[int, Host]:
        return next((p.present(mesh) for p in self._providers if mesh in p.meshes()), {})

    def replaces_hosts(self, mesh: str) -> bool:
        return any(p.replaces_hosts(mesh) for p in self._providers if mesh in p.meshes())

    def all_lost(self) -> bool:
        return all(provider.all_lost() for provider in self._providers if provider.meshes())

    async def wait_ready(self) -> None:
        for provider in self._providers:
            await provider.wait_ready()

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        for provider in self._providers:
            provider.watch(on_lost, on_restored)

    async def close(self) -> None:
        await asyncio.gather(*(provider.close() for provider in self._providers))

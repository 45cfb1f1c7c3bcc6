"""Follows the hosts of a session: which ended and why, which are back, and which do not accept this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import async_timeout

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.interfaces import Send
from meshgate_gateway.engine.monarch.interface import SUPPORTED
from meshgate_gateway.engine.objects.records import HostMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.handshake import monarch_version
from meshgate_wire.messages import Failure, Host, HostEnding, HostsAttached, Region

RETURN_TIMEOUT = 600.0  # seconds that a host which ended may take to return


class HostListener(Protocol):
    """Something that runs on the hosts."""

    def hosts_attached(self, hosts: HostMesh) -> None:
        """All hosts of the mesh are available."""

    def host_lost(self, name: str, reason: str) -> None: ...

    def host_replaced(self, name: str) -> None:
        """A lost host does not return: another has its place, or none."""


class HostWatch:
    """``reasons`` maps the names of lost hosts to why they ended, ``explained`` also those of hosts that are about to
    end; ``ended`` are the addresses of lost hosts. ``laptop()`` describes the versions of the laptop, for errors."""

    def __init__(self, objects: ObjectTable, send: Send, listener: HostListener, laptop: Callable[[], str]) -> None:
        self._objects, self._send, self._listener, self._laptop = objects, send, listener, laptop
        self._reasons: dict[str, str] = {}
        self._returning: set[str] = set()  # those of them that are expected to restart or be replaced
        self._ending: dict[str, str] = {}  # by name, of hosts that are about to end: why
        self._deadlines: dict[str, float] = {}  # of these
        self._job_end: tuple[str, float] | None = None  # why and when all hosts end, without a replacement
        self.explained: Mapping[str, str] = ChainMap(self._reasons, self._ending)
        self._ended: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def reasons(self) -> Mapping[str, str]:
        return self._reasons

    @property
    def ended(self) -> set[str]:
        return self._ended

    def host_lost(self, host: str, reason: str, *, returns: bool = False, removed: bool = False) -> None:
        """The server reports that a host ended. ``returns``: it is expected to restart or be replaced. ``removed``: the
        mesh has been scaled, and nothing waits for the host any more.

        A server that has taken over may report the same once more.
        """
        if self._reasons.get(host) == reason:
            return
        self._reasons[host] = reason
        (self._returning.add if returns else self._returning.discard)(host)
        self._ending.pop(host, None)
        self._deadlines.pop(host, None)
        self._changed.set()
        for known in self._objects.values():
            if isinstance(known, HostMesh) and host in known.names:
                known.host_lost(host, reason, returns=returns)
                self._ended.add(known.addresses[known.names.index(host)])
        for known in self._objects.values():
            if isinstance(known, ProcMesh):
                known.host_lost(host)
        if removed:
            self._listener.host_replaced(host)
        else:
            self._listener.host_lost(host, reason)

    def mark_lost(self, mesh: HostMesh) -> None:
        """Marks the hosts of a mesh, which is about to be attached to, that are lost already."""
        for host in mesh.hosts:
            if (reason := self._reasons.get(host.name)) is not None:
                mesh.host_lost(host.name, reason, returns=host.name in self._returning)
                self._ended.add(host.address)

    def host_ending(self, host: str, reason: str, seconds: float) -> bool:
        """The server reports that the cluster ends a host in ``seconds``. Returns whether a mesh of this session has
        it, and this is news: a server that has taken over repeats it."""
        known = host in self._reasons or host in self._ending
        if known or not any(host in mesh.names for mesh in self._objects.values() if isinstance(mesh, HostMesh)):
            return False
        self._ending[host], self._deadlines[host] = reason, asyncio.get_running_loop().time() + seconds
        for number, mesh in self._objects.items():
            if isinstance(mesh, HostMesh) and host in mesh.names:
                for header in self._notices(number, [host]):
                    self._send(header)
        return True

    def described(self, number: int, mesh: HostMesh) -> Iterator[HostsAttached | HostEnding]:
        """The hosts of mesh ``number``, then those that are about to end: the first withdraws earlier notices."""
        yield HostsAttached(object=number, hosts=mesh.hosts)
        yield from self._notices(number, mesh.names)

    def job_ending(self, reason: str, seconds: float | None) -> None:
        """The server reports that all hosts end with the job, in ``seconds``; None: not any more."""
        if seconds is None and self._job_end is None:  # a server that has restarted does not know
            return
        self._job_end = None if seconds is None else (reason, asyncio.get_running_loop().time() + seconds)
        for number, mesh in self._objects.items():
            if isinstance(mesh, HostMesh) and number > 0:
                for header in self._notices(number, mesh.names) if self._job_end else self.described(number, mesh):
                    self._send(header)

    def end_of(self, host: str) -> tuple[str, float] | None:
        """Why ``host`` is about to end, and in how many seconds. None if no end has been reported, or it has ended."""
        end = (self._ending[host], self._deadlines[host]) if host in self._ending else self._job_end
        if end is None or host in self._reasons:
            return None
        return end[0], max(0.0, end[1] - asyncio.get_running_loop().time())

    def _notices(self, number: int, names: Sequence[str]) -> Iterator[HostEnding]:
        for name in filter(None, names):  # those of a mesh that an endpoint returned are not known
            if (end := self.end_of(name)) is not None:
                yield HostEnding(object=number, host=name, reason=end[0], seconds=end[1])

    def host_back(self, mesh: str, rank: int, host: Host) -> None:
        """The server reports that a lost host restarted, or that ``host`` took its place; perhaps once more."""
        if host.name not in self._reasons and any(known.hosts[rank : rank + 1] == (host,) for known in self._of(mesh)):
            return
        self._reasons.pop(host.name, None)
        for number, known in self._objects.items():
            if not (isinstance(known, HostMesh) and known.name == mesh and rank < len(known.hosts)):
                continue
            before = known.hosts[rank].name
            self._changed.set()
            self._reasons.pop(before, None)
            complete = known.host_restarted(rank, host, same_address=host.address in self._ended)
            if host.name != before:
                self._listener.host_replaced(before)
            if complete:
                self._listener.hosts_attached(known)
                for header in self.described(number, known):
                    self._send(header)

    async def refused(self, address: str) -> None:
        """Monarch at ``address`` does not know the host that was attached to there, and will not answer."""
        for known in self._objects.values():
            if not isinstance(known, HostMesh) or (host := await _host_at(address, known.hosts)) is None:
                continue
            known.refused = f"cannot attach to mesh {known.name!r}: {_refusal(host, self._laptop())}"
            known.give_up_waiting()
            for procs in self._objects.values():
                if isinstance(procs, ProcMesh) and procs.initialized is not None and procs.hosts is known:
                    procs.initialized.cancel()
            for name in known.names:  # none can be used: Monarch attaches to all hosts of a mesh or to none
                self._listener.host_lost(name, known.refused)

    def _of(self, mesh: str) -> list[HostMesh]:
        return [known for known in self._objects.values() if isinstance(known, HostMesh) and known.name == mesh]

    async def wait_available(self, hosts: HostMesh, region: Region | None) -> None:
        """Waits until no host of ``region`` is missing or about to end. Raises RequestFailed if one of the mesh
        does not return. The grace period of a host that is about to end does not count as a part of its absence."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETURN_TIMEOUT
        ranks = ranks_of(region or hosts.region)
        while missing := self._missing_among(hosts, names := [hosts.names[rank] for rank in ranks]):
            ends = [self._deadlines[name] + RETURN_TIMEOUT for name in names if name in self._deadlines]
            deadline = max([deadline, *ends])
            left = deadline - loop.time()
            if left < 0 or hosts.refused or any(health.permanent for health in hosts.missing.values()):
                step = f"{hosts.name}.initialized"
                raise RequestFailed(Failure(kind="supervision", message=missing, step=step, mesh=hosts.name))
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                async with async_timeout.timeout(left):
                    await self._changed.wait()

    def _missing_among(self, hosts: HostMesh, names: Sequence[str]) -> str:
        ending = "; ".join(f"{name}: {self._ending[name]}" for name in names if name in self._ending)
        about_to_end = f"mesh {hosts.name!r} has hosts that are about to end ({ending})" if ending else ""
        return hosts.missing_among(names) or about_to_end


async def _host_at(address: str, hosts: Sequence[Host]) -> Host | None:
    """The host at ``address``, in which Monarch has replaced a name by an IP address."""
    ip, port = urlsplit(address).hostname, urlsplit(address).port
    for host in hosts:
        dialed = host.address.partition("@")[0]
        if dialed == address:
            return host
        place = urlsplit(dialed)
        if place.hostname and place.port == port:
            with contextlib.suppress(OSError):
                found = await asyncio.get_running_loop().getaddrinfo(place.hostname, port, type=socket.SOCK_STREAM)
                if ip in {str(to[0]) for *_, to in found}:
                    return host
    return None


def _refusal(host: Host, laptop: str) -> str:
    identity = f" or another identity than {host.identity!r}," if host.identity else ""
    return (
        f"worker {host.name} ({host.address}) answers, but not as the host that the gateway attaches to: it has "
        f"another release of torchmonarch than the gateway, {monarch_version()},{identity} or serves another address; "
        f"{laptop}. `pip show torchmonarch` prints the release of the worker. Install the same one on both: "
        f"{' or '.join(f'{release}.*' for release in SUPPORTED)}"
    )

"""Meshes that exist already: hosts to attach to, and what endpoints return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

from meshgate_gateway.control import HostsReply, HostsRequest
from meshgate_gateway.engine.failures import invalid
from meshgate_gateway.engine.interfaces import Handler, Send
from meshgate_gateway.engine.monarch.interface import HostAttacher, PortSender, References
from meshgate_gateway.engine.objects.records import (
    AVAILABLE,
    ActorMesh,
    Channel,
    HostMesh,
    ProcMesh,
    SessionObject,
    attached_hosts,
)
from meshgate_gateway.engine.objects.regions import check_size, ranks_of
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopt, AttachHosts, Header, Host

FindHosts = Callable[[str], Awaitable[Sequence[Host]]]


class Adopter(HostAttacher, PortSender, References, Protocol):
    """What attaching needs of Monarch."""


class Attaching:
    """``find_hosts(mesh)`` asks the server for the hosts of a mesh. ``mark_lost(mesh)`` marks those that are lost;
    ``ended`` are the addresses of all that this session has lost. ``hosts_attached(mesh)`` is called for each mesh of
    hosts, of which ``described(number, mesh)`` are the messages for the client, and ``watch(number, procs)`` for the
    processes of each actor mesh that an endpoint returned."""

    def __init__(
        self,
        objects: ObjectTable,
        lookup: Lookup,
        monarch: Adopter,
        send: Send,
        *,
        find_hosts: FindHosts,
        mark_lost: Callable[[HostMesh], None],
        ended: Container[str],
        hosts_attached: Callable[[HostMesh], None],
        described: Callable[[int, HostMesh], Iterable[Header]],
        watch: Callable[[int, ProcMesh], None],
    ) -> None:
        self._objects, self._lookup, self._monarch, self._send = objects, lookup, monarch, send
        self._find_hosts, self._mark_lost, self._ended = find_hosts, mark_lost, ended
        self._hosts_attached = hosts_attached
        self._described, self._watch = described, watch

    def handlers(self) -> Mapping[type, Handler]:
        return {AttachHosts: self.attach, Adopt: self.adopt}

    async def attach(self, header: AttachHosts, buffers: Sequence[Fragments]) -> None:
        hosts = await self._find_hosts(header.mesh)
        known = attached_hosts(None, header.mesh, hosts)
        self._mark_lost(known)
        if again := [h.name for h in hosts if h.address in self._ended and h.name not in known.missing]:
            why = AVAILABLE.restarted(same_address=True)
            raise invalid(f"cannot attach to mesh {header.mesh!r}: {', '.join(again)}: {why}")
        found = (self._monarch.same_versions.difference(host.name, host.python, host.monarch) for host in hosts)
        if difference := next(filter(None, found), ""):
            raise invalid(f"cannot attach to mesh {header.mesh!r}: {difference}")
        known.must_attach = True
        self._lookup.attached(known)
        await self._monarch.settings_applied()  # before anything is spawned there
        self._objects.add(header.object, known)
        self._hosts_attached(known)
        for message in self._described(header.object, known):
            self._send(message)

    async def adopt(self, header: Adopt, buffers: Sequence[Fragments]) -> None:
        self._objects.add(header.object, await self._adopted(header, buffers))

    def _reference(self, header: Adopt, buffers: Sequence[Fragments]) -> Any:
        """Monarch's reference to the mesh, which arrived with a value or inside a pickle."""
        if not header.has_reference:
            return self._objects.reference(header.object)
        if not buffers:
            raise invalid("the message does not contain the reference to the mesh to adopt")
        return self._monarch.reference_from_bytes(header.kind, buffers[-1].join())

    async def _adopted(self, header: Adopt, buffers: Sequence[Fragments]) -> SessionObject:
        if header.kind == "port":
            return Channel(self._monarch.port_at(header.address))
        reference = self._reference(header, buffers)
        region = header.region
        if region is None:
            raise invalid("the message does not contain the region of the mesh to adopt")
        check_size(region)
        if header.kind == "hosts":
            unnamed = (Host(name=""),) * (max(ranks_of(region), default=0) + 1)
            return HostMesh(self._monarch.adopt_hosts(reference, region), header.name, unnamed, region)
        if header.kind == "procs":
            root = header.root or region
            check_size(root)
            hosts = (await self._lookup.hosts(header.parent))[1] if header.parent is not None else None
            return ProcMesh(self._monarch.adopt_procs(reference, hosts, region, root), "", region, ())
        procs, mesh = await self._lookup.procs(header.parent) if header.parent is not None else (None, None)
        class_data = buffers[0].fragments if len(buffers) > header.has_reference else ()
        actors = ActorMesh(reference, header.name, header.name, class_data, region, procs, mesh, returned=True)
        if procs is not None and header.parent is not None:
            self._watch(header.parent.object, procs)
            actors.dead.add_from(procs.dead, ranks_of(region))
        return actors


class HostRequests:
    """Asks the server for the hosts of a mesh (``FindHosts``). Its replies may come in parts."""

    def __init__(self, send: Callable[[HostsRequest], object]) -> None:
        self._send = send
        self._pending: dict[str, asyncio.Future[Sequence[Host]]] = {}  # by mesh
        self._received: dict[str, list[Host]] = {}

    async def find(self, mesh: str) -> Sequence[Host]:
        """The hosts of ``mesh`` in rank order. Raises RequestFailed with the server's reason if there are none."""
        pending = self._pending.get(mesh)
        if pending is None:
            pending = self._pending[mesh] = asyncio.get_running_loop().create_future()
            self._send(HostsRequest(mesh=mesh))
        return await asyncio.shield(pending)

    def repeat(self) -> None:
        """Sends the pending requests again, and forgets parts of replies: the server that sent them has ended."""
        self._received.clear()
        for mesh in self._pending:
            self._send(HostsRequest(mesh=mesh))

    def add_reply(self, reply: HostsReply) -> None:
        hosts = self._received.setdefault(reply.mesh, [])
        hosts += reply.hosts
        if reply.more:
            return
        del self._received[reply.mesh]
        pending = self._pending.pop(reply.mesh, None)
        if pending is None:
            return
        if reply.error:
            pending.set_exception(invalid(reply.error))
        else:
            pending.set_result(tuple(hosts))

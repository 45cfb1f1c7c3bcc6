"""Asks the server for the hosts of a mesh. Its replies may come in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from meshgate_gateway.control.messages import HostsReply, HostsRequest
from meshgate_gateway.engine.failures import invalid
from meshgate_wire.messages import Host


class HostRequests:
    def __init__(self, send: Callable[[HostsRequest], None]) -> None:
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

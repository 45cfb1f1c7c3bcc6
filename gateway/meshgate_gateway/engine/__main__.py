"""``python -m meshgate_gateway.engine --control-fd N``: the process of one session, started by the server.

It may be started before its session is known: Monarch is loaded and its root client is up by the time the server
assigns one. It ends when the session does, when the server tells it to, or when the server is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence

import uvloop

from meshgate_gateway.engine.engine import Engine
from meshgate_gateway.engine.link import open_link
from meshgate_gateway.engine.monarch import Binding, Fault
from meshgate_gateway.engine.objects import invalid
from meshgate_gateway.handoff import (
    Assign,
    Connected,
    Connection,
    ControlChannel,
    Disconnected,
    End,
    Ended,
    HostBack,
    HostLost,
    HostsReply,
    HostsRequest,
    Ready,
)
from meshgate_wire import Role, Session
from meshgate_wire.messages import Host

log = logging.getLogger(__name__)

END_TIMEOUT = 6.0


class Process:
    """The engine with the control channel: one task reads what the server says, for as long as it lives."""

    def __init__(self, control: ControlChannel, host: str | None) -> None:
        """``host``: the address at which workers reach this process; None where they share its machine."""
        self._control, self._host = control, host
        self._loop = asyncio.get_running_loop()
        self._binding = Binding(f"tcp://{host}:0" if host else None, self._on_fault)
        self._engine = Engine(Session(Role.GATEWAY), self._binding, self._find_hosts, self._on_link, host)
        self._hosts: dict[str, asyncio.Future[Sequence[Host]]] = {}
        self._told: dict[str, list[Host]] = {}

    def _on_fault(self, fault: Fault) -> None:
        self._loop.call_soon_threadsafe(self._engine.fault, fault)

    def _on_link(self, connected: bool) -> None:
        self._control.send(Connected() if connected else Disconnected())

    async def _find_hosts(self, mesh: str) -> Sequence[Host]:
        asked = self._hosts.get(mesh)
        if asked is None:
            asked = self._hosts[mesh] = self._loop.create_future()
            self._control.send(HostsRequest(mesh=mesh))
        try:
            return await asyncio.shield(asked)
        finally:
            self._hosts.pop(mesh, None)

    async def run(self) -> str:
        """Serves until the end; returns why it came."""
        await self._engine.streams.listen(self._host)
        gc.freeze()  # what was imported is here to stay: garbage collections need not look through it
        self._control.send(Ready())
        listening = asyncio.create_task(self._listen())
        ended = asyncio.create_task(self._engine.ended.wait())
        await asyncio.wait([listening, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            listening.cancel()
            return self._engine.end_reason
        ended.cancel()
        reason = await listening
        try:
            await asyncio.wait_for(self._engine.close(reason), END_TIMEOUT)
        except asyncio.TimeoutError:
            log.warning("stopping the meshes took longer than %s s", END_TIMEOUT)
        return reason

    async def _listen(self) -> str:
        while True:
            received = await self._control.receive()
            if received is None:
                return "the gateway's server is gone"
            message, descriptors = received
            if isinstance(message, End):
                return message.reason
            if isinstance(message, Connection):
                connection = socket.socket(fileno=descriptors[0])
                connection.setblocking(False)
                await open_link(self._engine, connection, message.head.encode("latin-1"))
            elif isinstance(message, HostsReply):
                self._take_hosts(message)
            elif isinstance(message, HostLost):
                self._engine.meshes.host_lost(message.host, message.reason, returns=message.returns)
            elif isinstance(message, HostBack):
                self._engine.meshes.host_back(message.mesh, message.rank, message.host)
            elif isinstance(message, Assign):
                log.debug("session %s", message.session)

    def _take_hosts(self, reply: HostsReply) -> None:
        told = self._told.setdefault(reply.mesh, [])
        told += reply.hosts
        if reply.more:
            return
        del self._told[reply.mesh]
        asked = self._hosts.get(reply.mesh)
        if asked is None or asked.done():
            return
        if reply.error:
            asked.set_exception(invalid(reply.error))
        else:
            asked.set_result(tuple(told))


async def serve(control_fd: int, host: str | None) -> str:
    control = ControlChannel(socket.socket(fileno=control_fd))
    reason = await Process(control, host).run()
    control.send(Ended(reason=reason))
    return reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True, help="the server's end is a unix seqpacket socket")
    parser.add_argument(
        "--host",
        default=os.environ.get("MESHGATE_ENGINE_HOST"),
        help="the address at which workers reach this process, such as the pod's; unix sockets if not given",
    )
    options = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("websockets").setLevel(logging.WARNING)  # it tells of every connection; the server does too
    uvloop.run(serve(options.control_fd, options.host))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the meshes are stopped; Monarch's own shutdown would take seconds more


if __name__ == "__main__":
    sys.exit(main())

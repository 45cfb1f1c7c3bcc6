"""``python -m meshgate_gateway.engine --control-fd N``: the process of one session.

The server may start it before its session is known, so that Monarch is loaded by the time a client connects. It ends
with the session, when the server asks it to, or when the server is gone.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until EngineMain.run: imports leave no garbage, and to look for it takes a tenth of their time

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
import weakref
from collections.abc import Sequence

import async_timeout
import uvloop
from websockets.frames import CloseCode

from meshgate_gateway.control import (
    AssignSession,
    ClientConnected,
    ClientDisconnected,
    ConnectionRefused,
    ControlChannel,
    ControlMessage,
    EndSession,
    HostEnding,
    HostLost,
    HostRestored,
    HostsReply,
    Inspect,
    JobEnding,
    NewConnection,
    ReportState,
    RunEnded,
    SessionEnded,
    SessionNamed,
    SessionState,
)
from meshgate_gateway.engine.client_connection import ClientConnection, serve_connection
from meshgate_gateway.engine.engine import Engine
from meshgate_gateway.engine.meshes.attaching import HostRequests
from meshgate_gateway.engine.monarch import interface
from meshgate_gateway.engine.monarch.interface import Fault
from meshgate_gateway.engine.output.output_log import OutputLog
from meshgate_sync.distribution.agent import enable_debug_log

log = logging.getLogger(__name__)

END_TIMEOUT = 6.0


class EngineMain:
    """The engine and its control channel to the server."""

    def __init__(self, control: ControlChannel, host: str | None, output_log: OutputLog | None) -> None:
        """``host``: the address at which workers reach this process, or None if they share its machine."""
        self._output_log = output_log
        self._control, self._host = control, host
        self._loop = asyncio.get_running_loop()
        self._session: str | None = None
        self._disconnected_since: float | None = None  # None while a client is connected
        self._host_requests = HostRequests(control.send)
        self._connections: weakref.WeakSet[ClientConnection] = weakref.WeakSet()
        monarch = interface.connect(interface.transport_at(host) if host else None, self._on_fault)
        self._engine = Engine(
            monarch,
            self._host_requests.find,
            self._connection_changed,
            host=host,
            connection_refused=lambda: control.send(ConnectionRefused()),
            named=lambda name: control.send(SessionNamed(name=name)),
            counted=control.send,
            log_output=output_log.add if output_log is not None else lambda lines: None,
        )

    def _on_fault(self, fault: Fault) -> None:
        self._loop.call_soon_threadsafe(self._engine.fault, fault)

    def _connection_changed(self, connected: bool) -> None:
        self._disconnected_since = None if connected else self._loop.time()
        if connected:
            self._control.send(ClientConnected(run=self._engine.link.run))
        else:
            self._control.send(ClientDisconnected(silence=self._engine.link.silence, detached=self._engine.is_detached))

    def _assigned(self, session: str) -> None:
        if self._session is None:
            self._session, self._disconnected_since = session, self._loop.time()
            self._engine.session = session
            if self._output_log is not None:
                self._output_log.session = session
            log.debug("session %s", session)

    def _report_state(self) -> None:
        since = self._disconnected_since
        disconnected_for = 0.0 if since is None else self._loop.time() - since
        self._control.send(
            SessionState(
                connected=since is None,
                disconnected_for=disconnected_for,
                silence=self._engine.link.silence,
                detached=self._engine.is_detached,
            )
        )
        self._host_requests.repeat()

    async def run(self) -> str:
        """Serves the session until it ends, and returns why it ended."""
        await self._engine.listen(self._host)
        gc.freeze()  # imported modules stay until the end: garbage collections need not traverse them
        gc.enable()
        serving = asyncio.create_task(self._serve_control())
        ended = asyncio.create_task(self._engine.ended.wait())
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            serving.cancel()
            return self._engine.end_reason
        ended.cancel()
        reason = await serving
        try:
            async with async_timeout.timeout(END_TIMEOUT):
                await self._engine.close(reason)
        except asyncio.TimeoutError:
            log.warning("the meshes did not stop within %s s", END_TIMEOUT)
        return reason

    async def _serve_control(self) -> str:
        """Handles the server's messages until one ends the session, or fails. Returns why."""
        try:
            while True:
                received = await self._control.receive()
                if received is None:
                    return "the gateway has ended"
                message, descriptors = received
                if isinstance(message, EndSession):
                    return message.reason
                if isinstance(message, RunEnded) and self._ends_with(message.run):
                    return f"the program of the run {message.run} has ended, and the session is not detached"
                await self._on_message(message, descriptors)
        except Exception as error:
            log.exception("cannot handle a message of the server")
            return f"the session's engine could not handle a message of the gateway's server: {error!r}"

    async def _on_message(self, message: ControlMessage, descriptors: Sequence[int]) -> None:
        if isinstance(message, NewConnection):
            await self._serve_connection(message, socket.socket(fileno=descriptors[0]))
        elif isinstance(message, HostsReply):
            self._host_requests.add_reply(message)
        elif isinstance(message, HostLost):
            self._engine.host_lost(
                message.host, message.reason, returns=message.returns, removed=message.removed, last=message.last
            )
        elif isinstance(message, HostRestored):
            self._engine.host_back(message.mesh, message.rank, message.host)
        elif isinstance(message, HostEnding):
            self._engine.host_ending(message.host, message.reason, message.seconds)
        elif isinstance(message, Inspect):
            for part in self._engine.inspection.answer(message):
                self._control.send(part)
        elif isinstance(message, ReportState):
            self._report_state()
        elif isinstance(message, JobEnding):
            self._engine.job_ending(message)
        elif isinstance(message, AssignSession):
            self._assigned(message.session)  # repeated by each further server

    async def _serve_connection(self, message: NewConnection, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        head, facts = message.head.encode("latin-1"), message.model_dump(include={"gateway", "proof_key", "run"})
        connection = await serve_connection(self._engine.admission, self._engine.link, accepted, head, **facts)
        self._connections.add(connection)

    def _ends_with(self, run: str) -> bool:
        """Closes the connections that the secret of ``run`` has opened. Returns whether the session ends with it."""
        for connection in [each for each in self._connections if each.run == run]:
            connection.close(CloseCode.POLICY_VIOLATION, f"the run {run} has ended, and with it its access")
        return self._engine.link.run == run and not self._engine.is_detached


async def serve(control_fd: int, host: str | None, output_fd: int | None) -> None:
    control = ControlChannel(socket.socket(fileno=control_fd))
    output_log = OutputLog(output_fd) if output_fd is not None else None
    reason = await EngineMain(control, host, output_log).run()
    if output_log is not None:
        await asyncio.to_thread(output_log.close)
    control.send(SessionEnded(reason=reason))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True, help="a connected unix seqpacket socket to the server")
    parser.add_argument(
        "--host",
        default=os.environ.get("MESHGATE_ENGINE_HOST"),
        help="the address at which workers reach this process, such as the pod's IP; default: unix sockets",
    )
    parser.add_argument("--output-fd", type=int, help="where to write what actors print, as JSON lines")
    options = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    enable_debug_log()
    logging.getLogger("websockets").setLevel(logging.WARNING)  # it logs every connection, and so does the server
    try:
        uvloop.run(serve(options.control_fd, options.host, options.output_fd))
    except interface.UnsupportedMonarch as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the server reports the last lines to the client
        return 1
    with contextlib.suppress(OSError):  # the server that reads them is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # the meshes have stopped; Monarch's own shutdown would take seconds


if __name__ == "__main__":
    sys.exit(main())

"""A port-forward through the API server as a connected socket: in Python, without kubectl and without a local port.

The API server carries it in a websocket of its own, whose messages begin with the number of a channel: 0 for the
bytes of the port, 1 for an error that ends it. A thread with an event loop of its own pumps between that websocket
and one end of a socket pair, and ends when either side does; so a forward never outlives whoever holds the other
end, and needs nothing of that one's loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, Event
from websockets.typing import Subprotocol

from meshgate_kubernetes.api import Tunnel
from meshgate_kubernetes.refusals import refusal

__all__ = ["ForwardFailed", "open_forward"]

log = logging.getLogger("meshgate.kubernetes")

OPEN_TIMEOUT = 10.0
CLOSE_TIMEOUT = 1.0
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1
_READ = 1 << 18


class ForwardFailed(OSError):
    """The API server, or the node behind it, does not forward to this pod now. ``status``: of the API server's
    refusal, 0 when it was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def open_forward(tunnel: Tunnel) -> Future[socket.socket]:
    """The socket of a new forward, once the API server has agreed to it; else ForwardFailed."""
    opened: Future[socket.socket] = Future()
    here, there = socket.socketpair()
    threading.Thread(target=_run, args=(tunnel, here, there, opened), name="meshgate-port-forward", daemon=True).start()
    return opened


def _run(tunnel: Tunnel, here: socket.socket, there: socket.socket, opened: Future[socket.socket]) -> None:
    try:
        asyncio.run(_forward(tunnel, here, there, opened))
    except InvalidStatus as error:
        status = error.response.status_code
        _fail(opened, ForwardFailed(f"the API server refuses the port-forward: {_why(tunnel, error.response)}", status))
    except (OSError, WebSocketException, EOFError, TimeoutError, asyncio.TimeoutError) as error:
        _fail(opened, ForwardFailed(f"the port-forward failed: {error or type(error).__name__}"))
    finally:
        there.close()
        if not opened.done() or opened.cancelled() or opened.exception() is not None:
            here.close()


def _why(tunnel: Tunnel, response: Response) -> str:
    host, request = urlsplit(tunnel.url).netloc, f"GET {urlsplit(tunnel.url).path}"
    body = bytes(response.body or b"")
    return str(refusal(response.status_code, body, host=host, source="this user", request=request))


def _fail(opened: Future[socket.socket], error: ForwardFailed) -> None:
    if opened.done():
        log.debug("%s", error)
    else:
        opened.set_exception(error)


async def _forward(tunnel: Tunnel, here: socket.socket, there: socket.socket, opened: Future[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    local = _Local()
    remote = await asyncio.wait_for(_connect(tunnel, local), OPEN_TIMEOUT)
    try:
        await loop.create_connection(lambda: local, sock=there)
        local.start(remote)
        if opened.set_running_or_notify_cancel():
            opened.set_result(here)
            await local.ended
    finally:
        local.close()
        with suppress(OSError, WebSocketException):
            await remote.close()


async def _connect(tunnel: Tunnel, local: _Local) -> _Remote:
    def create(protocol: ClientProtocol, **options: Any) -> _Remote:
        return _Remote(protocol, local=local, **options)

    options: dict[str, Any] = {"proxy": tunnel.proxy}
    if tunnel.ssl is not None:
        options["ssl"] = tunnel.ssl
    if tunnel.server_hostname is not None:
        options["server_hostname"] = tunnel.server_hostname
    remote = await connect(
        tunnel.url,
        additional_headers=dict(tunnel.headers),
        subprotocols=[_SUBPROTOCOL],
        compression=None,
        max_size=None,
        open_timeout=None,
        ping_interval=None,  # what is carried has pings of its own
        close_timeout=CLOSE_TIMEOUT,
        create_connection=create,  # type: ignore[arg-type]  # called, never subclassed
        **options,
    )
    assert isinstance(remote, _Remote)
    return remote


class _Remote(ClientConnection):
    """The API server's websocket. Frames go to the local side in the callback that read them."""

    def __init__(self, protocol: ClientProtocol, *, local: _Local, **options: Any) -> None:
        super().__init__(protocol, **options)
        self._local = local
        self._channel = _DATA
        self._announced: set[int] = set()

    def process_event(self, event: Event) -> None:
        if self.response is None or not isinstance(event, Frame):
            super().process_event(event)
        elif event.opcode is Opcode.BINARY:
            data = memoryview(event.data)
            self._channel = data[0]
            self._received(data[1:])
        elif event.opcode is Opcode.CONT:
            self._received(memoryview(event.data))
        else:
            super().process_event(event)

    def _received(self, data: memoryview) -> None:
        if self._channel not in self._announced:  # the first message of a channel holds the port, two bytes
            self._announced.add(self._channel)
            data = data[2:]
        if not data:
            return
        if self._channel == _DATA:
            self._local.write(data)
        elif self._channel == _ERROR:
            self._local.end(ForwardFailed(f"the port-forward ended: {bytes(data).decode(errors='replace').strip()}"))

    def forward(self, data: bytes) -> None:
        if self.protocol.state is OPEN:
            self.protocol.send_binary(b"\0" + data)
            self.send_data()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._local.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._local.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._local.end(None)


class _Local(asyncio.BufferedProtocol):
    """Our end of the socket pair, whose other end the caller holds."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: _Remote | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._buffer = bytearray(_READ)

    def start(self, remote: _Remote) -> None:
        self._remote = remote
        for data in self._early:
            self.write(data)
        if self._transport is not None:
            self._transport.resume_reading()

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is None or self._remote is None:
            self._early.append(bytes(data))
        elif not self._transport.is_closing():
            self._transport.write(data)

    def end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # until the websocket is there to take it

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._remote is not None:
            self._remote.forward(bytes(memoryview(self._buffer)[:nbytes]))

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        if self._remote is not None:
            self._remote.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._remote is not None and not self._remote.transport.is_closing():
            self._remote.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(None)

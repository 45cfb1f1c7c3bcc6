"""A port-forward through the API server as a connected socket, without kubectl and without a local port.

The API server carries it in a websocket whose messages begin with a channel number: 0 for the bytes of the port, 1 for
an error that ends it. A thread with its own event loop copies bytes between that websocket and one end of a socket
pair, and ends when either side closes. A forward therefore ends with its user and does not depend on the user's event
loop.
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

from meshgate_kubernetes.api.client import PortForwardRequest
from meshgate_kubernetes.api.rejections import rejection_error

__all__ = ["ForwardFailed", "open_forward"]

log = logging.getLogger("meshgate.jobs.kubernetes")

OPEN_TIMEOUT = 10.0
CLOSE_TIMEOUT = 1.0
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1
_READ_SIZE = 1 << 18


class ForwardFailed(OSError):
    """The API server, or the node behind it, cannot forward to the pod now. ``status`` is the HTTP status with which
    the API server rejected it, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def open_forward(request: PortForwardRequest) -> Future[socket.socket]:
    """Opens a forward. The future gets its socket once the API server has accepted it, or ForwardFailed."""
    opened: Future[socket.socket] = Future()
    user_end, forward_end = socket.socketpair()
    arguments = (request, user_end, forward_end, opened)
    threading.Thread(target=_run, args=arguments, name="meshgate-port-forward", daemon=True).start()
    return opened


def _run(
    request: PortForwardRequest, user_end: socket.socket, forward_end: socket.socket, opened: Future[socket.socket]
) -> None:
    try:
        asyncio.run(_forward(request, user_end, forward_end, opened))
    except InvalidStatus as error:
        status = error.response.status_code
        reason = _rejection(request, error.response)
        _fail(opened, ForwardFailed(f"the API server rejected the port-forward: {reason}", status))
    except (OSError, WebSocketException, EOFError, TimeoutError, asyncio.TimeoutError) as error:
        _fail(opened, ForwardFailed(f"the port-forward failed: {error or type(error).__name__}"))
    finally:
        forward_end.close()
        if not opened.done() or opened.cancelled() or opened.exception() is not None:
            user_end.close()


def _rejection(request: PortForwardRequest, response: Response) -> str:
    url = urlsplit(request.url)
    body = bytes(response.body or b"")
    error = rejection_error(response.status_code, body, host=url.netloc, source="this user", request=f"GET {url.path}")
    return str(error)


def _fail(opened: Future[socket.socket], error: ForwardFailed) -> None:
    if opened.done():
        log.debug("%s", error)
    else:
        opened.set_exception(error)


async def _forward(
    request: PortForwardRequest, user_end: socket.socket, forward_end: socket.socket, opened: Future[socket.socket]
) -> None:
    loop = asyncio.get_running_loop()
    local = _Local()
    remote = await asyncio.wait_for(_connect(request, local), OPEN_TIMEOUT)
    try:
        await loop.create_connection(lambda: local, sock=forward_end)
        local.start(remote)
        if opened.set_running_or_notify_cancel():
            opened.set_result(user_end)
            await local.ended
    finally:
        local.close()
        with suppress(OSError, WebSocketException):
            await remote.close()


async def _connect(request: PortForwardRequest, local: _Local) -> _Remote:
    def create(protocol: ClientProtocol, **options: Any) -> _Remote:
        return _Remote(protocol, local=local, **options)

    options: dict[str, Any] = {"proxy": request.proxy}
    if request.ssl is not None:
        options["ssl"] = request.ssl
    if request.server_hostname is not None:
        options["server_hostname"] = request.server_hostname
    remote = await connect(
        request.url,
        additional_headers=dict(request.headers),
        subprotocols=[_SUBPROTOCOL],
        compression=None,
        max_size=None,
        open_timeout=None,
        ping_interval=None,  # the forwarded connection has its own pings
        close_timeout=CLOSE_TIMEOUT,
        create_connection=create,  # type: ignore[arg-type]  # called, never subclassed
        **options,
    )
    assert isinstance(remote, _Remote)
    return remote


class _Remote(ClientConnection):
    """The API server's websocket. Passes frames to the local side in the callback that reads them."""

    def __init__(self, protocol: ClientProtocol, *, local: _Local, **options: Any) -> None:
        super().__init__(protocol, **options)
        self._local = local
        self._channel = _DATA
        self._channels_seen: set[int] = set()

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
        if self._channel not in self._channels_seen:  # each channel begins with the port number, two bytes
            self._channels_seen.add(self._channel)
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
    """The forward's end of the socket pair; the user holds the other."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: _Remote | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._buffer = bytearray(_READ_SIZE)

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
        transport.pause_reading()  # until the websocket can take the data

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

"""Opens a port-forward: in SPDY as kubectl does, or in a websocket.

A thread with its own event loop copies bytes between the connection to the API server and one end of a socket pair, and
ends when either side closes. A forward therefore ends with its user and does not depend on the user's event loop.
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

import async_timeout
from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, Event
from websockets.typing import Subprotocol

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd
from meshgate.jobs.kubernetes.port_forward.spdy import SpdyEnd, UpgradeRefused, connect_spdy
from meshgate_kubernetes.api.client import PortForwardRequest
from meshgate_kubernetes.errors import rejection_error

log = logging.getLogger("meshgate.jobs.kubernetes")

OPEN_TIMEOUT = 10.0
CLOSE_TIMEOUT = 1.0
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1


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
    except ForwardFailed as error:
        _fail(opened, error)
    except (TimeoutError, asyncio.TimeoutError):
        _fail(opened, ForwardFailed(f"the port-forward failed: no answer within {OPEN_TIMEOUT:g} s"))
    except (OSError, WebSocketException, EOFError) as error:
        _fail(opened, ForwardFailed(f"the port-forward failed: {error}"))
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
    local = LocalEnd()
    async with async_timeout.timeout(OPEN_TIMEOUT):
        remote = await _connect(request, local)
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


async def _connect(request: PortForwardRequest, local: LocalEnd) -> SpdyEnd | WebsocketEnd:
    """SPDY is faster, but some proxies pass only websockets. A websocket is also what reports why a request that the
    API server rejects is rejected."""
    if request.proxy is None:
        try:
            return await connect_spdy(request, local)
        except UpgradeRefused as error:
            log.debug("forwarding in a websocket, because SPDY is refused: %s", error)
    return await connect_websocket(request, local)


# Messages begin with a channel number: 0 for bytes of the port, 1 for an error.


async def connect_websocket(request: PortForwardRequest, local: LocalEnd) -> WebsocketEnd:
    """Raises InvalidStatus if the API server rejects it, and OSError."""

    def create(protocol: ClientProtocol, **options: Any) -> WebsocketEnd:
        return WebsocketEnd(protocol, local=local, **options)

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
    assert isinstance(remote, WebsocketEnd)
    return remote


class WebsocketEnd(ClientConnection):
    """The API server's websocket. Passes frames to the local end in the callback that reads them."""

    def __init__(self, protocol: ClientProtocol, *, local: LocalEnd, **options: Any) -> None:
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

    def forward(self, data: memoryview) -> None:
        if self.protocol.state is OPEN:
            self.protocol.send_binary(b"\0" + data)
            self.send_data()

    def pause_receiving(self) -> None:
        self.transport.pause_reading()

    def resume_receiving(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._local.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._local.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._local.end(None)

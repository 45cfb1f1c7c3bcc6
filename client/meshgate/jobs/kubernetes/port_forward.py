"""A port-forward through the API server as a connected socket, without kubectl and without a local port.

It is in SPDY, as kubectl's, or in a websocket. A thread with its own event loop copies bytes between the connection to
the API server and one end of a socket pair, and ends when either side closes. A forward therefore ends with its user
and does not depend on the user's event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import async_timeout
from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.protocol import Event as WebsocketEvent
from websockets.typing import Subprotocol

from meshgate.jobs.kubernetes.spdy import Answer, Data, Event, Failed, ForwardStreams, Opened, PodClosed
from meshgate.session.dialing import close_in_forked_children
from meshgate_kubernetes.api.client import PortForwardRequest
from meshgate_kubernetes.errors import rejection_error

log = logging.getLogger("meshgate.jobs.kubernetes")

OPEN_TIMEOUT = 10.0
CLOSE_TIMEOUT = 1.0
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1
READ_SIZE = 1 << 18
_WRITE_LIMIT = 1 << 20
_MAX_RESPONSE = 1 << 16


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


class ForwardFailed(OSError):
    """The API server, or the node behind it, cannot forward to the pod now. ``status`` is the HTTP status with which
    the API server rejected it, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RemoteEnd(Protocol):
    """The connection to the API server."""

    def forward(self, data: memoryview) -> None:
        """Sends bytes from the user. ``data`` is reused after this call."""

    def pause_receiving(self) -> None: ...

    def resume_receiving(self) -> None: ...


class LocalEnd(asyncio.BufferedProtocol):
    """The forward's end of the socket pair whose other end the user holds. Passes bytes on without blocking.

    Ends with the future ``ended``, which has an error if the API server or the node reported one.
    """

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: RemoteEnd | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._buffer = memoryview(bytearray(READ_SIZE))

    def start(self, remote: RemoteEnd) -> None:
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
        transport.pause_reading()  # until the remote end can take the data

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._remote is not None:
            self._remote.forward(self._buffer[:nbytes])

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        if self._remote is not None:
            self._remote.pause_receiving()

    def resume_writing(self) -> None:
        if self._remote is not None:
            self._remote.resume_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(None)


class UpgradeRefused(Exception):
    """The server, or a proxy before it, does not let this user speak SPDY."""


async def connect_spdy(request: PortForwardRequest, local: LocalEnd) -> SpdyEnd:
    """Raises UpgradeRefused, ForwardFailed if the node rejects the streams, and OSError."""
    url = urlsplit(request.url)
    _, remote = await asyncio.get_running_loop().create_connection(
        lambda: SpdyEnd(request, local),
        url.hostname or "",
        url.port or (443 if request.ssl else 80),
        ssl=request.ssl,
        server_hostname=request.server_hostname if request.ssl else None,
    )
    try:
        await remote.opened
    except BaseException:
        await remote.close()
        raise
    return remote


class SpdyEnd(asyncio.BufferedProtocol):
    """The connection to the API server. ``opened`` is done once bytes can be sent."""

    def __init__(self, request: PortForwardRequest, local: LocalEnd) -> None:
        self._request = request
        self._local = local
        self._streams = ForwardStreams()
        self._response: bytearray | None = bytearray()  # None once the connection is SPDY
        self._buffer = memoryview(bytearray(READ_SIZE))
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- towards the API server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        close_in_forked_children(self, transport)
        transport.set_write_buffer_limits(_WRITE_LIMIT)
        url = urlsplit(self._request.url)
        headers = {
            "Host": url.netloc,
            "Connection": "Upgrade",
            "Upgrade": "SPDY/3.1",
            "X-Stream-Protocol-Version": "portforward.k8s.io",
            "Content-Length": "0",
            **self._request.headers,
        }
        lines = [f"POST {url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        transport.write("\r\n".join(lines).encode("latin-1"))

    def forward(self, data: memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join((self._streams.data_header(len(data)), data)))

    def pause_receiving(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_receiving(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._local.pause_reading()

    def resume_writing(self) -> None:
        self._local.resume_reading()

    async def close(self) -> None:
        """Sends what is left, for a second at most. The node takes the end of the connection as that of its streams."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._lost], timeout=CLOSE_TIMEOUT)
            self._transport.abort()

    # --- from the API server

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes]
        if self._response is not None:
            self._response += data
            head, separator, rest = bytes(self._response).partition(b"\r\n\r\n")
            if not separator and len(head) < _MAX_RESPONSE:
                return
            self._response = None
            if not self._upgraded(head):
                return
            data = memoryview(rest)
        try:
            for event in self._streams.receive(data):
                self._handle(event)
        except ValueError as error:
            self._end(ForwardFailed(f"the port-forward ended: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set_result(None)
        self._end(UpgradeRefused("the connection was closed") if self._response is not None else None)

    def _upgraded(self, head: bytes) -> bool:
        """Opens the streams if the server speaks SPDY from here on."""
        status, _, lines = head.partition(b"\r\n")
        upgrade = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n")).get("Upgrade", "")
        if status.split(b" ")[1:2] != [b"101"] or upgrade.upper() != "SPDY/3.1":
            self._end(UpgradeRefused(status.decode("latin-1")))
            return False
        assert self._transport is not None
        self._transport.write(self._streams.open(self._request.port))
        return True

    def _handle(self, event: Event) -> None:
        match event:
            case Data(data):
                self._local.write(data)
            case Opened():
                if not self.opened.done():
                    self.opened.set_result(None)
            case Answer(data):
                assert self._transport is not None
                self._transport.write(data)
            case Failed(reason):
                self._end(ForwardFailed(f"the port-forward ended: {reason}"))
            case PodClosed():
                self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Before ``opened``, another way may yet be found for the local end."""
        if not self.opened.done():
            self.opened.set_exception(error or ForwardFailed("the API server closed the port-forward"))
        elif not self.opened.cancelled() and self.opened.exception() is None:
            self._local.end(error)


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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        close_in_forked_children(self, transport)

    def process_event(self, event: WebsocketEvent) -> None:
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

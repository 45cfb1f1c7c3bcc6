"""One websocket connection to the gateway, with as little as possible between it and the session.

The websockets library does the handshake, TLS, proxies, pings and closing. Data bypasses it: what arrives goes to the
session in the callback that read it, and what is sent is written to the transport at once, with no task and no queue
in between. This uses private parts of the library (see ``tests/test_websockets_internals.py``), whose version is
therefore pinned.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode, apply_mask  # type: ignore[attr-defined]  # the C version, if any
from websockets.http11 import Response
from websockets.protocol import OPEN, Event

from meshgate.session.dialing import PING_INTERVAL, Route, close_in_forked_children
from meshgate_wire.websocket import NO_MASK, FrameReader, binary_header

# A cut is not an error, but the library logs one if a ping is under way. Add a handler to this logger to see them.
_library_log = logging.getLogger("meshgate.websockets")
_library_log.addHandler(logging.NullHandler())
_library_log.propagate = False

PING_TIMEOUT = 20.0  # seconds
STALL_TIMEOUT = PING_INTERVAL + PING_TIMEOUT
STALL_INTERVAL = 5.0  # seconds between two checks for that
CLOSE_TIMEOUT = 2.0
# Below the 256 KiB in the transport's buffer at which the pump stops, so that resume_writing is called in time.
WRITE_LIMITS = (128 << 10, 32 << 10)
_COPY_BELOW = 16 << 10  # a smaller message is joined with its header, which is cheaper than writing two pieces
_MASKS = 64  # drawn at a time
_END_OF_HEAD = b"\r\n\r\n"


class Receiver(Protocol):
    """Receives the events of a connection. Every method is called on the loop and must not block."""

    def connection_opened(self, connection: GatewayConnection) -> None:
        """The handshake has succeeded; no data has been received yet."""

    def connection_data(self, connection: GatewayConnection, data: bytes) -> None:
        """A binary message has arrived."""

    def connection_writable(self, connection: GatewayConnection) -> None:
        """The transport's buffer has room again."""


class GatewayConnection(ClientConnection):
    """A websocket connection that calls its receiver. Created by ``open_connection``."""

    def __init__(
        self,
        protocol: ClientProtocol,
        *,
        receiver: Receiver,
        is_gateways: Callable[[Response], bool],
        max_message: int,
        masks: bool,
        **options: Any,
    ) -> None:
        super().__init__(protocol, **options)
        self._is_gateways = is_gateways
        self._receiver = receiver
        self._max_message = max_message
        self._masking = masks
        self._fragments: list[bytes] = []
        self._frames: FrameReader | None = None  # after the handshake
        self._tail = b""  # of the response so far, in which its end may begin
        self._masks = b""
        self._arrivals = 0
        self._progress = (0, 0)  # arrivals and unsent bytes, when either last changed
        self._progress_time = self.loop.time()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._reason = ""  # why this side ended the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        close_in_forked_children(self, transport)

    def data_received(self, data: bytes) -> None:
        self._arrivals += 1
        if self._frames is None:
            data = self._handshake(data)
            if self._frames is None:
                return
        for frame, other in self._frames.feed(data):
            if other:
                super().data_received(frame)
                if self.protocol.close_rcvd is not None:
                    # Both sides have closed the websocket. RFC 6455 (7.1.1) lets the server end the TCP connection, but
                    # in a port-forward that end arrives a second later: containerd waits that long for the client's.
                    self.transport.close()
            elif self.protocol.state is OPEN:
                self._receiver.connection_data(self, frame)

    def _handshake(self, data: bytes) -> bytes:
        """Passes the response to the library. Returns what follows it once the connection is open."""
        searched = self._tail + data
        end = searched.find(_END_OF_HEAD)
        if end < 0 or self.response is not None:
            self._tail = searched[1 - len(_END_OF_HEAD) :]
            super().data_received(data)
            return b""
        rest = len(searched) - end - len(_END_OF_HEAD)
        head = len(data) - rest
        self._frames = FrameReader(self._max_message)
        super().data_received(data[:head])
        if self.protocol.state is not OPEN:  # the gateway refused: the library reads the body
            self._frames = None
            super().data_received(data[head:])
        return data[head:]

    def process_event(self, event: Event) -> None:
        if self.response is None:
            super().process_event(event)
            if self.protocol.state is OPEN:
                self._handshake_done()
        elif type(event) is Frame and (event.opcode is Opcode.BINARY or event.opcode is Opcode.CONT):
            self._data(event)
        elif type(event) is Frame and event.opcode is Opcode.TEXT:
            self.refuse(CloseCode.UNSUPPORTED_DATA, "text messages are not supported")
        else:
            super().process_event(event)

    def _handshake_done(self) -> None:
        assert self.response is not None
        if not self._is_gateways(self.response):
            self.abort()  # open_connection raises
            return
        self._check_stalled()
        self._receiver.connection_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)

    def _check_stalled(self) -> None:
        """Aborts the connection if data waits to be sent, none of it can be, and nothing arrives.

        The library notices a gateway that has vanished by its pings, but only while they can be sent: after a loss of
        the network during an upload it would wait for as long as the kernel does, a quarter of an hour.
        """
        progress, now = (self._arrivals, self.buffered()), self.loop.time()
        if progress != self._progress or not self.buffered():
            self._progress, self._progress_time = progress, now
        elif now - self._progress_time >= STALL_TIMEOUT:
            self.abort(f"nothing could be sent and nothing arrived for {now - self._progress_time:.0f} s")
            return
        self._stall_timer = self.loop.call_later(STALL_INTERVAL, self._check_stalled)

    def _data(self, frame: Frame) -> None:
        data = frame.data if isinstance(frame.data, bytes) else bytes(frame.data)
        if not frame.fin or self._fragments:  # the gateway sends whole messages; a proxy may fragment them
            self._fragments.append(data)
            if not frame.fin:
                return
            data = b"".join(self._fragments)
            self._fragments.clear()
        self._receiver.connection_data(self, data)

    def write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Sends one binary message. Does nothing if the connection is closing: the session will retransmit."""
        if self.protocol.state is not OPEN:
            return
        mask = NO_MASK
        if self._masking:
            if not self._masks:  # unpredictable, so that no attacker can choose what a proxy sees (RFC 6455, 10.3)
                self._masks = os.urandom(4 * _MASKS)
            mask, self._masks = self._masks[:4], self._masks[4:]
        size = sum(map(len, pieces))
        header = binary_header(size, mask)
        if size < _COPY_BELOW:
            payload = b"".join(pieces)
            self.transport.write(header + (apply_mask(payload, mask) if self._masking else payload))
        else:
            self.transport.writelines((header, *(_masked(pieces, mask) if self._masking else pieces)))

    def buffered(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self.transport.get_write_buffer_size()

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay, callback)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.protocol.state is OPEN:
            self._receiver.connection_writable(self)

    def refuse(self, code: CloseCode, reason: str) -> None:
        """Closes the connection because of what the peer sent, with the reason."""
        self._reason = self._reason or reason
        if self.protocol.state is OPEN:
            self.protocol.fail(code, reason[:120])
            self.send_data()
        self.transport.close()

    def abort(self, reason: str = "") -> None:
        """Closes the connection at once, without a closing handshake."""
        self._reason = self._reason or reason
        self.transport.abort()

    async def wait_lost(self) -> None:
        """Returns once the connection is closed."""
        await asyncio.shield(self.connection_lost_waiter)

    def close_description(self) -> str:
        """Why the connection was closed."""
        if self._reason:
            return self._reason
        if self.close_code is not None and self.close_reason:
            return f"{self.close_reason} (code {self.close_code})"
        return str(getattr(self, "connection_exc", None) or "the connection was cut")  # set by websockets 17 and later


def _masked(pieces: Sequence[bytes | bytearray | memoryview], mask: bytes) -> Iterator[bytes]:
    """The pieces, masked as if they were one."""
    offset = 0
    for piece in pieces:
        shift = offset % 4
        yield apply_mask(piece, mask[shift:] + mask[:shift])
        offset += len(piece)


class _connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        """Follows none: a gateway sends no redirect, and the ingress that does answers in its place."""
        return exc


async def open_connection(
    route: Route,
    path: str,
    headers: dict[str, str],
    receiver: Receiver,
    *,
    max_size: int,
    is_gateways: Callable[[Response], bool],
) -> GatewayConnection:
    """Connects to ``path`` along ``route``. ``is_gateways`` decides whether a websocket was opened by the gateway.

    Raises OSError, TimeoutError or ``websockets.exceptions.InvalidHandshake``: InvalidStatus also if another server has
    opened the websocket.
    """

    def create(protocol: ClientProtocol, **options: Any) -> GatewayConnection:
        return GatewayConnection(
            protocol,
            receiver=receiver,
            is_gateways=is_gateways,
            max_message=max_size,
            masks=route.unix_socket is None,  # masks are for intermediaries, and cost two passes over what is sent
            **options,
        )

    options: dict[str, Any] = {}
    if route.ssl is not None:
        options["ssl"] = route.ssl
    if route.sock is not None:
        options["sock"] = route.sock
    if route.unix_socket is not None:
        options |= {"unix": True, "path": route.unix_socket}
    if not route.through_proxy:
        options["proxy"] = None
    connection = await _connect(
        route.url + path,
        additional_headers={**route.headers, **headers},
        compression=None,
        logger=_library_log,
        max_size=max_size,
        open_timeout=None,
        ping_interval=route.ping_interval,
        ping_timeout=PING_TIMEOUT,
        close_timeout=CLOSE_TIMEOUT,
        write_limit=WRITE_LIMITS,
        create_connection=create,  # type: ignore[arg-type]  # called, never subclassed
        **options,
    )
    assert isinstance(connection, GatewayConnection)
    assert connection.response is not None
    if not is_gateways(connection.response):
        raise InvalidStatus(connection.response)
    return connection

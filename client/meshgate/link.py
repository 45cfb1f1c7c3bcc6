"""One websocket connection to the gateway, driven with as little between it and the session as there can be.

The websockets library does the handshake, TLS, proxies, pings and closing. Data takes a shorter way than its
``recv()`` and ``send()``: what arrives goes to the session in the very callback that read it, and what is sent is
written to the transport at once, with no task and no queue between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, Event

from meshgate.dialing import Route

__all__ = ["Link", "Receiver", "open_link"]

PING_INTERVAL = 15.0  # seconds; the shortest idle limit met in load balancers is 30
PING_TIMEOUT = 20.0
CLOSE_TIMEOUT = 2.0
# The pump stops at 256 KiB in the transport's buffer. Below that, so that it hears when the buffer has run down.
WRITE_LIMITS = (128 << 10, 32 << 10)


class Receiver(Protocol):
    """What a link feeds. Every method is called on the loop and must not block."""

    def link_open(self, link: Link) -> None:
        """The handshake has succeeded; nothing has been received yet."""

    def link_data(self, link: Link, data: bytes) -> None:
        """A binary message has arrived."""

    def link_writable(self, link: Link) -> None:
        """The transport's buffer has run down."""


class Link(ClientConnection):
    """A websocket connection that calls its receiver. Made by :func:`open_link`."""

    def __init__(self, protocol: ClientProtocol, *, receiver: Receiver, **options: Any) -> None:
        super().__init__(protocol, **options)
        self._receiver = receiver
        self._fragments: list[bytes] = []

    def process_event(self, event: Event) -> None:
        if self.response is None:
            super().process_event(event)
            if self.protocol.state is OPEN:
                self._receiver.link_open(self)
        elif type(event) is Frame and (event.opcode is Opcode.BINARY or event.opcode is Opcode.CONT):
            self._data(event)
        elif type(event) is Frame and event.opcode is Opcode.TEXT:
            self.refuse(CloseCode.UNSUPPORTED_DATA, "text messages have no meaning here")
        else:
            super().process_event(event)

    def _data(self, frame: Frame) -> None:
        data = frame.data if isinstance(frame.data, bytes) else bytes(frame.data)
        if not frame.fin or self._fragments:  # the gateway sends whole messages; a proxy may cut them up
            self._fragments.append(data)
            if not frame.fin:
                return
            data = b"".join(self._fragments)
            self._fragments.clear()
        self._receiver.link_data(self, data)

    def write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Sends one binary message. Nothing happens on a connection that is closing: the session will replay."""
        if self.protocol.state is OPEN:
            self.protocol.send_binary(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self.send_data()

    def buffered(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self.transport.get_write_buffer_size()

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay, callback)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.protocol.state is OPEN:
            self._receiver.link_writable(self)

    def refuse(self, code: CloseCode, reason: str) -> None:
        """Ends the connection because of what the peer sent, telling it why."""
        if self.protocol.state is OPEN:
            self.protocol.fail(code, reason[:120])
            self.send_data()
        self.transport.close()

    def abandon(self) -> None:
        """Ends the connection at once, without a word to the peer."""
        self.transport.abort()

    async def wait_lost(self) -> None:
        """Returns once the connection is over."""
        await asyncio.shield(self.connection_lost_waiter)


async def open_link(route: Route, path: str, headers: dict[str, str], receiver: Receiver, *, max_size: int) -> Link:
    """Connects to ``path`` along ``route``.

    Raises OSError, TimeoutError or ``websockets.exceptions.InvalidHandshake``.
    """

    def create(protocol: ClientProtocol, **options: Any) -> Link:
        return Link(protocol, receiver=receiver, **options)

    options: dict[str, Any] = {}
    if route.ssl is not None:
        options["ssl"] = route.ssl
    if route.sock is not None:
        options["sock"] = route.sock
    if not route.through_proxy:
        options["proxy"] = None
    link = await connect(
        route.url + path,
        additional_headers={**route.headers, **headers},
        compression=None,
        max_size=max_size,
        open_timeout=None,
        ping_interval=PING_INTERVAL,
        ping_timeout=PING_TIMEOUT,
        close_timeout=CLOSE_TIMEOUT,
        write_limit=WRITE_LIMITS,
        create_connection=create,  # type: ignore[arg-type]  # called, never subclassed
        **options,
    )
    assert isinstance(link, Link)
    return link

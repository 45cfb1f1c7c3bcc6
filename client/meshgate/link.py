"""One websocket connection to the gateway, driven with as little between it and the session as there can be.

The websockets library does the handshake, TLS, proxies, pings and closing. Data goes past it: what arrives goes to
the session in the very callback that read it, and what is sent is written to the transport at once, with no task and
no queue between.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode, apply_mask  # type: ignore[attr-defined]  # in C, where there is any
from websockets.protocol import OPEN, Event

from meshgate.dialing import Route
from meshgate_wire.websocket import FrameReader, binary_header

__all__ = ["Link", "Receiver", "open_link"]

# A cut is not an error, but the library prints one where a ping was under way. Whoever wants that gives it a handler.
_library_log = logging.getLogger("meshgate.websockets")
_library_log.addHandler(logging.NullHandler())
_library_log.propagate = False

PING_INTERVAL = 15.0  # seconds; the shortest idle limit met in load balancers is 30
PING_TIMEOUT = 20.0
CLOSE_TIMEOUT = 2.0
# The pump stops at 256 KiB in the transport's buffer. Below that, so that it hears when the buffer has run down.
WRITE_LIMITS = (128 << 10, 32 << 10)
_JOINED = 16 << 10  # a smaller message is joined with its header, which is cheaper than writing two pieces
_MASKS = 64  # drawn at once
_END_OF_HEAD = b"\r\n\r\n"


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

    def __init__(self, protocol: ClientProtocol, *, receiver: Receiver, max_message: int, **options: Any) -> None:
        super().__init__(protocol, **options)
        self._receiver = receiver
        self._max_message = max_message
        self._fragments: list[bytes] = []
        self._frames: FrameReader | None = None  # after the handshake
        self._last = b""  # of the handshake, as far as its end may be in it
        self._masks = b""

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            data = self._shake_hands(data)
            if self._frames is None:
                return
        for frame, other in self._frames.feed(data):
            if other:
                super().data_received(frame)
            elif self.protocol.state is OPEN:
                self._receiver.link_data(self, frame)

    def _shake_hands(self, data: bytes) -> bytes:
        """Has the library understand the response; returns what came after it once the connection is open."""
        sought = self._last + data
        end = sought.find(_END_OF_HEAD)
        if end < 0 or self.response is not None:
            self._last = sought[1 - len(_END_OF_HEAD) :]
            super().data_received(data)
            return b""
        rest = len(sought) - end - len(_END_OF_HEAD)
        head = len(data) - rest
        self._frames = FrameReader(self._max_message)
        super().data_received(data[:head])
        if self.protocol.state is not OPEN:  # a refusal, which the library reads to its end
            self._frames = None
            super().data_received(data[head:])
        return data[head:]

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
            size = sum(map(len, pieces))
            mask = self._next_mask()
            header = binary_header(size, mask)
            if size < _JOINED:
                self.transport.write(header + apply_mask(b"".join(pieces), mask))
            else:
                self.transport.writelines((header, *_masked(pieces, mask)))

    def _next_mask(self) -> bytes:
        """Four bytes that nobody can foresee: nobody on the way may be made to see bytes of our choice."""
        if not self._masks:
            self._masks = os.urandom(4 * _MASKS)
        mask, self._masks = self._masks[:4], self._masks[4:]
        return mask

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


def _masked(pieces: Sequence[bytes | bytearray | memoryview], mask: bytes) -> Iterator[bytes]:
    """The pieces as if they had been masked as one."""
    at = 0
    for piece in pieces:
        turn = at % 4
        yield apply_mask(piece, mask[turn:] + mask[:turn])
        at += len(piece)


async def open_link(route: Route, path: str, headers: dict[str, str], receiver: Receiver, *, max_size: int) -> Link:
    """Connects to ``path`` along ``route``.

    Raises OSError, TimeoutError or ``websockets.exceptions.InvalidHandshake``.
    """

    def create(protocol: ClientProtocol, **options: Any) -> Link:
        return Link(protocol, receiver=receiver, max_message=max_size, **options)

    options: dict[str, Any] = {}
    if route.ssl is not None:
        options["ssl"] = route.ssl
    if route.sock is not None:
        options["sock"] = route.sock
    if route.unix_socket is not None:
        options |= {"unix": True, "path": route.unix_socket}
    if not route.through_proxy:
        options["proxy"] = None
    link = await connect(
        route.url + path,
        additional_headers={**route.headers, **headers},
        compression=None,
        logger=_library_log,
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

"""The engine's end of the websocket: an accepted socket from the server, bytes in, frames to a session.

The server has read and checked the HTTP request; its bytes are replayed here into the sans-IO protocol of
``websockets``, which answers the handshake, pings and closing. Data goes straight from the socket's callback to the
session, with no queue or task between, and past that protocol.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from websockets.frames import DATA_OPCODES, CloseCode, Frame, apply_mask  # type: ignore[attr-defined]  # in C
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from meshgate_wire.websocket import FrameReader, binary_header

log = logging.getLogger(__name__)

SILENCE = 60.0  # seconds; the client pings every 15
MAX_MESSAGE = 8 * 2**20
JOINED = 16 * 1024  # smaller messages are joined, which is cheaper than sending their pieces


class Receiver(Protocol):
    """What a link feeds; all calls come from the loop."""

    def link_open(self, link: Link) -> None: ...

    def link_data(self, link: Link, data: bytes | bytearray | memoryview) -> None: ...

    def link_writable(self, link: Link) -> None: ...

    def link_closed(self, link: Link, reason: str) -> None: ...


class Link(asyncio.Protocol):
    """One connection. ``write`` sends one binary message; ``buffered`` is what the kernel has not taken yet."""

    def __init__(self, receiver: Receiver, head: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._receiver, self._head, self._loop = receiver, head, loop
        self._protocol = ServerProtocol(max_size=MAX_MESSAGE)
        self._reader = FrameReader(MAX_MESSAGE, apply_mask)
        self._transport: asyncio.Transport | None = None
        self._open = False
        self._reason = "the connection was cut"
        self._heard = loop.time()
        self._watch: asyncio.TimerHandle | None = None

    # --- the transport of the wire's pump ---------------------------------------------------------------

    def write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._protocol.state is not State.OPEN or self._transport is None:
            return
        size = sum(map(len, pieces))
        if size < JOINED:
            self._transport.write(b"".join((binary_header(size), *pieces)))
        else:
            self._transport.writelines((binary_header(size), *pieces))

    def buffered(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay, callback)

    def close(self, code: CloseCode, reason: str) -> None:
        """Ends the connection, telling the peer why. The receiver hears ``link_closed`` when it is gone."""
        self._reason = reason
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason[:120])
            self._flush()
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it
        transport = self._transport
        transport.set_write_buffer_limits(high=256 * 1024, low=64 * 1024)
        self._understand(self._head)
        self._watch = self._loop.call_later(SILENCE, self._check_silence)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        for frame, other in self._reader.feed(data):
            if other:
                self._understand(frame)
            elif self._protocol.state is State.OPEN:
                self._receiver.link_data(self, frame)

    def _understand(self, data: bytes) -> None:
        """What is no data message: the handshake, control frames, and what goes wrong."""
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._protocol.accept(event))
                self._flush()
                if self._protocol.state is State.OPEN:
                    self._open = True
                    self._receiver.link_open(self)
            elif isinstance(event, Frame) and event.opcode in DATA_OPCODES:
                self.close(CloseCode.UNSUPPORTED_DATA, "a websocket message that is text or in fragments")
                return
        self._flush()

    def _flush(self) -> None:
        assert self._transport is not None
        for chunk in self._protocol.data_to_send():
            if chunk:
                self._transport.write(chunk)
            else:
                self._transport.close()

    def resume_writing(self) -> None:
        if self._open:
            self._receiver.link_writable(self)

    def eof_received(self) -> None:
        self._protocol.receive_eof()

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if error is not None:
            self._reason = str(error)
        elif self._protocol.handshake_exc is not None:
            self._reason = str(self._protocol.handshake_exc)
        if self._open:
            self._open = False
            self._receiver.link_closed(self, self._reason)

    def _check_silence(self) -> None:
        quiet = self._loop.time() - self._heard
        if quiet >= SILENCE and self._transport is not None:
            self._reason = f"nothing was heard for {quiet:.0f} s"
            self._transport.abort()
            return
        self._watch = self._loop.call_later(SILENCE - quiet, self._check_silence)


async def open_link(receiver: Receiver, connection: socket.socket, head: bytes) -> Link:
    """Serves the websocket on ``connection``, whose first bytes ``head`` were already read."""
    loop = asyncio.get_running_loop()
    _, link = await loop.connect_accepted_socket(lambda: Link(receiver, head, loop), connection)
    return link

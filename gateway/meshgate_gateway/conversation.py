"""An accepted socket spoken to from inside the server: a websocket of text messages, or a relay to another gateway.

The server reads only the head of a request; what is done with the rest is done here. These are rare and small
next to sessions, which engines hold.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import State
from websockets.server import ServerProtocol

from meshgate_gateway.http import Request

__all__ = ["Conversation", "relay"]

T = TypeVar("T")
MAX_MESSAGE = 1 << 20
CONNECT_TIMEOUT = 5.0
SEND_TIMEOUT = 10.0
LINGER = 2.0
_READ = 1 << 17


class Conversation:
    """A websocket of whole text messages. Owns the socket; an async context manager that closes it.

    ``said_goodbye``: the peer has closed it in order, rather than been cut off.
    """

    def __init__(self, connection: socket.socket, head: bytes) -> None:
        connection.setblocking(False)
        self._socket, self._head = connection, head
        self._protocol = ServerProtocol(max_size=MAX_MESSAGE)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._over = False
        self.said_goodbye = False

    async def __aenter__(self) -> Self:
        self._protocol.receive_data(self._head)
        for event in self._protocol.events_received():
            if isinstance(event, Handshake):
                self._protocol.send_response(self._protocol.accept(event))
        await self._flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
            await self._flush()
        # A socket that is closed with something unread resets the connection, and some port-forwards end with that.
        with suppress(OSError, asyncio.TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(_read_to_the_end(self._socket), LINGER)
        self._socket.close()

    async def receive(self) -> str | None:
        """The next message; None when there is none to come."""
        while not self._over:
            try:
                data = await self._loop.sock_recv(self._socket, _READ)
            except OSError:
                data = b""
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
                self._over = True
            for event in self._protocol.events_received():
                if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin:
                    return bytes(event.data).decode(errors="replace")
                if isinstance(event, Frame) and event.opcode not in (Opcode.PING, Opcode.PONG):
                    self._over = True
                    self.said_goodbye = event.opcode is Opcode.CLOSE
            await self._flush()
        return None

    async def wait_over(self) -> None:
        """Returns when the peer has left. Until then its pings are answered, and what it says is passed over."""
        while await self.receive() is not None:
            continue

    async def meanwhile(self, work: Awaitable[T]) -> T:
        """What ``work`` comes to, while the peer's pings are answered; it goes on when the peer leaves."""
        answering = asyncio.create_task(self.wait_over())
        try:
            return await work
        finally:
            answering.cancel()

    async def send(self, text: str) -> bool:
        """Whether the peer was still there to be sent it, and took it in time."""
        if self._over or self._protocol.state is not State.OPEN:
            return False
        self._protocol.send_text(text.encode())
        return await self._flush()

    async def _flush(self) -> bool:
        async with self._sending:
            try:
                for data in self._protocol.data_to_send():
                    if data:
                        await asyncio.wait_for(self._loop.sock_sendall(self._socket, data), SEND_TIMEOUT)
            except (OSError, asyncio.TimeoutError):
                self._over = True
        return not self._over


async def relay(connection: socket.socket, request: Request, path: str, host: str, port: int) -> None:
    """Sends ``request``, for ``path``, to another server and passes everything on, both ways, until either ends."""
    loop = asyncio.get_running_loop()
    with connection, socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as there:
        connection.setblocking(False)
        there.setblocking(False)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(loop.sock_connect(there, (host, port)), CONNECT_TIMEOUT)
            await loop.sock_sendall(there, _head(request, path))
            ways = [asyncio.create_task(_pass_on(*ends)) for ends in ((connection, there), (there, connection))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(ways, timeout=LINGER)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)


async def _pass_on(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, _READ):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


async def _read_to_the_end(source: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(source, _READ):
        continue


def _head(request: Request, path: str) -> bytes:
    """The head as it was read, for another path, with the credentials that ``Request.head`` leaves out."""
    first, _, rest = request.head.partition(b"\r\n")
    method, _, version = first.split(b" ", 2)
    credentials = request.header("Authorization")
    added = f"Authorization: {credentials}\r\n".encode("latin-1") if credentials is not None else b""
    return b" ".join((method, path.encode("latin-1"), version)) + b"\r\n" + added + rest

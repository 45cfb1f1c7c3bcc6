"""What an accepted socket becomes besides a session: a websocket of text messages.

Only the provisioning service uses it, for a few small messages per job. The websockets of sessions belong to the
engines.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import async_timeout
from typing_extensions import Self
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import Event, State
from websockets.server import ServerProtocol

from meshgate_wire.proof import ANY_GATEWAY, PROOF_HEADER, Prover

T = TypeVar("T")
MAX_MESSAGE = 1 << 20
SEND_TIMEOUT = 10.0
LINGER = 2.0
_READ_SIZE = 1 << 17


class TextWebSocket:
    """A websocket of unfragmented text messages. An async context manager that owns and closes the socket.

    ``prover`` proves to the peer that a gateway completed the handshake. ``closed_by_peer``: the peer completed the
    closing handshake, as opposed to a connection that was cut.
    """

    def __init__(self, connection: socket.socket, head: bytes, prover: Prover | None = None) -> None:
        connection.setblocking(False)
        self._socket, self._head, self._prover = connection, head, prover
        self._protocol = ServerProtocol(max_size=MAX_MESSAGE)
        self._loop = asyncio.get_running_loop()
        self._send_lock = asyncio.Lock()
        self._events: deque[Event] = deque()  # those after a message that receive() returned
        self._ended = False
        self.closed_by_peer = False

    async def __aenter__(self) -> Self:
        self._protocol.receive_data(self._head)
        for event in self._protocol.events_received():
            if isinstance(event, Handshake):
                response = self._protocol.accept(event)
                if self._prover is not None:
                    body = bytes(response.body or b"")
                    response.headers[PROOF_HEADER] = self._prover.prove(ANY_GATEWAY, response.status_code, body)
                self._protocol.send_response(response)
        await self._flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
            await self._flush()
        # Closing a socket with unread data resets the connection, and a reset terminates some port-forwards.
        with suppress(OSError, asyncio.TimeoutError):
            self._socket.shutdown(socket.SHUT_WR)
            async with async_timeout.timeout(LINGER):
                await _drain(self._socket)
        self._socket.close()

    async def receive(self) -> str | None:
        """The next message; None once the connection has ended."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin and not self._ended:
                    return bytes(event.data).decode(errors="replace")
                if isinstance(event, Frame) and event.opcode not in (Opcode.PING, Opcode.PONG):
                    self._ended = True
                    self.closed_by_peer = event.opcode is Opcode.CLOSE
            await self._flush()
            if self._ended:
                return None
            try:
                data = await self._loop.sock_recv(self._socket, _READ_SIZE)
            except OSError:
                data = b""
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
                self._ended = True
            self._events.extend(self._protocol.events_received())

    async def wait_closed(self) -> None:
        """Returns when the connection has ended. Until then, answers pings and discards messages."""
        while await self.receive() is not None:
            continue

    async def answer_pings_during(self, work: Awaitable[T]) -> T:
        """Awaits ``work`` and answers pings meanwhile. ``work`` continues if the peer disconnects."""
        answering = asyncio.create_task(self.wait_closed())
        try:
            return await work
        finally:
            answering.cancel()

    async def send(self, text: str) -> bool:
        """Sends a message. Returns False if the connection has ended or the peer does not read in time."""
        if self._ended or self._protocol.state is not State.OPEN:
            return False
        self._protocol.send_text(text.encode())
        return await self._flush()

    async def _flush(self) -> bool:
        async with self._send_lock:
            try:
                for data in self._protocol.data_to_send():
                    if data:
                        async with async_timeout.timeout(SEND_TIMEOUT):
                            await self._loop.sock_sendall(self._socket, data)
            except (OSError, asyncio.TimeoutError):
                self._ended = True
        return not self._ended


async def _drain(source: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(source, _READ_SIZE):
        continue

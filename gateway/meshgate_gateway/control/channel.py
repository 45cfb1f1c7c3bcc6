"""One end of the control channel: JSON messages, one per datagram, with file descriptors attached.

The server uses it to hand an authenticated connection to an engine: it sends the socket itself and never reads what
follows the request head. Messages keep their order and boundaries. When one end exits, even by SIGKILL, the other end
notices at once.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence

from meshgate_gateway.control.messages import ControlMessage, parse_message

MAX_MESSAGE = 160 * 1024  # the kernel's default socket buffer holds at least this much
MAX_HOSTS_PER_MESSAGE = 256
RIGHTS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # processes started by user code must not inherit a connection


def control_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel: one for a ControlChannel here, one for the process to start."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ControlChannel:
    """One end of the channel, on the running event loop. Owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._peer_gone = False

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> bool:
        """Sends the message, in order, as soon as the kernel accepts it. Never blocks.

        Returns False if the peer is gone; the message is then dropped. The caller keeps the descriptors and may close
        them on return.
        """
        data = message.model_dump_json().encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a control message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}")
        if self._peer_gone:
            return False
        if self._unsent:
            self._unsent.append((data, _duplicate(descriptors)))
            return True
        try:
            self._send(data, descriptors)
        except BlockingIOError:
            self._unsent.append((data, _duplicate(descriptors)))
            self._loop.add_writer(self._socket.fileno(), self._flush)
        except OSError:  # reset or broken pipe: the peer is gone
            self._peer_gone = True
        return not self._peer_gone

    async def receive(self) -> tuple[ControlMessage, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None if the peer is gone.

        Raises ValueError for an invalid message. Cancellation loses no message.
        """
        while True:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(MAX_MESSAGE, RIGHTS_SPACE, CLOSE_ON_EXEC)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError:
                return None
            if not data:
                return None
            descriptors = _descriptors(ancillary)
            try:
                return _parse(data, flags), descriptors
            except ValueError:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Closes the socket, which the peer notices. Idempotent. Must not be called while ``receive`` waits."""
        if not self.closed:
            self._drop_unsent()
            self._socket.close()
        self._peer_gone = True

    async def _readable(self) -> None:
        waiter = self._loop.create_future()
        number = self._socket.fileno()
        self._loop.add_reader(number, _wake, waiter)
        try:
            await waiter
        finally:
            self._loop.remove_reader(number)

    def _flush(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                self._send(data, descriptors)
            except BlockingIOError:
                return
            except OSError:
                self._peer_gone = True
                break
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        self._drop_unsent()

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([data], rights)

    def _drop_unsent(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        while self._unsent:
            for descriptor in self._unsent.popleft()[1]:
                os.close(descriptor)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return received.tolist()


def _parse(data: bytes, flags: int) -> ControlMessage:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("a control message exceeds its limits")
    return parse_message(data)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _duplicate(descriptors: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.dup(descriptor) for descriptor in descriptors)

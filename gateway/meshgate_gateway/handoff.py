"""The channel between the server and one engine: JSON messages, one to a datagram, with descriptors beside them.

It is how an authenticated connection changes hands: the server sends the socket itself and never sees the bytes
that follow. Messages keep their order and their bounds; an end that goes away is seen at once by the other, even
by SIGKILL. The models say all that the two may tell each other.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from meshgate_wire.messages import Host

__all__ = [
    "Assign",
    "Connected",
    "Connection",
    "ControlChannel",
    "ControlMessage",
    "Disconnected",
    "End",
    "Ended",
    "HostBack",
    "HostLost",
    "HostsReply",
    "HostsRequest",
    "Ready",
    "control_pair",
]

MAX_MESSAGE = 160 * 1024  # the kernel keeps at least this much for us
HOSTS_IN_A_MESSAGE = 256
RIGHTS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # what user code starts must not inherit a connection


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# --- server to engine -------------------------------------------------------------------------------------


class Assign(_Model):
    """The engine, started ahead, now serves ``session``, which outlives its connection by ``lease`` seconds."""

    type: Literal["assign"] = "assign"
    session: str
    lease: float


class Connection(_Model):
    """One descriptor comes along: an authenticated connection of this session, in place of any before.

    ``head`` is the request as it was read, as Latin-1, but for the credentials.
    """

    type: Literal["connection"] = "connection"
    head: str


class HostsReply(_Model):
    """Where the hosts of ``mesh`` are, in rank order; or why there are none to be had. ``more``: others follow."""

    type: Literal["hosts"] = "hosts"
    mesh: str
    hosts: tuple[Host, ...] = ()
    error: str | None = None
    more: bool = False


class HostLost(_Model):
    """A host that was told by HostsReply has ended, and why; ``host`` is its name. ``returns``: another may come in its
    place."""

    type: Literal["host_lost"] = "host_lost"
    mesh: str
    host: str
    reason: str
    returns: bool = False


class HostBack(_Model):
    """In the place of a host that was lost, ``rank`` of its mesh, there is one again, perhaps under another name."""

    type: Literal["host_back"] = "host_back"
    mesh: str
    rank: int
    host: Host


class End(_Model):
    """Stop the meshes, say Ended and exit with 0."""

    type: Literal["end"] = "end"
    reason: str


# --- engine to server -------------------------------------------------------------------------------------


class Ready(_Model):
    """Monarch is loaded and the loop runs."""

    type: Literal["ready"] = "ready"


class HostsRequest(_Model):
    """Where are the hosts of ``mesh``? Answered by HostsReply."""

    type: Literal["ask_hosts"] = "ask_hosts"
    mesh: str


class Connected(_Model):
    type: Literal["connected"] = "connected"


class Disconnected(_Model):
    type: Literal["disconnected"] = "disconnected"


class Ended(_Model):
    """The session is over in good order: its meshes are stopped and the exit follows."""

    type: Literal["ended"] = "ended"
    reason: str


ControlMessage: TypeAlias = (
    Assign
    | Connection
    | HostsReply
    | HostLost
    | HostBack
    | End
    | Ready
    | HostsRequest
    | Connected
    | Disconnected
    | Ended
)
_messages: TypeAdapter[ControlMessage] = TypeAdapter(Annotated[ControlMessage, Field(discriminator="type")])


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel; one is for ControlChannel, the other for the process to be started."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ControlChannel:
    """One end of the channel, on the running loop. Owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._gone = False

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> bool:
        """Sends now, or as soon as the kernel takes it, and in order. Never blocks.

        Returns False when the peer is gone: the message is dropped. The descriptors stay the caller's, who may
        close them on return.
        """
        data = message.model_dump_json().encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a control message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE}")
        if self._gone:
            return False
        if self._unsent:
            self._unsent.append((data, _duplicated(descriptors)))
            return True
        try:
            self._send(data, descriptors)
        except BlockingIOError:
            self._unsent.append((data, _duplicated(descriptors)))
            self._loop.add_writer(self._socket.fileno(), self._flush)
        except OSError:  # reset or broken pipe: the peer is gone
            self._gone = True
        return not self._gone

    async def receive(self) -> tuple[ControlMessage, list[int]] | None:
        """The next message with its descriptors, which are the caller's to close; None when the peer is gone.

        Raises ValidationError (a ValueError) for what is no message. Cancelling loses nothing.
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

    def close(self) -> None:
        """The peer sees it as the end. Idempotent; not to be called while receive() waits."""
        if self._socket.fileno() >= 0:
            self._forget_unsent()
            self._socket.close()
        self._gone = True

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
                self._gone = True
                break
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        self._forget_unsent()

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([data], rights)

    def _forget_unsent(self) -> None:
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
    return _messages.validate_json(data)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _duplicated(descriptors: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.dup(descriptor) for descriptor in descriptors)

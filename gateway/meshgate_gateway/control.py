"""The control channel between the server and an engine process: JSON messages, one per datagram, with file descriptors.

Both processes use this module, which imports neither of them; it carries no user data. The server uses the channel to
hand an authenticated connection to an engine: it sends the socket itself and never reads what follows the request head.
Messages keep their order and boundaries. When one end exits, even by SIGKILL, the other end notices at once.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from meshgate_wire.fields import Host, shorten

MAX_REASON = 16_384  # characters; JSON takes up to six bytes for one, and a message may have 160 KiB

# Upper bounds of histogram buckets, in seconds. A call takes a millisecond or a training step; a save, a tenth second.
CALL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SYNC_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Outcome: TypeAlias = Literal["ok", "failed"]
MAX_MESSAGE = 160 * 1024  # the kernel's default socket buffer holds at least this much
MAX_HOSTS_PER_MESSAGE = 256
RIGHTS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # processes started by user code must not inherit a connection


class Samples(BaseModel):
    """Durations as counts per bucket; the last bucket has those above all bounds. ``seconds`` is their sum."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    buckets: tuple[int, ...] = ()
    seconds: float = 0.0


class EngineCounts(BaseModel):
    """``calls`` by outcome, with the durations of those that waited for replies; ``casts`` are calls without replies.
    ``syncs``: durations from a version's offer to the last host. Bytes are those of the client's connections."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["counts"] = "counts"
    calls: dict[Outcome, int] = {}
    call_times: Samples = Samples()
    casts: int = 0
    sync_times: Samples = Samples()
    bytes_received: int = 0
    bytes_sent: int = 0
    lines: int = 0


def _shorten(reason: object) -> object:
    return shorten(reason, MAX_REASON) if isinstance(reason, str) else reason


Reason: TypeAlias = Annotated[str, BeforeValidator(_shorten)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)  # a process sends few of the messages


# --- server to engine -------------------------------------------------------------------------------------


class AssignSession(_Model):
    """Assigns ``session`` to a prestarted engine. The session outlives its connection by ``lease`` seconds."""

    type: Literal["assign"] = "assign"
    session: str
    lease: float


class NewConnection(_Model):
    """Passes the descriptor of an authenticated connection, which replaces any earlier one of the session.

    ``head`` is the HTTP request head, decoded as Latin-1, without the credentials. ``proof_key``, unless it is empty,
    proves to the client that the response is that of ``gateway``. ``run``: that whose secret the client has presented.
    """

    type: Literal["connection"] = "connection"
    head: str
    proof_key: str = ""
    gateway: str = ""
    run: str = ""


class RunEnded(_Model):
    """The processes of ``run`` have ended. The engine must close the connections that the run's secret has opened, and
    end its session if the last one was one of them, unless it is detached."""

    type: Literal["run_ended"] = "run_ended"
    run: str


class HostsReply(_Model):
    """The hosts of ``mesh`` in rank order, or the reason that there are none. ``more``: further messages follow."""

    type: Literal["hosts"] = "hosts"
    mesh: str
    hosts: tuple[Host, ...] = ()
    error: Reason | None = None
    more: bool = False


class HostLost(_Model):
    """A host of an earlier HostsReply, or of the next one, has exited. ``returns``: a replacement may follow.
    ``removed``: the mesh has been scaled, and the host is no longer part of it. ``last``: the job has no other host,
    and none follows."""

    type: Literal["host_lost"] = "host_lost"
    mesh: str
    host: str
    reason: Reason
    returns: bool = False
    removed: bool = False
    last: bool = False


class HostRestored(_Model):
    """A host has replaced the lost one at ``rank``, possibly under another name."""

    type: Literal["host_back"] = "host_back"
    mesh: str
    rank: int
    host: Host


class HostEnding(_Model):
    """The cluster ends a host from an earlier HostsReply in ``seconds``; HostLost follows. A new server repeats it."""

    type: Literal["host_ending"] = "host_ending"
    host: str
    reason: Reason
    seconds: float


Asked: TypeAlias = Literal["status", "session", "output"]


class Inspect(_Model):
    """Asks what the engine knows (``status``), for an entry of the list of sessions (``session``), or for the lines
    printed after number ``after`` (``output``)."""

    type: Literal["inspect"] = "inspect"
    request: int
    what: Asked
    after: int = 0


class JobEnding(_Model):
    """The cluster ends the job, and all its hosts, in ``seconds``; None: not any more. ``notice`` is a line about that
    for the session's user."""

    type: Literal["job_ending"] = "job_ending"
    reason: Reason = ""
    seconds: float | None = None
    notice: Reason = ""


class EndSession(_Model):
    """The engine must stop the session's meshes, send SessionEnded and exit with status 0."""

    type: Literal["end"] = "end"
    reason: Reason


class ReportState(_Model):
    """Another server has taken over, which may have missed messages of the engine, as the engine may have missed parts
    of a reply. The engine repeats its pending requests and sends SessionState."""

    type: Literal["report_state"] = "report_state"


# --- engine to server -------------------------------------------------------------------------------------


class HostsRequest(_Model):
    """Requests the hosts of ``mesh``. The server answers with HostsReply."""

    type: Literal["ask_hosts"] = "ask_hosts"
    mesh: str


class Inspected(_Model):
    """A part of the answer to Inspect, which is JSON. ``more``: others follow."""

    type: Literal["inspected"] = "inspected"
    request: int
    body: str
    more: bool = False


class ClientConnected(_Model):
    """``run``: that whose secret the client has presented."""

    type: Literal["connected"] = "connected"
    run: str = ""


class ClientDisconnected(_Model):
    """``silence``: for how many seconds nothing had arrived when the connection ended. ``detached``: the session waits
    for another client however its connection ended."""

    type: Literal["disconnected"] = "disconnected"
    silence: float = 0.0
    detached: bool = False


class SessionNamed(_Model):
    """The session is detached, and its next holder finds it by ``name``."""

    type: Literal["named"] = "named"
    name: str


class SessionState(_Model):
    """Whether a client is connected; otherwise for how many seconds none has been, and ``silence`` as above."""

    type: Literal["state"] = "state"
    connected: bool
    disconnected_for: float = 0.0
    silence: float = 0.0
    detached: bool = False


class ConnectionRefused(_Model):
    """The engine has answered a connection itself, because another client holds the session."""

    type: Literal["refused"] = "refused"


class SessionEnded(_Model):
    """The session ended in order: its meshes are stopped and the engine exits next."""

    type: Literal["ended"] = "ended"
    reason: Reason


ControlMessage: TypeAlias = (
    AssignSession
    | NewConnection
    | RunEnded
    | HostsReply
    | HostLost
    | HostRestored
    | HostEnding
    | Inspect
    | JobEnding
    | EndSession
    | ReportState
    | EngineCounts
    | HostsRequest
    | Inspected
    | ClientConnected
    | ClientDisconnected
    | SessionNamed
    | SessionState
    | ConnectionRefused
    | SessionEnded
)
_messages: TypeAdapter[ControlMessage] = TypeAdapter(Annotated[ControlMessage, Field(discriminator="type")])


def parse_message(data: bytes) -> ControlMessage:
    """Raises ``pydantic.ValidationError`` (a ValueError) for an invalid message."""
    return _messages.validate_json(data)


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

"""Says with a reply how much this process had printed before it, so that the engine reads that first. By value.

Over a network, what a process prints and what it replies take different connections, and the reply may arrive first. So
the rank in a reply to the engine also carries a mark: for each output stream, the bytes written so far. The
kernel counts them, and so also what C code, forks, other threads and child processes write, wherever descriptor 1 leads
meanwhile. A reply has a mark if it, or one in the second before it, found that something was printed; to find that out
takes a system call for each stream. Several have one because those of concurrent endpoints and actors of this process
may arrive in another order, and because replies to calls that no program waits for are marked, too. On a unix socket,
what was written can be read at once, and no reply has a mark.
"""

from __future__ import annotations

import contextvars
import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Sequence
from typing import Any

from meshgate_gateway.engine.on_worker.large_messages import call_in  # by value too

# A rank with a mark: the highest bit, two positions, the rank. A rank above these bits has no mark.
MARKED = 1 << 63
RANK_BITS = 17
POSITION_BITS = 23  # of a position, which is bytes modulo 8 MiB
POSITIONS = 1 << POSITION_BITS
MAX_UNDERWAY = POSITIONS // 2 - 1  # bytes between what has arrived and a position
RECENT = 1.0  # seconds; a result waits less for output
# In Linux's struct tcp_info:
ACKNOWLEDGED = "=120xQ"  # bytes, and one for the SYN
SENT, UNSENT = slice(200, 208), slice(144, 148)  # bytes; they change with each write


class WrittenBytes:
    """How much was written to a TCP connection, by whichever process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def state(self) -> bytes:
        """Changes whenever something is written, and with retransmissions; empty if the kernel does not tell."""
        try:
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT.stop)
        except OSError:  # a program may close what it does not know
            return b""
        return info[SENT] + info[UNSENT]

    def position(self) -> int:
        queued = before = 0
        acknowledged = self._acknowledged()
        for _ in range(8):  # until no acknowledgement arrives in between; too little is better than too much
            queued = struct.unpack("i", fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            before, acknowledged = acknowledged, self._acknowledged()
            if before == acknowledged:
                break
        return before + min(queued, MAX_UNDERWAY) - 1

    def _acknowledged(self) -> int:
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, struct.calcsize(ACKNOWLEDGED))
        return int(struct.unpack(ACKNOWLEDGED, info)[0])


class OutputMarks:
    """Marks the replies of this process. ``connections``: of standard output and error."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        tcp = hasattr(socket, "TCP_INFO") and all(each.family != socket.AF_UNIX for each in connections)
        self._streams = [WrittenBytes(each) for each in connections] if tcp else []
        self._states = [stream.state() for stream in self._streams]  # at the last reply
        self._changed = float("-inf")  # when a reply last found that they had changed
        # In a task of a concurrent endpoint: the port of the engine's that it replies to.
        self._port: contextvars.ContextVar[Any] = contextvars.ContextVar("meshgate_port", default=None)

    def know_concurrent_endpoints(self) -> None:
        """They reply from tasks of their own, where the call that they answer is no longer to be seen."""
        if not self._streams:
            return
        from monarch._src.actor import concurrent  # noqa: PLC0415 - resolved on the worker

        spawn_now = concurrent._spawn_task

        def spawn_task(instance: Any, port: Any, *args: Any, **kwargs: Any) -> None:
            token = self._port.set(port if replies_to_the_engine(port, sys._getframe(1)) else None)
            try:
                spawn_now(instance, port, *args, **kwargs)
            finally:
                self._port.reset(token)

        concurrent._spawn_task = spawn_task

    def rank(self, port: Any, frame: Any) -> int | None:
        """The rank for a reply to ``port``, with a mark if it has one. ``frame`` is that of the code that sends it."""
        rank: int | None = port._rank
        if self._streams and self._printed() and (self._port.get() is port or replies_to_the_engine(port, frame)):
            return self._marked(rank)
        return rank

    def rank_for_engine(self, port: Any) -> int | None:
        """As ``rank``, of a port that is known to be the engine's."""
        rank: int | None = port._rank
        return self._marked(rank) if self._streams and self._printed() else rank

    def _printed(self) -> bool:
        """Whether something was printed within the last second."""
        states = [stream.state() for stream in self._streams]
        now = time.monotonic()
        if states != self._states:
            self._states, self._changed = states, now
        return now - self._changed <= RECENT

    def _marked(self, rank: int | None) -> int | None:
        if rank is None:
            return None
        try:
            return with_mark(rank, [stream.position() for stream in self._streams])
        except OSError:
            return rank


def replies_to_the_engine(port: Any, frame: Any) -> bool:
    """Whether ``port`` is that of the call which runs in ``frame``, and the call is the engine's."""
    call = call_in(frame) or {}
    ports = (call.get("response_port"), *call.get("args", ())[:1])  # the latter if the port is explicit
    return call.get("correlation_id", 0) is None and any(each is port for each in ports)


def with_mark(rank: int, positions: Sequence[int]) -> int:
    """``rank`` with the positions of standard output and error, if there is space for them."""
    if rank >> RANK_BITS:
        return rank
    out, err = (position % POSITIONS for position in positions)
    return MARKED | err << (RANK_BITS + POSITION_BITS) | out << RANK_BITS | rank


def without_mark(rank: int) -> tuple[int, tuple[int, int] | None]:
    """The rank of a reply, and its mark, if it has one: the positions of standard output and error."""
    if not rank & MARKED:
        return rank, None
    mark = (rank ^ MARKED) >> RANK_BITS
    return rank % (1 << RANK_BITS), (mark % POSITIONS, mark >> POSITION_BITS)


def total(position: int, near: int) -> int:
    """The whole number of bytes for a position. It is within 4 MiB of ``near``."""
    distance = (position - near) % POSITIONS
    return near + distance - (POSITIONS if distance >= POSITIONS // 2 else 0)

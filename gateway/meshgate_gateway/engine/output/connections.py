"""The output connections of worker processes: how much of what they wrote has been read, and split into lines.

A result waits until what its ranks have printed before it is read. So the engine asks the kernel what has arrived, and
counts what it has handled: one system call for a mesh that prints nothing. Over a network, where output may arrive
after a reply, the reply says how much there is.
"""

from __future__ import annotations

import asyncio
import fcntl
import selectors
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field

from meshgate_gateway.engine.on_worker.output_marks import total
from meshgate_gateway.engine.output.lines import LineSplitter


class WorkerHello(BaseModel):
    """The first line that a worker process sends on each connection."""

    secret: str
    mesh: int
    rank: int
    pid: int
    stream: Literal["stdout", "stderr", "watch", "controllers", "ports", "large", "kept", "references"]
    nbytes: int = Field(default=0, ge=0)  # of a large message
    reply: bool = False  # whether that is the result of a call
    kept: bool = False  # whether the client fetches that result with ``KeptMesh.get()``
    object: int = 0  # of a kept value, and the base rank that keeps it
    at: int = 0


class CountingReader(asyncio.StreamReader):
    """Counts what has been read from the socket. ``fed`` is called after each read."""

    received = 0
    fed: Callable[[], None] | None = None

    def feed_data(self, data: Any) -> None:
        self.received += len(data)
        if self.fed is not None:
            self.fed()
        super().feed_data(data)


@dataclass(eq=False, slots=True)
class OutputConnection:
    """The connection of one output stream of a process. Counts are of bytes since it was opened."""

    hello: WorkerHello
    reader: CountingReader
    descriptor: int
    handled: int  # of what was received, the part that has been split into lines
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # for so much to be handled
    splitter: LineSplitter = field(default_factory=LineSplitter)
    unfinished: asyncio.TimerHandle | None = None  # while the splitter has a line without an end
    label: tuple[str, str] = ("", "")  # names of the mesh and the host
    marked: int = 0  # that the process wrote at least, as a reply says
    missed: int = 0  # so much had been marked when a result was sent without it

    @property
    def settled(self) -> bool:
        """Whether all that a result would wait for is in lines that have ended."""
        return self.handled >= max(self.reader.received, self._expected()) and not self.splitter.pending

    def written(self) -> int:
        """How much the process has written, as far as a reply says so or it can be read here."""
        arrived = self.arrived()
        return self.handled if arrived is None else max(arrived, self._expected())

    def arrived(self) -> int | None:
        """How much can be read here, or has been; None: the connection is lost."""
        if self.reader.exception() is not None:
            return None  # its descriptor may be that of another connection
        try:
            (unread,) = struct.unpack("i", fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)))
        except (OSError, ValueError):  # the descriptor is closed; ValueError: it was already when this began
            return None
        return self.reader.received + int(unread)

    def _expected(self) -> int:
        """What a result waits for, whether it has arrived or not: nothing until output that came too late is here."""
        return self.marked if self.handled >= self.missed else 0

    def handle(self, count: int) -> None:
        self.handled += count
        if self.waiting:
            self._wake(self.handled)

    def ended(self) -> None:
        self._wake(None)

    def _wake(self, handled: int | None) -> None:
        waiting, self.waiting = self.waiting, []
        for written, wake in waiting:
            if handled is None or written <= handled:
                wake()
            else:
                self.waiting.append((written, wake))


class MeshOutput:
    """The output connections of one proc mesh. One system call of the ``selector`` finds those with output that is not
    read yet."""

    def __init__(self) -> None:
        # Those that are not settled.
        self.busy: dict[OutputConnection, None] = {}
        self._connected: set[OutputConnection] = set()
        self._newest: dict[tuple[int, str], OutputConnection] = {}  # by rank and stream
        self._seen: set[tuple[int, str]] = set()  # the keys of all that were ever here
        self.selector = selectors.DefaultSelector()

    def add(self, output: OutputConnection) -> None:
        if output.descriptor >= 0:  # otherwise the connection has been lost since it began
            if output.descriptor in self.selector.get_map():  # of a connection that was lost, and is not removed yet
                self.selector.unregister(output.descriptor)
            self.selector.register(output.descriptor, selectors.EVENT_READ, output)
        self._connected.add(output)
        self._newest[key := (output.hello.rank, output.hello.stream)] = output
        self._seen.add(key)
        output.reader.fed = lambda: self.busy.setdefault(output)
        if output.reader.received > output.handled:
            output.reader.fed()

    def remove(self, output: OutputConnection) -> bool:
        """Removes ``output``, even if adding it failed. Returns whether no other is left."""
        output.reader.fed = None
        self.busy.pop(output, None)
        self._connected.discard(output)
        if self._newest.get(key := (output.hello.rank, output.hello.stream)) is output:
            del self._newest[key]
        registered = self.selector.get_map().get(output.descriptor) if output.descriptor >= 0 else None
        if registered is not None and registered.data is output:
            self.selector.unregister(output.descriptor)
        if not self._connected:
            self.selector.close()
        return not self._connected

    def behind(self, readable: Sequence[tuple[selectors.SelectorKey, int]]) -> list[OutputConnection]:
        """The connections with output that is not in the lines so far. ``readable`` is from the ``selector``."""
        return list({**{key.data: None for key, _ in readable}, **self.busy})

    def mark(self, rank: int, positions: tuple[int, int]) -> bool:
        """A reply of this rank comes after that much of its output. Returns False until both of its connections have
        come: the caller repeats this then."""
        for stream, position in zip(("stdout", "stderr"), positions, strict=True):
            output = self._newest.get((rank, stream))
            arrived = output.arrived() if output is not None else None
            if output is not None and arrived is not None:
                output.marked = max(output.marked, total(position, arrived))
                if not output.settled:
                    self.busy.setdefault(output)
        return self._seen.issuperset({(rank, "stdout"), (rank, "stderr")})

    def miss(self, output: OutputConnection) -> None:
        """A result was sent before the output that was marked. No other one waits until that has arrived."""
        if output.handled < output.marked:
            output.missed = output.marked
        if output.settled:
            self.busy.pop(output, None)

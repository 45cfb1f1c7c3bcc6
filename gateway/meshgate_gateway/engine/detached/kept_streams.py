"""What a detached session keeps of its output and its channels: lines and messages that no holder has read.

Lines that were read are kept for a replay, up to a limit; unread ones are never dropped. If there is no space for more,
``full`` is true until the holder has read some: workers then block when they print, and ports are not read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshgate_gateway.engine.detached.spool import Blob, Spool
from meshgate_wire.messages import Output, OutputLine, PortMessage, stream_of

OUTPUT_MEMORY = 32 * 2**20
OUTPUT_DISK = 4 * 2**30
MAX_READ_BYTES = 64 * 2**20  # of lines that were read, kept for a replay
MAX_QUEUED_OUTPUT = 2 * 2**20  # bytes that wait on the wire, above which lines wait here
CHANNEL_MEMORY = 16 * 2**20
CHANNEL_DISK = int(os.environ.get("MESHGATE_CHANNEL_DISK") or 4 * 2**30)
MAX_QUEUED_MESSAGES = 4 * 2**20  # bytes of a channel that wait on the wire, above which messages wait here


@dataclass(slots=True, eq=False)
class _Lines:
    """Lines that were printed together. ``output`` is set if the spool had no space, and neither once dropped."""

    first: int
    last: int
    blob: Blob | None
    output: Output | None = None


class KeptOutput:
    """``send`` sends a message to the holder, ``queued`` is how many bytes of output wait to be sent."""

    def __init__(
        self, send: Callable[[Output], None], queued: Callable[[], int], *, spool: Spool | None = None
    ) -> None:
        self._send, self._queued = send, queued
        self._spool = spool or Spool(OUTPUT_MEMORY, OUTPUT_DISK, OUTPUT_MEMORY)
        self._read: deque[_Lines] = deque()  # kept for a replay
        self._unread: deque[_Lines] = deque()
        self._unsent: deque[_Lines] = deque()  # to this holder
        self._last = self._last_read = 0  # numbers of lines, from 1
        self._read_bytes = 0
        self._without_space = 0  # batches
        self._flowing = True  # False between a takeover and the new holder's Resume

    @property
    def full(self) -> bool:
        return self._without_space > 0

    @property
    def unread(self) -> int:
        """How many lines no holder has read."""
        return self._last - self._last_read

    @property
    def dropped(self) -> int:
        """How many lines at the start are no longer kept."""
        for batches in (self._read, self._unread):
            if batches:
                return batches[0].first - 1
        return self._last

    def add(self, lines: tuple[OutputLine, ...], *, read: bool = False) -> None:
        """Keeps lines and sends them if the wire has space. ``read``: the holder does not want to see them."""
        output = Output(first=self._last + 1, lines=lines)
        data = (output.model_dump_json().encode(),)
        blob = self._spool.put(data)
        while blob is None and self._drop_oldest():
            blob = self._spool.put(data)
        self._last += len(lines)
        batch = _Lines(output.first, self._last, blob, output if blob is None else None)
        self._without_space += blob is None
        self._unread.append(batch)
        if read:
            self.mark_read(batch.last)
        elif self._flowing and not self._unsent and self._queued() < MAX_QUEUED_OUTPUT:
            self._send(output)
        else:
            self._unsent.append(batch)

    def feed(self) -> None:
        """Sends what the holder has not received while the wire has space."""
        while self._flowing and self._unsent and self._queued() < MAX_QUEUED_OUTPUT:
            batch = self._unsent.popleft()
            if batch.output is not None:
                self._send(batch.output)
            elif batch.blob is not None:
                self._send(Output.model_validate_json(bytes(self._spool.get(batch.blob)[0])))

    def mark_read(self, last: int) -> None:
        """The holder has printed everything up to line ``last``."""
        while self._unread and self._unread[0].last <= last:
            batch = self._unread.popleft()
            self._last_read = batch.last
            self._read.append(batch)
            self._read_bytes += batch.blob.nbytes if batch.blob is not None else 0
        while (self._read_bytes > MAX_READ_BYTES or self._without_space) and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Drops the oldest batch that was read. Returns whether there was one."""
        if not self._read:
            return False
        batch = self._read.popleft()
        if batch.blob is None:
            self._without_space -= 1
        else:
            self._read_bytes -= batch.blob.nbytes
            self._spool.drop(batch.blob)
        batch.blob = batch.output = None
        return True

    def holder_changed(self) -> None:
        """Sends nothing until ``resume``."""
        self._flowing = False
        self._unsent.clear()

    def resume(self, *, replay: bool) -> None:
        """Sends the lines that no holder has read, or with ``replay`` all that are kept, then what follows."""
        self._unsent = deque([*self._read, *self._unread] if replay else self._unread)
        self._flowing = True
        self.feed()

    def close(self) -> None:
        for batches in (self._read, self._unread, self._unsent):
            batches.clear()
        self._spool.close()


@dataclass(slots=True, eq=False)
class _Message:
    """``header`` is shared by messages that differ in nothing but their number: it takes 600 bytes."""

    number: int
    header: PortMessage
    blob: Blob | None
    buffers: tuple[bytes | memoryview, ...] = ()  # if the spool had no space


@dataclass(slots=True, eq=False)
class _Channel:
    messages: deque[_Message] = field(default_factory=deque)  # that were not taken
    sent: int = 0  # of them, to this holder
    last: int = 0  # the number of the newest message
    headers: dict[tuple[int | None, bool], PortMessage] = field(default_factory=dict)  # by rank and whether it raises


class KeptChannels:
    """``send`` sends a message to the holder, and ``queued(stream)`` is how many bytes wait to be sent."""

    def __init__(
        self,
        send: Callable[[PortMessage, Sequence[bytes | memoryview], int], None],
        queued: Callable[[int], int],
        *,
        spool: Spool | None = None,
    ) -> None:
        self._send, self._queued = send, queued
        self._spool = spool or Spool(CHANNEL_MEMORY, CHANNEL_DISK, CHANNEL_MEMORY)
        self._channels: dict[int, _Channel] = {}
        self._without_space = 0
        self._flowing = True

    @property
    def full(self) -> bool:
        """Whether there is no space for more: the ports must not be read."""
        return self._without_space > 0

    def keep(self, header: PortMessage, buffers: Sequence[bytes | memoryview]) -> None:
        """Keeps a message until it is taken, and sends it if the wire has space."""
        channel = self._channels.setdefault(header.port, _Channel())
        blob = self._spool.put(buffers)
        if blob is None:
            self._without_space += 1
        channel.last += 1
        if not header.objects.objects:
            header = channel.headers.setdefault((header.rank, header.exception), header)
        channel.messages.append(_Message(channel.last, header, blob, tuple(buffers) if blob is None else ()))
        self._feed(header.port, channel)

    def feed(self) -> None:
        """Sends what the holder has not received while the wire has space."""
        for number, channel in self._channels.items():
            self._feed(number, channel)

    def _feed(self, number: int, channel: _Channel) -> None:
        stream = stream_of(number)
        while self._flowing and channel.sent < len(channel.messages) and self._queued(stream) < MAX_QUEUED_MESSAGES:
            kept = channel.messages[channel.sent]
            channel.sent += 1
            header = kept.header.model_copy(update={"number": kept.number})
            self._send(header, self._spool.get(kept.blob) if kept.blob is not None else kept.buffers, stream)

    def mark_taken(self, last: Mapping[int, int]) -> None:
        """The number of the last message of each channel that the holder has taken."""
        for number, taken in last.items():
            channel = self._channels.get(number)
            while channel is not None and channel.sent and channel.messages[0].number <= taken:
                channel.sent -= 1
                self._forget(channel.messages.popleft())

    def released(self, number: int) -> None:
        """The program has closed the channel."""
        channel = self._channels.pop(number, None)
        for kept in channel.messages if channel is not None else ():
            self._forget(kept)

    def _forget(self, kept: _Message) -> None:
        if kept.blob is not None:
            self._spool.drop(kept.blob)
        else:
            self._without_space -= 1

    def holder_changed(self) -> None:
        """Sends nothing until ``resume``."""
        self._flowing = False
        for channel in self._channels.values():
            channel.sent = 0

    def resume(self) -> None:
        """Sends what no holder has taken, then what follows."""
        self._flowing = True
        self.feed()

    def close(self) -> None:
        self._channels.clear()
        self._spool.close()

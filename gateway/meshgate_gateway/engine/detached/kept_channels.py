"""What was sent to the channels of a detached session and no holder has taken."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshgate_gateway.engine.detached.spool import Blob, Spool
from meshgate_wire.messages import PortMessage, stream_of

MEMORY = 16 * 2**20
DISK = int(os.environ.get("MESHGATE_CHANNEL_DISK") or 4 * 2**30)
MAX_QUEUED = 4 * 2**20  # bytes of a channel that wait on the wire, above which messages wait here


@dataclass(slots=True, eq=False)
class _Kept:
    """``header`` is shared by messages that differ in nothing but their number: it takes 600 bytes."""

    number: int
    header: PortMessage
    blob: Blob | None
    buffers: tuple[bytes | memoryview, ...] = ()  # if the spool had no space


@dataclass(slots=True, eq=False)
class _Channel:
    messages: deque[_Kept] = field(default_factory=deque)  # that were not taken
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
        self._spool = spool or Spool(MEMORY, DISK, MEMORY)
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
        channel.messages.append(_Kept(channel.last, header, blob, tuple(buffers) if blob is None else ()))
        self._feed(header.port, channel)

    def feed(self) -> None:
        """Sends what the holder has not received while the wire has space."""
        for number, channel in self._channels.items():
            self._feed(number, channel)

    def _feed(self, number: int, channel: _Channel) -> None:
        stream = stream_of(number)
        while self._flowing and channel.sent < len(channel.messages) and self._queued(stream) < MAX_QUEUED:
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

    def _forget(self, kept: _Kept) -> None:
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

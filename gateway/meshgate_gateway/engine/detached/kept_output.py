"""The output of a detached session: every line, from what was printed first that is kept to what no holder has read.

Lines that were read are kept for a replay, up to a limit; unread ones are never dropped. If there is no space for more,
``full`` is true until the holder has read some, and workers block when they print.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from meshgate_gateway.engine.detached.spool import Blob, Spool
from meshgate_wire.messages import Output, OutputLine

MEMORY = 32 * 2**20
DISK = 4 * 2**30
MAX_READ_BYTES = 64 * 2**20  # of lines that were read, kept for a replay
MAX_QUEUED = 2 * 2**20  # bytes that wait on the wire, above which lines wait here


@dataclass(slots=True, eq=False)
class _Batch:
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
        self._spool = spool or Spool(MEMORY, DISK, MEMORY)
        self._read: deque[_Batch] = deque()  # kept for a replay
        self._unread: deque[_Batch] = deque()
        self._unsent: deque[_Batch] = deque()  # to this holder
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
        batch = _Batch(output.first, self._last, blob, output if blob is None else None)
        self._without_space += blob is None
        self._unread.append(batch)
        if read:
            self.mark_read(batch.last)
        elif self._flowing and not self._unsent and self._queued() < MAX_QUEUED:
            self._send(output)
        else:
            self._unsent.append(batch)

    def feed(self) -> None:
        """Sends what the holder has not received while the wire has space."""
        while self._flowing and self._unsent and self._queued() < MAX_QUEUED:
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

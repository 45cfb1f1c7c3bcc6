"""What waits to be sent, and what goes next.

A message of up to ``small_message`` bytes is one frame, encoded when it is queued. A larger one goes in chunks.
Streams take turns, one frame each. Those whose next frame is a whole small message go first, until a chunk's
worth of them has gone; then a bulk stream has its turn: neither waits for more than about a chunk of the other.
A stream that has no credit stands aside and holds up nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import TypeAlias

from .errors import ProtocolError
from .frames import FIRST, FRAME_HEADER_BYTES, LAST, PeerLimits, encode_frame_header
from .limits import KIB, LEAST_WINDOW, Limits
from .retransmission import Frame

__all__ = ["Bulk", "Outbox", "coalesce"]

SMALL_PIECE = 4 * KIB


class Bulk:
    """A large message on its way out: its pieces, referred to and not copied, and how far it has gone."""

    __slots__ = ("_index", "_offset", "_pieces", "begun", "nbytes", "remaining")

    def __init__(self, pieces: list[bytes | memoryview], nbytes: int) -> None:
        self._pieces = pieces
        self._index = 0
        self._offset = 0
        self.begun = False
        self.nbytes = nbytes
        self.remaining = nbytes

    def take(self, nbytes: int) -> list[bytes | memoryview]:
        """The next ``nbytes``, as views."""
        taken: list[bytes | memoryview] = []
        self.remaining -= nbytes
        while nbytes:
            piece = self._pieces[self._index]
            part = memoryview(piece)[self._offset : self._offset + nbytes]
            taken.append(part)
            nbytes -= len(part)
            self._offset += len(part)
            if self._offset == len(piece):
                self._pieces[self._index] = b""  # its memory lives on in the frames alone
                self._index += 1
                self._offset = 0
        return taken


def coalesce(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes with neighbours below 4 KiB joined: a view of each would take more memory than it shows."""
    joined: list[bytes | memoryview] = []
    for small, run in groupby(pieces, key=lambda piece: len(piece) < SMALL_PIECE):
        if small:
            joined.append(b"".join(run))
        else:
            joined.extend(run)
    return [piece for piece in joined if piece]


Queued: TypeAlias = "bytes | Bulk"  # a whole frame, or a message to cut


class _Place(Enum):
    """Where a stream waits."""

    NOWHERE = 0  # nothing queued
    SMALL = 1
    BULK = 2
    CREDIT = 3  # for credit
    SLOT = 4  # for another large message to end


class _Stream:
    __slots__ = ("credit", "nbytes", "number", "place", "queue")

    def __init__(self, number: int, credit: int) -> None:
        self.number = number
        self.credit = credit
        self.queue: deque[Queued] = deque()
        self.nbytes = 0  # queued
        self.place = _Place.NOWHERE


class Outbox:
    """The queues of all streams.

    ``nbytes`` counts what has not been made into frames, frame headers aside; ``small_nbytes`` of that what goes as
    single frames, which large messages do not hold up.
    """

    __slots__ = (
        "_bulk", "_chunk", "_max_partial_bytes", "_max_partials", "_partial_bytes", "_partials", "_run", "_small",
        "_streams", "_turn", "_waiting", "_window", "nbytes", "small_nbytes",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.nbytes = self.small_nbytes = 0
        self._streams: dict[int, _Stream] = {}
        self._small: deque[_Stream] = deque()
        self._bulk: deque[_Stream] = deque()
        self._waiting: deque[_Stream] = deque()
        self._run = 0  # bytes of small frames since a bulk stream had its turn
        self._turn = self._chunk = limits.chunk
        # Until the peer's limits are known: what every peer allows, and no large message yet.
        self._window = LEAST_WINDOW
        self._max_partials = 0
        self._max_partial_bytes = 0
        self._partials = 0
        self._partial_bytes = 0

    @property
    def streams(self) -> int:
        return len(self._streams)

    def peer_allows(self, peer: PeerLimits) -> None:
        """The peer's limits, once."""
        more = peer.window - self._window
        self._window = peer.window
        self._chunk = min(self._chunk, peer.max_frame)
        self._max_partials = peer.max_partial_messages
        self._max_partial_bytes = peer.max_partial_bytes
        for stream in self._streams.values():
            stream.credit += more
            if stream.place is _Place.CREDIT:
                self._place(stream)
        self._admit_waiting()

    def queued_on(self, number: int) -> int:
        """Of ``nbytes``, those of one stream."""
        stream = self._streams.get(number)
        return 0 if stream is None else stream.nbytes

    def put_frame(self, number: int, frame: bytes) -> None:
        """Queues a whole small message, as the frame that it is."""
        nbytes = len(frame) - FRAME_HEADER_BYTES
        self.small_nbytes += nbytes
        self._put(number, frame, nbytes)

    def put_bulk(self, number: int, message: Bulk) -> None:
        self._put(number, message, message.nbytes)

    def _put(self, number: int, queued: Queued, nbytes: int) -> None:
        self.nbytes += nbytes
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = _Stream(number, self._window)
        stream.queue.append(queued)
        stream.nbytes += nbytes
        if stream.place is _Place.NOWHERE:
            self._place(stream)

    def grant(self, number: int, amount: int) -> None:
        """The peer lets ``amount`` more bytes go on a stream."""
        stream = self._streams.get(number)
        credit = amount + (self._window if stream is None else stream.credit)
        if credit > self._window or stream is None or not amount:
            raise ProtocolError(
                f"the peer grants {amount} bytes on stream {number}, which makes {credit} of a window of {self._window}"
            )
        stream.credit = credit
        if stream.place is _Place.CREDIT:
            self._place(stream)
        elif stream.place is _Place.NOWHERE and credit == self._window:
            del self._streams[number]

    def next_frame(self, room: int, *, at_least_one: bool) -> Frame | None:
        """The frame whose turn it is, if it has at most ``room`` bytes or ``at_least_one`` is asked for."""
        if self._small and (self._run < self._turn or not self._bulk):
            return self._next_small(room, at_least_one)
        if self._bulk:
            return self._next_chunk(room, at_least_one)
        return None

    def _next_small(self, room: int, at_least_one: bool) -> Frame | None:
        stream = self._small[0]
        frame = stream.queue[0]
        assert isinstance(frame, bytes)
        nbytes = len(frame)
        if nbytes > room and not at_least_one:
            return None
        self._small.popleft()
        stream.queue.popleft()
        payload = nbytes - FRAME_HEADER_BYTES
        stream.credit -= payload
        stream.nbytes -= payload
        self.nbytes -= payload
        self.small_nbytes -= payload
        self._run += nbytes
        self._place(stream)
        return Frame(nbytes, (frame,))

    def _next_chunk(self, room: int, at_least_one: bool) -> Frame | None:
        stream = self._bulk[0]
        message = stream.queue[0]
        assert isinstance(message, Bulk)
        size = min(message.remaining, self._chunk, stream.credit)
        if size + FRAME_HEADER_BYTES > room and not at_least_one:
            return None
        self._bulk.popleft()
        flags = 0 if message.begun else FIRST
        message.begun = True
        if size == message.remaining:
            flags |= LAST
            stream.queue.popleft()
        pieces = message.take(size)
        stream.credit -= size
        stream.nbytes -= size
        self.nbytes -= size
        self._run = 0
        self._place(stream)
        if flags & LAST:
            self._partials -= 1
            self._partial_bytes -= message.nbytes
            self._admit_waiting()
        return Frame(size + FRAME_HEADER_BYTES, (encode_frame_header(flags, stream.number, size), *pieces))

    def _place(self, stream: _Stream) -> None:
        """Puts a stream, that is in no deque, where its next message belongs."""
        if not stream.queue:
            stream.place = _Place.NOWHERE
            return
        head = stream.queue[0]
        if isinstance(head, bytes):
            if stream.credit < len(head) - FRAME_HEADER_BYTES:
                stream.place = _Place.CREDIT
            else:
                stream.place = _Place.SMALL
                self._small.append(stream)
        elif stream.credit < min(head.remaining, self._chunk, self._window // 4):
            # The receiver grants in quarters: with nothing held it leaves three of them open, so this
            # comes true; and no frame is smaller than it need be.
            stream.place = _Place.CREDIT
        elif head.begun or self._admits(head):
            stream.place = _Place.BULK
            self._bulk.append(stream)
        else:
            stream.place = _Place.SLOT
            self._waiting.append(stream)

    def _admits(self, message: Bulk) -> bool:
        """Takes a place among the unfinished messages that the peer allows, if there is one.

        A message that the peer never allows (it was queued before its limits were known) goes when it is alone:
        the peer's refusal is better than silence.
        """
        full = self._partial_bytes + message.nbytes > self._max_partial_bytes and self._partials
        if self._partials >= self._max_partials or full:
            return False
        self._partials += 1
        self._partial_bytes += message.nbytes
        return True

    def _admit_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            stream = self._waiting[0]
            message = stream.queue[0]
            assert isinstance(message, Bulk)
            if not self._admits(message):
                return
            self._waiting.popleft()
            stream.place = _Place.BULK
            self._bulk.append(stream)

    def validate_state(self) -> None:
        placed = {_Place.SMALL: self._small, _Place.BULK: self._bulk, _Place.SLOT: self._waiting}
        for place, streams in placed.items():
            assert list(streams) == [s for s in streams if s.place is place and self._streams[s.number] is s]
            assert len(set(map(id, streams))) == len(streams)
        assert len(self._small) + len(self._bulk) + len(self._waiting) == sum(
            stream.place in placed for stream in self._streams.values()
        )
        for stream in self._streams.values():
            assert bool(stream.queue) == (stream.place is not _Place.NOWHERE)
            assert 0 <= stream.credit <= self._window
            assert stream.queue or stream.credit < self._window
            assert stream.nbytes == sum(
                len(item) - FRAME_HEADER_BYTES if isinstance(item, bytes) else item.remaining for item in stream.queue
            )
        queued = [item for stream in self._streams.values() for item in stream.queue]
        assert self.nbytes == sum(stream.nbytes for stream in self._streams.values())
        assert self.small_nbytes == sum(len(item) - FRAME_HEADER_BYTES for item in queued if isinstance(item, bytes))
        admitted = [s.queue[0] for s in self._streams.values() if s.place is _Place.BULK or _has_begun(s)]
        assert self._partials == len(admitted) <= self._max_partials
        assert self._partial_bytes == sum(m.nbytes for m in admitted if isinstance(m, Bulk))
        assert self._partials == 1 or self._partial_bytes <= self._max_partial_bytes


def _has_begun(stream: _Stream) -> bool:
    return bool(stream.queue) and isinstance(stream.queue[0], Bulk) and stream.queue[0].begun

"""What is sent: the queues of messages, the choice of the next frame, and the frames that may be sent again.

A message of up to ``small_message`` bytes is one frame, encoded when it is queued. A larger one is sent in chunks.
Streams take turns, one frame each. Streams whose next frame is a small message go first, until they have sent as much
as a chunk; then a stream with a large message has its turn. So neither kind waits for much more than a chunk of the
other. A stream without credit is skipped.

Frames are numbered from 1 and kept until the peer has acknowledged them, as the pieces that were sent, so a payload is
not copied. On a new connection the peer reports the last frame that it received, and the later ones are sent again
with the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import groupby, islice
from typing import NamedTuple, TypeAlias

from .errors import ProtocolError
from .frames import FIRST, FRAME_HEADER_BYTES, LAST, PeerLimits, encode_frame_header
from .limits import KIB, MIN_WINDOW, Limits

SMALL_PIECE = 4 * KIB


class Frame(NamedTuple):
    """A frame with its header."""

    nbytes: int
    pieces: tuple[bytes | memoryview, ...]


class LargeMessage:
    """A large message being sent: its pieces, which are not copied, and the position in them."""

    __slots__ = ("_index", "_offset", "_pieces", "nbytes", "remaining", "started")

    def __init__(self, pieces: list[bytes | memoryview], nbytes: int) -> None:
        self._pieces = pieces
        self._index = 0
        self._offset = 0
        self.started = False
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
                self._pieces[self._index] = b""  # from here on only the frames keep its memory
                self._index += 1
                self._offset = 0
        return taken


def coalesce(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Joins adjacent pieces below 4 KiB, since a view of such a piece takes more memory than the piece."""
    joined: list[bytes | memoryview] = []
    for small, run in groupby(pieces, key=lambda piece: len(piece) < SMALL_PIECE):
        if small:
            joined.append(b"".join(run))
        else:
            joined.extend(run)
    return [piece for piece in joined if piece]


Queued: TypeAlias = "bytes | LargeMessage"  # a frame, or a message to be sent in chunks


class _StreamState(Enum):
    """What a stream waits for."""

    IDLE = 0  # nothing is queued
    SMALL = 1  # its turn to send a small message
    LARGE = 2  # its turn to send a chunk
    CREDIT = 3  # credit from the peer
    SLOT = 4  # the end of another large message


class _Stream:
    __slots__ = ("credit", "nbytes", "number", "queue", "state")

    def __init__(self, number: int, credit: int) -> None:
        self.number = number
        self.credit = credit
        self.queue: deque[Queued] = deque()
        self.nbytes = 0  # queued bytes
        self.state = _StreamState.IDLE


class Outbox:
    """The queues of all streams.

    ``nbytes`` counts the queued bytes without frame headers, ``small_nbytes`` those of small messages, which do not
    wait for large ones.
    """

    __slots__ = (
        "_chunk", "_large", "_max_partial_bytes", "_max_partials", "_partial_bytes", "_partials", "_small",
        "_small_run", "_small_turn", "_streams", "_waiting_for_slot", "_window", "nbytes", "small_nbytes",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.nbytes = self.small_nbytes = 0
        self._streams: dict[int, _Stream] = {}
        self._small: deque[_Stream] = deque()
        self._large: deque[_Stream] = deque()
        self._waiting_for_slot: deque[_Stream] = deque()
        self._small_run = 0  # bytes of small messages since the last chunk of a large one
        self._small_turn = self._chunk = limits.chunk
        # Until the peer's limits are known: the minimum that every peer allows, and no large messages.
        self._window = MIN_WINDOW
        self._max_partials = 0
        self._max_partial_bytes = 0
        self._partials = 0
        self._partial_bytes = 0

    @property
    def streams(self) -> int:
        return len(self._streams)

    def set_peer_limits(self, peer: PeerLimits) -> None:
        """Applies the peer's limits. Called once."""
        additional = peer.window - self._window
        self._window = peer.window
        self._chunk = min(self._chunk, peer.max_frame)
        self._max_partials = peer.max_partial_messages
        self._max_partial_bytes = peer.max_partial_bytes
        for stream in self._streams.values():
            stream.credit += additional
            if stream.state is _StreamState.CREDIT:
                self._schedule(stream)
        self._start_waiting()

    def queued_on(self, number: int) -> int:
        """The part of ``nbytes`` on one stream."""
        stream = self._streams.get(number)
        return 0 if stream is None else stream.nbytes

    def put(self, number: int, queued: Queued) -> None:
        """Queues a small message, encoded as a frame, or a large one."""
        if isinstance(queued, bytes):
            nbytes = len(queued) - FRAME_HEADER_BYTES
            self.small_nbytes += nbytes
        else:
            nbytes = queued.nbytes
        self.nbytes += nbytes
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = _Stream(number, self._window)
        stream.queue.append(queued)
        stream.nbytes += nbytes
        if stream.state is _StreamState.IDLE:
            self._schedule(stream)

    def grant(self, number: int, amount: int) -> None:
        """The peer allows ``amount`` more bytes on a stream."""
        stream = self._streams.get(number)
        credit = amount + (self._window if stream is None else stream.credit)
        if credit > self._window or stream is None or not amount:
            raise ProtocolError(
                f"the peer granted {amount} bytes on stream {number}, a total of {credit} in a window of {self._window}"
            )
        stream.credit = credit
        if stream.state is _StreamState.CREDIT:
            self._schedule(stream)
        elif stream.state is _StreamState.IDLE and credit == self._window:
            del self._streams[number]

    def next_frame(self, max_bytes: int, *, at_least_one: bool) -> Frame | None:
        """The next frame, if it has at most ``max_bytes`` or ``at_least_one`` is set."""
        if not self._small or (self._large and self._small_run >= self._small_turn):
            return self._next_chunk(max_bytes, at_least_one) if self._large else None
        stream = self._small[0]
        frame = stream.queue[0]
        assert isinstance(frame, bytes)
        nbytes = len(frame)
        if nbytes > max_bytes and not at_least_one:
            return None
        self._small.popleft()
        stream.queue.popleft()
        payload = nbytes - FRAME_HEADER_BYTES
        stream.credit -= payload
        stream.nbytes -= payload
        self.nbytes -= payload
        self.small_nbytes -= payload
        self._small_run += nbytes
        self._schedule(stream)
        return Frame(nbytes, (frame,))

    def _next_chunk(self, max_bytes: int, at_least_one: bool) -> Frame | None:
        stream = self._large[0]
        message = stream.queue[0]
        assert isinstance(message, LargeMessage)
        size = min(message.remaining, self._chunk, stream.credit)
        if size + FRAME_HEADER_BYTES > max_bytes and not at_least_one:
            return None
        self._large.popleft()
        flags = 0 if message.started else FIRST
        message.started = True
        if size == message.remaining:
            flags |= LAST
            stream.queue.popleft()
        pieces = message.take(size)
        stream.credit -= size
        stream.nbytes -= size
        self.nbytes -= size
        self._small_run = 0
        self._schedule(stream)
        if flags & LAST:
            self._partials -= 1
            self._partial_bytes -= message.nbytes
            self._start_waiting()
        return Frame(size + FRAME_HEADER_BYTES, (encode_frame_header(flags, stream.number, size), *pieces))

    def _schedule(self, stream: _Stream) -> None:
        """Adds a stream, which must not be in any deque, to the one for its next message."""
        if not stream.queue:
            stream.state = _StreamState.IDLE
            return
        head = stream.queue[0]
        if isinstance(head, bytes):
            if stream.credit < len(head) - FRAME_HEADER_BYTES:
                stream.state = _StreamState.CREDIT
            else:
                stream.state = _StreamState.SMALL
                self._small.append(stream)
        elif stream.credit < min(head.remaining, self._chunk, self._window // 4):
            # Waits for a larger frame. This ends if the message has begun, and its slot is free again: the receiver
            # then grants what is missing, whatever its application holds (ReceiveWindows.expect).
            stream.state = _StreamState.CREDIT
        elif head.started or self._reserve_slot(head):
            stream.state = _StreamState.LARGE
            self._large.append(stream)
        else:
            stream.state = _StreamState.SLOT
            self._waiting_for_slot.append(stream)

    def _reserve_slot(self, message: LargeMessage) -> bool:
        """Reserves one of the partial messages that the peer allows, if possible.

        A message that exceeds the peer's limits, since it was queued before they were known, is sent when it is alone:
        the peer then reports the error.
        """
        full = self._partial_bytes + message.nbytes > self._max_partial_bytes and self._partials
        if self._partials >= self._max_partials or full:
            return False
        self._partials += 1
        self._partial_bytes += message.nbytes
        return True

    def _start_waiting(self) -> None:
        for _ in range(len(self._waiting_for_slot)):
            stream = self._waiting_for_slot[0]
            message = stream.queue[0]
            assert isinstance(message, LargeMessage)
            if not self._reserve_slot(message):
                return
            self._waiting_for_slot.popleft()
            stream.state = _StreamState.LARGE
            self._large.append(stream)

    def validate_state(self) -> None:
        deques = {
            _StreamState.SMALL: self._small,
            _StreamState.LARGE: self._large,
            _StreamState.SLOT: self._waiting_for_slot,
        }
        for state, streams in deques.items():
            assert list(streams) == [s for s in streams if s.state is state and self._streams[s.number] is s]
            assert len(set(map(id, streams))) == len(streams)
        assert len(self._small) + len(self._large) + len(self._waiting_for_slot) == sum(
            stream.state in deques for stream in self._streams.values()
        )
        for stream in self._streams.values():
            assert bool(stream.queue) == (stream.state is not _StreamState.IDLE)
            assert 0 <= stream.credit <= self._window
            assert stream.queue or stream.credit < self._window
            assert stream.nbytes == sum(
                len(item) - FRAME_HEADER_BYTES if isinstance(item, bytes) else item.remaining for item in stream.queue
            )
        queued = [item for stream in self._streams.values() for item in stream.queue]
        assert self.nbytes == sum(stream.nbytes for stream in self._streams.values())
        assert self.small_nbytes == sum(len(item) - FRAME_HEADER_BYTES for item in queued if isinstance(item, bytes))
        admitted = [s.queue[0] for s in self._streams.values() if s.state is _StreamState.LARGE or _has_started(s)]
        assert self._partials == len(admitted) <= self._max_partials
        assert self._partial_bytes == sum(m.nbytes for m in admitted if isinstance(m, LargeMessage))
        assert self._partials == 1 or self._partial_bytes <= self._max_partial_bytes


def _has_started(stream: _Stream) -> bool:
    return bool(stream.queue) and isinstance(stream.queue[0], LargeMessage) and stream.queue[0].started


class Unacknowledged:
    """The frames that the peer has not acknowledged.

    ``acknowledged <= sent <= last``: ``last`` is the newest frame, ``sent`` the newest one sent on this connection.
    They differ during a replay.
    """

    __slots__ = ("_frames", "acknowledged", "last", "nbytes", "replay", "sent")

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self.replay: deque[Frame] = deque()  # frames that must be sent again
        self.acknowledged = 0
        self.sent = 0
        self.last = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def keep(self, frame: Frame) -> None:
        """Adds a new frame, which is being sent. Must not be called during a ``replay``: frames are sent in order."""
        self._frames.append(frame)
        self.nbytes += frame.nbytes
        self.last += 1
        self.sent = self.last

    def acknowledge(self, number: int) -> None:
        """The peer has received every frame up to ``number``."""
        if not self.acknowledged <= number <= self.sent:
            raise ProtocolError(
                f"the peer acknowledged frame {number}, which is not between the last acknowledged frame "
                f"{self.acknowledged} and the last sent frame {self.sent}",
                resumable=True,
            )
        frames = self._frames
        for _ in range(number - self.acknowledged):
            self.nbytes -= frames.popleft().nbytes
        self.acknowledged = number

    def rewind(self, received: int) -> None:
        """Starts a replay on a new connection to a peer that has received every frame up to ``received``.

        The caller must have checked that ``acknowledged <= received <= last``.
        """
        self.sent = self.last
        self.acknowledge(received)
        self.sent = received
        self.replay = deque(self._frames)

    def next_replayed(self, max_bytes: int, *, at_least_one: bool) -> Frame | None:
        """The next frame to replay, if it has at most ``max_bytes`` or ``at_least_one`` is set."""
        if not self.replay or (self.replay[0].nbytes > max_bytes and not at_least_one):
            return None
        self.sent += 1
        return self.replay.popleft()

    def stop_replay(self) -> None:
        self.replay.clear()

    def validate_state(self) -> None:
        assert 0 <= self.acknowledged <= self.sent <= self.last
        assert len(self._frames) == self.last - self.acknowledged
        assert self.nbytes == sum(frame.nbytes for frame in self._frames)
        assert all(frame.nbytes == sum(map(len, frame.pieces)) for frame in self._frames)
        if self.replay:
            assert len(self.replay) == self.last - self.sent
            tail = islice(self._frames, len(self._frames) - len(self.replay), None)
            assert all(again is kept for again, kept in zip(self.replay, tail, strict=True))

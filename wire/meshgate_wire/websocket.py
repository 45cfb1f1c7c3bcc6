"""A session's data on a websocket: the pump writes it, and a fast path takes data frames apart and makes them.

The pump writes no faster than the transport can send. Data in the transport's buffer cannot be overtaken, so the pump
keeps that buffer small: a small message that is sent during a large transfer waits for ``HIGH_WATER`` bytes and a
chunk, not for the transfer. The pump also sends acknowledgements if no other traffic carries them. It has no I/O and
no clock of its own; the transport provides both.

Every call passes four data frames, which cost one copy and little else. The websocket library handles the handshake,
control frames (ping, pong, close) and errors; it does not need the data. ``FrameReader`` separates the two in the
bytes after the handshake: an unfragmented binary message becomes its payload, any other frame is passed to the library
unchanged. RFC 6455, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple, Protocol

from .limits import KIB
from .session import Session

ACK_DELAY = 0.05  # seconds
HIGH_WATER = 256 * KIB
FLUSH_BYTES = 512 * KIB

_BINARY = 0x82  # the final and only frame of a binary message, without extensions
_MASKED = 0x80
_HEADER_16 = Struct("!BBH")
_HEADER_64 = Struct("!BBQ")
_LENGTH_16 = 126  # smaller payload lengths are in the second byte

# Of a client that need not hide what it sends from an intermediary, as on a Unix socket: it is sent as it is.
NO_MASK = bytes(4)

Unmask = Callable[[memoryview, bytes], bytes]


class Timer(Protocol):
    def cancel(self) -> object: ...


class Transport(Protocol):
    """What the pump needs from a websocket and an event loop."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends ``pieces``, joined, as one binary message.

        Never blocks; buffers what cannot be sent yet. Does not report a broken connection.
        """

    def buffered(self) -> int:
        """The number of written bytes that the operating system has not accepted yet."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Calls ``callback`` on the event loop after ``delay`` seconds."""


class Pump:
    """Used for one connection, between ``session.connection_made()`` and ``close()``.

    After ``session.send``, ``session.consume`` and ``session.receive_data``, call ``flush`` to write immediately, or
    ``flush_soon`` to write in the next iteration of the event loop, in one message with whatever else is sent before.
    Also call ``flush`` when the transport's buffer has drained after it held more than ``HIGH_WATER`` bytes.
    ``flushed`` is called after each flush by a timer, since the queue may be shorter then.
    """

    __slots__ = ("_ack_timer", "_closed", "_flush_timer", "_flushed", "_flushing", "_session", "_transport")

    def __init__(
        self,
        session: Session,
        transport: Transport,
        *,
        flushed: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._transport = transport
        self._flushed = flushed
        self._ack_timer: Timer | None = None
        self._flush_timer: Timer | None = None
        self._flushing = False
        self._closed = False

    def flush(self) -> None:
        """Writes until the session has no data to send or the transport holds more than ``HIGH_WATER`` bytes.

        After ``FLUSH_BYTES`` it continues in the next iteration of the event loop, to let other callbacks run.
        """
        if self._flushing or self._closed:
            return  # write() may drain the buffer at once, and so call this; the loop below continues anyway
        self._flushing = True
        written = 0
        try:
            while self._transport.buffered() <= HIGH_WATER:
                if written >= FLUSH_BYTES:
                    self.flush_soon()
                    break
                pieces = self._session.data_to_send()
                if not pieces:
                    break
                self._transport.write(pieces)
                written += sum(map(len, pieces))
        finally:
            self._flushing = False
        if self._ack_timer is None and self._session.ack_due:
            self._ack_timer = self._transport.call_later(ACK_DELAY, self._acknowledge)

    def flush_soon(self) -> None:
        """Calls ``flush`` in the next iteration of the event loop."""
        if self._flush_timer is None and not self._closed:
            self._flush_timer = self._transport.call_later(0, self._flush_now)

    def close(self) -> None:
        """Cancels the timers; nothing is written afterwards."""
        self._closed = True
        for timer in (self._ack_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._flush_timer = None

    def _flush_now(self) -> None:
        self._flush_timer = None
        self.flush()
        self._flushed()

    def _acknowledge(self) -> None:
        # The timer is not cancelled when other traffic carries the acknowledgement, as it usually does, so that there
        # is one timer per 50 ms rather than one per message.
        self._ack_timer = None
        self._session.acknowledge()
        self.flush()
        self._flushed()


class ParsedFrame(NamedTuple):
    """The payload of a binary message, or if ``passthrough`` the bytes of a frame for the library."""

    data: bytes
    passthrough: bool = False


def binary_header(size: int, mask: bytes = b"") -> bytes:
    """The frame header of a binary message of ``size`` bytes. A client must pass the ``mask`` of the payload."""
    masked = _MASKED if mask else 0
    if size < _LENGTH_16:
        return bytes((_BINARY, masked | size)) + mask
    if size < 1 << 16:
        return _HEADER_16.pack(_BINARY, masked | 126, size) + mask
    return _HEADER_64.pack(_BINARY, masked | 127, size) + mask


class FrameReader:
    """Splits the bytes of one connection, which arrive in pieces of any size, into frames.

    Servers pass ``unmask(payload, mask)``; frames to a client are not masked. A frame with more than ``max_size`` bytes
    or with invalid masking, and everything after it, is passed to the library, which reports the error and closes the
    connection.
    """

    __slots__ = ("_broken", "_header", "_mask", "_max_size", "_missing", "_pieces", "_unmask")

    def __init__(self, max_size: int, unmask: Unmask | None = None) -> None:
        self._max_size = max_size
        self._unmask = unmask
        self._header = b""  # the start of a frame with an incomplete header or for the library
        self._pieces: list[bytes | memoryview] = []  # of the current payload
        self._missing = 0  # bytes of it that have not arrived
        self._mask = b""
        self._broken = False

    def feed(self, data: bytes) -> list[ParsedFrame]:
        """The frames that ``data`` completes."""
        found: list[ParsedFrame] = []
        at, end = 0, len(data)
        if self._header:
            data = self._header + data
            end = len(data)
            self._header = b""
        while at < end and not self._broken:
            if self._missing:
                at = self._continue_message(data, at, end, found)
            else:
                previous, at = at, self._start_frame(data, at, end, found)
                if at == previous and not self._broken:
                    break
        if self._broken:
            found.append(ParsedFrame(data[at:], passthrough=True))
        elif at < end:
            self._header = data[at:]
        return found

    def _continue_message(self, data: bytes, at: int, end: int, found: list[ParsedFrame]) -> int:
        size = min(self._missing, end - at)
        self._pieces.append(memoryview(data)[at : at + size])
        self._missing -= size
        if not self._missing:
            payload = b"".join(self._pieces)
            self._pieces.clear()
            if self._unmask is not None and self._mask != NO_MASK:
                payload = self._unmask(memoryview(payload), self._mask)
            found.append(ParsedFrame(payload))
        return at + size

    def _start_frame(self, data: bytes, at: int, end: int, found: list[ParsedFrame]) -> int:  # noqa: PLR0911
        """Reads the frame at ``at``. Returns the position after it, or ``at`` if more data is needed."""
        if end - at < 2:
            return at
        second = data[at + 1]
        size, start, masked = second & 0x7F, at + 2, second >= _MASKED
        if size >= _LENGTH_16:
            layout = _HEADER_16 if size == _LENGTH_16 else _HEADER_64
            start = at + layout.size
            if end < start:
                return at
            size = layout.unpack_from(data, at)[2]
        start += 4 if masked else 0
        if end < start:
            return at
        if masked is (self._unmask is None) or size > self._max_size:
            self._broken = True
            return at
        complete = end - start >= size
        if data[at] != _BINARY:
            if not complete:
                return at
            found.append(ParsedFrame(data[at : start + size], passthrough=True))
            return start + size
        if self._unmask is not None:
            self._mask = data[start - 4 : start]
        if complete:
            if self._unmask is None or self._mask == NO_MASK:
                found.append(ParsedFrame(data[start : start + size]))
            else:
                found.append(ParsedFrame(self._unmask(memoryview(data)[start : start + size], self._mask)))
            return start + size
        if end > start:
            self._pieces.append(memoryview(data)[start:end])
        self._missing = size - (end - start)
        return end

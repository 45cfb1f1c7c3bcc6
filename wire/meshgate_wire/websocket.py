"""A fast path for the data frames of websockets, which every call passes four times: one copy and little else.

The websocket library handles the handshake, control frames (ping, pong, close) and errors; it does not need the data.
``FrameReader`` separates the two in the bytes after the handshake: an unfragmented binary message becomes its
payload, any other frame is passed to the library unchanged. RFC 6455, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

_BINARY = 0x82  # the final and only frame of a binary message, without extensions
_MASKED = 0x80
_HEADER_16 = Struct("!BBH")
_HEADER_64 = Struct("!BBQ")
_LENGTH_16 = 126  # smaller payload lengths are in the second byte

Unmask = Callable[[memoryview, bytes], bytes]


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
            if self._unmask is not None:
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
            if self._unmask is None:
                found.append(ParsedFrame(data[start : start + size]))
            else:
                found.append(ParsedFrame(self._unmask(memoryview(data)[start : start + size], self._mask)))
            return start + size
        if end > start:
            self._pieces.append(memoryview(data)[start:end])
        self._missing = size - (end - start)
        return end

"""Data frames of websockets, read and written with one copy and little else: every call passes here four times.

The websocket library does the handshake, the control frames (ping, pong, close) and what goes wrong; it need not see
the data. :class:`FrameReader` cuts what arrives after the handshake: an unfragmented binary message comes out as its
payload, any other frame as the bytes that it is, for the library. RFC 6455, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

__all__ = ["Cut", "FrameReader", "binary_header"]

_BINARY = 0x82  # the last, here the only, frame of a binary message, no extension
_MASKED = 0x80
_HEADER_16 = Struct("!BBH")
_HEADER_64 = Struct("!BBQ")
_TINY = 126  # payload lengths below are in the second byte

Unmask = Callable[[memoryview, bytes], bytes]


class Cut(NamedTuple):
    """A binary message's payload, or with ``other`` the bytes of a frame that is the library's to understand."""

    data: bytes
    other: bool = False


def binary_header(size: int, mask: bytes = b"") -> bytes:
    """What goes before the ``size`` bytes of a binary message; a client gives the ``mask`` of the payload."""
    masked = _MASKED if mask else 0
    if size < _TINY:
        return bytes((_BINARY, masked | size)) + mask
    if size < 1 << 16:
        return _HEADER_16.pack(_BINARY, masked | 126, size) + mask
    return _HEADER_64.pack(_BINARY, masked | 127, size) + mask


class FrameReader:
    """The frames in the bytes of one connection, however these are cut up.

    ``unmask(payload, mask)`` is a server's; a client's peer does not mask. A frame of more than ``most`` bytes, or
    masked where it must not be or the other way round, is given to the library as it comes, with all that follows:
    the library ends the connection and says why.
    """

    __slots__ = ("_broken", "_header", "_mask", "_missing", "_most", "_pieces", "_unmask")

    def __init__(self, most: int, unmask: Unmask | None = None) -> None:
        self._most = most
        self._unmask = unmask
        self._header = b""  # the beginning of a frame whose header is not complete, or which is not data
        self._pieces: list[bytes | memoryview] = []  # of a payload
        self._missing = 0  # bytes of it that have not come
        self._mask = b""
        self._broken = False

    def feed(self, data: bytes) -> list[Cut]:
        """What is complete with ``data``."""
        found: list[Cut] = []
        at, end = 0, len(data)
        if self._header:
            data = self._header + data
            end = len(data)
            self._header = b""
        while at < end and not self._broken:
            if self._missing:
                at = self._take(data, at, end, found)
            else:
                before, at = at, self._begin(data, at, end, found)
                if at == before and not self._broken:
                    break
        if self._broken:
            found.append(Cut(data[at:], other=True))
        elif at < end:
            self._header = data[at:]
        return found

    def _take(self, data: bytes, at: int, end: int, found: list[Cut]) -> int:
        size = min(self._missing, end - at)
        self._pieces.append(memoryview(data)[at : at + size])
        self._missing -= size
        if not self._missing:
            payload = b"".join(self._pieces)
            self._pieces.clear()
            found.append(Cut(payload if self._unmask is None else self._unmask(memoryview(payload), self._mask)))
        return at + size

    def _begin(self, data: bytes, at: int, end: int, found: list[Cut]) -> int:
        """Reads the frame that begins at ``at``; returns where the next bytes to look at are, ``at`` to wait."""
        header = _read_header(data, at, end)
        if header is None:
            return at
        start, size, masked = header
        if masked is (self._unmask is None) or size > self._most:
            self._broken = True
            return at
        if data[at] == _BINARY:
            return self._begin_message(data, start, size, end, found)
        if end - start < size:
            return at
        found.append(Cut(data[at : start + size], other=True))
        return start + size

    def _begin_message(self, data: bytes, start: int, size: int, end: int, found: list[Cut]) -> int:
        if self._unmask is not None:
            self._mask = data[start - 4 : start]
        if end - start >= size:
            if self._unmask is None:
                found.append(Cut(data[start : start + size]))
            else:
                found.append(Cut(self._unmask(memoryview(data)[start : start + size], self._mask)))
            return start + size
        if end > start:
            self._pieces.append(memoryview(data)[start:end])
        self._missing = size - (end - start)
        return end


def _read_header(data: bytes, at: int, end: int) -> tuple[int, int, bool] | None:
    """Where the payload of the frame at ``at`` starts, its size, whether it is masked. None until that is there."""
    if end - at < 2:
        return None
    second = data[at + 1]
    size = second & 0x7F
    start = at + 2
    if size >= _TINY:
        layout = _HEADER_16 if size == 126 else _HEADER_64
        start = at + layout.size
        if end < start:
            return None
        size = layout.unpack_from(data, at)[2]
    masked = second >= _MASKED
    if masked:
        start += 4
    return (start, size, masked) if end >= start else None

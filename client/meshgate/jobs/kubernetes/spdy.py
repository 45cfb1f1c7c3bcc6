"""SPDY/3.1 as far as a port-forward needs it: frames are bytes in and events out. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

HEADER_SIZE = 8
_HEADER = struct.Struct(">II")  # stream, or control bit, version and type; flags and length
_VERSION = 0x80030000
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1 << 24
_LENGTH = (1 << 24) - 1
_MAX_CONTROL = 1 << 16
_ERROR, _DATA = 1, 3  # the identifiers that a client gives its streams are odd


# kubectl forwards ports in the same way. The node copies these frames as they are, while it unmasks every byte of a
# websocket. The API server assigns one stream to errors and one to the bytes of the port.


@dataclass(frozen=True, slots=True)
class Opened:
    """The node accepted both streams; it would drop bytes that arrive earlier."""


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes from the port; valid until the next call."""

    data: memoryview


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes to send back, for a ping."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The node reports why it cannot forward."""

    reason: str


@dataclass(frozen=True, slots=True)
class PodClosed:
    """The program in the pod closed its connection."""


Event = Opened | Data | Answer | Failed | PodClosed


class ForwardStreams:
    """The streams of one port-forward."""

    def __init__(self) -> None:
        self._unanswered = {_ERROR, _DATA}
        self._head = bytearray()
        self._body = bytearray()
        self._first = 0
        self._second = 0
        self._left = 0

    def open(self, port: int) -> bytes:
        """The bytes that open both streams."""
        compressor = zlib.compressobj()
        error = _syn_stream(compressor, _ERROR, "error", port, _FIN)  # nothing is ever sent on it
        return error + _syn_stream(compressor, _DATA, "data", port, 0)

    def data_header(self, size: int) -> bytes:
        """The header of a frame with ``size`` bytes for the port."""
        return _HEADER.pack(_DATA, size)

    def receive(self, data: memoryview) -> Iterator[Event]:
        """The events in ``data``, to be consumed before the next call. Raises ValueError if it is not SPDY."""
        while data:
            if len(self._head) < HEADER_SIZE:
                missing = HEADER_SIZE - len(self._head)
                self._head += data[:missing]
                data = data[missing:]
                if len(self._head) < HEADER_SIZE:
                    return
                self._begin_frame()
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            yield from self._part_of_frame(part)
            if not self._left:
                self._head.clear()
                self._body.clear()

    def _begin_frame(self) -> None:
        self._first, self._second = _HEADER.unpack(self._head)
        self._left = self._second & _LENGTH
        if self._first & ~0xFFFF not in (0, _VERSION) or (self._first != _DATA and self._left > _MAX_CONTROL):
            raise ValueError(f"invalid SPDY frame {self._head.hex()}")

    def _part_of_frame(self, part: memoryview) -> Iterator[Event]:
        if self._first == _DATA:
            if part:
                yield Data(part)
            if not self._left and self._second & _FIN:
                yield PodClosed()
            return
        self._body += part
        if self._left:
            return
        if self._first == _ERROR:
            if self._body:
                yield Failed(self._body.decode(errors="replace").strip())
        else:
            yield from self._control(self._first & 0xFFFF)

    def _control(self, kind: int) -> Iterator[Event]:
        number = int.from_bytes(self._body[:4], "big")
        if kind == _SYN_REPLY:
            self._unanswered.discard(number)
            if not self._unanswered:
                yield Opened()
        elif kind == _PING:
            yield Answer(bytes(self._head + self._body))
        elif kind == _RST_STREAM:
            yield Failed(f"stream {number} was reset, status {int.from_bytes(self._body[4:8], 'big')}")
        elif kind == _GOAWAY:
            yield PodClosed()


def _syn_stream(compressor: zlib._Compress, stream: int, kind: str, port: int, flags: int) -> bytes:
    headers = {"streamtype": kind, "port": str(port), "requestid": "0"}
    block = struct.pack(">I", len(headers))
    for text in (text for pair in headers.items() for text in pair):
        block += struct.pack(">I", len(text)) + text.encode()
    block = compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)
    body = struct.pack(">IIH", stream, 0, 0) + block  # associated with no stream, highest priority
    return _HEADER.pack(_VERSION | _SYN_STREAM, flags | len(body)) + body

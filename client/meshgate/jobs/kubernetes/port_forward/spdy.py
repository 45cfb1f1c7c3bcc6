"""A port-forward in SPDY/3.1, as kubectl's.

``SpdyEnd`` does the I/O; below it, frames are bytes in and events out.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd
from meshgate_kubernetes.api.client import PortForwardRequest

CLOSE_TIMEOUT = 1.0
_READ_SIZE = 1 << 18
_WRITE_LIMIT = 1 << 20
_MAX_RESPONSE = 1 << 16
HEADER_SIZE = 8
_HEADER = struct.Struct(">II")  # stream, or control bit, version and type; flags and length
_VERSION = 0x80030000
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1 << 24
_LENGTH = (1 << 24) - 1
_MAX_CONTROL = 1 << 16
_ERROR, _DATA = 1, 3  # the identifiers that a client gives its streams are odd


class UpgradeRefused(Exception):
    """The server, or a proxy before it, does not let this user speak SPDY."""


async def connect_spdy(request: PortForwardRequest, local: LocalEnd) -> SpdyEnd:
    """Raises UpgradeRefused, ForwardFailed if the node rejects the streams, and OSError."""
    url = urlsplit(request.url)
    _, remote = await asyncio.get_running_loop().create_connection(
        lambda: SpdyEnd(request, local),
        url.hostname or "",
        url.port or (443 if request.ssl else 80),
        ssl=request.ssl,
        server_hostname=request.server_hostname if request.ssl else None,
    )
    try:
        await remote.opened
    except BaseException:
        await remote.close()
        raise
    return remote


class SpdyEnd(asyncio.BufferedProtocol):
    """The connection to the API server. ``opened`` is done once bytes can be sent."""

    def __init__(self, request: PortForwardRequest, local: LocalEnd) -> None:
        self._request = request
        self._local = local
        self._streams = ForwardStreams()
        self._response: bytearray | None = bytearray()  # None once the connection is SPDY
        self._buffer = memoryview(bytearray(_READ_SIZE))
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- towards the API server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_WRITE_LIMIT)
        url = urlsplit(self._request.url)
        headers = {
            "Host": url.netloc,
            "Connection": "Upgrade",
            "Upgrade": "SPDY/3.1",
            "X-Stream-Protocol-Version": "portforward.k8s.io",
            "Content-Length": "0",
            **self._request.headers,
        }
        lines = [f"POST {url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        transport.write("\r\n".join(lines).encode("latin-1"))

    def forward(self, data: memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join((self._streams.data_header(len(data)), data)))

    def pause_receiving(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_receiving(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._local.pause_reading()

    def resume_writing(self) -> None:
        self._local.resume_reading()

    async def close(self) -> None:
        """Sends what is left, for a second at most. The node takes the end of the connection as that of its streams."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._lost], timeout=CLOSE_TIMEOUT)
            self._transport.abort()

    # --- from the API server

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes]
        if self._response is not None:
            self._response += data
            head, separator, rest = bytes(self._response).partition(b"\r\n\r\n")
            if not separator and len(head) < _MAX_RESPONSE:
                return
            self._response = None
            if not self._upgraded(head):
                return
            data = memoryview(rest)
        try:
            for event in self._streams.receive(data):
                self._handle(event)
        except ValueError as error:
            self._end(ForwardFailed(f"the port-forward ended: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set_result(None)
        self._end(UpgradeRefused("the connection was closed") if self._response is not None else None)

    def _upgraded(self, head: bytes) -> bool:
        """Opens the streams if the server speaks SPDY from here on."""
        status, _, lines = head.partition(b"\r\n")
        upgrade = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n")).get("Upgrade", "")
        if status.split(b" ")[1:2] != [b"101"] or upgrade.upper() != "SPDY/3.1":
            self._end(UpgradeRefused(status.decode("latin-1")))
            return False
        assert self._transport is not None
        self._transport.write(self._streams.open(self._request.port))
        return True

    def _handle(self, event: Event) -> None:
        match event:
            case Data(data):
                self._local.write(data)
            case Opened():
                if not self.opened.done():
                    self.opened.set_result(None)
            case Answer(data):
                assert self._transport is not None
                self._transport.write(data)
            case Failed(reason):
                self._end(ForwardFailed(f"the port-forward ended: {reason}"))
            case Ended():
                self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Before ``opened``, another way may yet be found for the local end."""
        if not self.opened.done():
            self.opened.set_exception(error or ForwardFailed("the API server closed the port-forward"))
        elif not self.opened.cancelled() and self.opened.exception() is None:
            self._local.end(error)


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
class Ended:
    """The program in the pod closed its connection."""


Event = Opened | Data | Answer | Failed | Ended


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
                yield Ended()
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
            yield Ended()


def _syn_stream(compressor: zlib._Compress, stream: int, kind: str, port: int, flags: int) -> bytes:
    headers = {"streamtype": kind, "port": str(port), "requestid": "0"}
    block = struct.pack(">I", len(headers))
    for text in (text for pair in headers.items() for text in pair):
        block += struct.pack(">I", len(text)) + text.encode()
    block = compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)
    body = struct.pack(">IIH", stream, 0, 0) + block  # associated with no stream, highest priority
    return _HEADER.pack(_VERSION | _SYN_STREAM, flags | len(body)) + body

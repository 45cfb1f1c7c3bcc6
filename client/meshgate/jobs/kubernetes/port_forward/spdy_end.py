"""A port-forward in SPDY, as kubectl's."""

from __future__ import annotations

import asyncio
import http.client
import io
from urllib.parse import urlsplit

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd
from meshgate.jobs.kubernetes.port_forward.spdy_frames import (
    Answer,
    Data,
    Ended,
    Event,
    Failed,
    ForwardStreams,
    Opened,
)
from meshgate_kubernetes.api.client import PortForwardRequest

CLOSE_TIMEOUT = 1.0
_READ_SIZE = 1 << 18
_WRITE_LIMIT = 1 << 20
_MAX_RESPONSE = 1 << 16


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

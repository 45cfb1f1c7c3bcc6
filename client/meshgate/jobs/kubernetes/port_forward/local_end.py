"""The forward's end of the socket pair whose other end the user holds. Passes bytes on without blocking."""

from __future__ import annotations

import asyncio
from typing import Protocol

READ_SIZE = 1 << 18


class ForwardFailed(OSError):
    """The API server, or the node behind it, cannot forward to the pod now. ``status`` is the HTTP status with which
    the API server rejected it, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RemoteEnd(Protocol):
    """The connection to the API server."""

    def forward(self, data: memoryview) -> None:
        """Sends bytes from the user. ``data`` is reused after this call."""

    def pause_receiving(self) -> None: ...

    def resume_receiving(self) -> None: ...


class LocalEnd(asyncio.BufferedProtocol):
    """Ends with the future ``ended``, which has an error if the API server or the node reported one."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remote: RemoteEnd | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._buffer = memoryview(bytearray(READ_SIZE))

    def start(self, remote: RemoteEnd) -> None:
        self._remote = remote
        for data in self._early:
            self.write(data)
        if self._transport is not None:
            self._transport.resume_reading()

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is None or self._remote is None:
            self._early.append(bytes(data))
        elif not self._transport.is_closing():
            self._transport.write(data)

    def end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # until the remote end can take the data

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._remote is not None:
            self._remote.forward(self._buffer[:nbytes])

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        if self._remote is not None:
            self._remote.pause_receiving()

    def resume_writing(self) -> None:
        if self._remote is not None:
            self._remote.resume_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(None)

"""Relays over TCP: authenticated connections that carry frames, and nothing that decides anything.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from .errors import MalformedMessage, PeerRefused, SyncError
from .frames import MAX_FRAME, Message, decode_frame
from .handshake import Answering, Asking

__all__ = ["Connection", "Listener", "accepting", "dialling", "stop_listening"]

_HIGH_WATER = 256 * 1024
_ROOM = 512 * 1024  # holds a frame with the largest piece, and then some
_LEAST_READ = 64 * 1024
_HANDSHAKE_SECONDS = 10.0


class Listener(Protocol):
    """Told what happens to a connection, in its event loop."""

    def opened(self, connection: Connection) -> None: ...
    def received(self, connection: Connection, messages: list[Message]) -> None:
        """All that came in one read."""
        ...

    def drained(self, connection: Connection, size: int) -> None:
        """Pieces of ``size`` bytes altogether have been handed to the kernel."""
        ...

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        """Called once, also when the connection was never opened."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection, from dialling or accepting to its end. ``peer`` is the other's name once it is open.

    What comes is read into one buffer, and a piece is copied out of it once. ``_start`` and ``_end`` bound what of the
    buffer is still to be understood.
    """

    def __init__(self, listener: Listener, handshake: Asking | Answering, peer: str = "", *, up: bool) -> None:
        self.peer = peer
        self.up = up
        self._listener = listener
        self._handshake: Asking | Answering | None = handshake
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._buffer = bytearray(_LEAST_READ)
        self._start = self._end = 0
        self._paused = False
        self._undrained = 0
        self._reason: Exception | None = None
        self._closing = False

    @property
    def made(self) -> bool:
        """Whether there was a connection, so that its end will be told."""
        return self._transport is not None

    def write(self, parts: list[bytes], piece_bytes: int) -> None:
        """Frames in parts, of which ``piece_bytes`` are to be reported when they have drained."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.writelines(parts)
        self._undrained += piece_bytes
        if not self._paused:
            self._report()

    def close(self, reason: Exception | None = None) -> None:
        """``Listener.closed`` follows, once there was a connection."""
        self._reason = self._reason or reason
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- asyncio.Protocol -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without being a subclass
        self._transport = transport
        if self._closing:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        late = PeerRefused(f"no handshake within {_HANDSHAKE_SECONDS:.0f} s")
        self._timeout = asyncio.get_running_loop().call_later(_HANDSHAKE_SECONDS, self.close, late)
        if isinstance(self._handshake, Asking):
            transport.write(self._handshake.opening)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 2 * _ROOM:
                self._buffer = bytearray(_ROOM)
        if len(self._buffer) - self._end < _LEAST_READ:
            self._make_room(_ROOM)
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            if self._handshake is not None:
                self._shake()
            if self._handshake is None:
                self._frames()
        except SyncError as problem:
            self.close(problem)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._report()

    def connection_lost(self, reason: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._listener.closed(self, self._reason or reason)

    def _report(self) -> None:
        if self._undrained:
            size, self._undrained = self._undrained, 0
            # Not at once: the listener may be in the middle of writing.
            asyncio.get_running_loop().call_soon(self._listener.drained, self, size)

    def _shake(self) -> None:
        """Continues the handshake; what comes after it belongs to frames."""
        assert self._transport is not None
        data = bytes(memoryview(self._buffer)[self._start : self._end])
        self._start = self._end
        if isinstance(self._handshake, Asking):
            outcome = self._handshake.receive(data)
            if outcome is None:
                return
            reply, rest = outcome
            self._transport.write(reply)
        else:
            assert self._handshake is not None
            self._transport.write(self._handshake.receive(data))
            if self._handshake.name is None:
                return
            self.peer, rest = self._handshake.name, self._handshake.rest
        self._start = self._end - len(rest)  # the handshake gives back the end of what it was fed
        self._handshake = None
        assert self._timeout is not None
        self._timeout.cancel()
        self._listener.opened(self)

    def _frames(self) -> None:
        view, start, end, length = memoryview(self._buffer), self._start, self._end, 0
        messages: list[Message] = []
        while end - start >= 4:
            length = int.from_bytes(view[start : start + 4], "big")
            if not 0 < length <= MAX_FRAME:
                raise MalformedMessage(f"a frame of {length} bytes")
            if end - start - 4 < length:
                break
            messages.append(decode_frame(view[start + 4 : start + 4 + length]))
            start, length = start + 4 + length, 0
        self._start = start
        needed = 4 + length + _LEAST_READ  # of a frame that has begun; so there is always something left to read into
        if length and needed > len(self._buffer) - start:
            self._make_room(needed)
        if messages:
            self._listener.received(self, messages)

    def _make_room(self, size: int) -> None:
        """Has a buffer of at least ``size`` bytes, beginning with what is still to be understood. The old one may be
        lent to the transport, and is never resized."""
        rest = bytes(memoryview(self._buffer)[self._start : self._end])
        if len(self._buffer) < size:
            self._buffer = bytearray(max(size, _ROOM))
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def dialling(listener: Listener, secret: bytes, name: str, peer: str) -> Connection:
    """For ``loop.create_connection``: this host, ``name``, asks ``peer``."""
    return Connection(listener, Asking(secret, name), peer, up=True)


def accepting(listener: Listener, secret: bytes) -> Connection:
    """For ``loop.create_server``."""
    return Connection(listener, Answering(secret), up=False)


async def stop_listening(server: asyncio.Server) -> None:
    """Closes ``server`` once what it has accepted is a connection. ``Server.close()`` alone forgets one that has no
    transport yet (python/cpython#109564): its protocol, already made, is never told of an end."""
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(2):  # the first makes the transport, the second tells its protocol
        await asyncio.sleep(0)
    server.close()

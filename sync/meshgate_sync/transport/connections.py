"""The connections of one relay: it listens for children, dials parents, and keeps one connection for each link.

Connections are authenticated and carry frames over TCP. Nothing here makes decisions.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Mapping
from typing import Protocol, cast

from ..errors import MalformedMessage, PeerRefused, SyncError
from ..relay.commands import PeerLink
from ..relay.frames import MAX_FRAME, Message, decode_frame

Address = tuple[str, int]

_DIAL_TIMEOUT = 2.0
_HIGH_WATER = 256 * 1024
_BUFFER = 512 * 1024  # more than a frame with the largest piece
_MIN_READ = 64 * 1024
_HANDSHAKE_TIMEOUT = 10.0
_MAGIC = b"MGR1"
_NONCE = 16
_MAC = 32
_MAX_NAME = 1024


class LinkListener(Protocol):
    """Is notified of what happens to links, in the event loop."""

    def link_opened(self, link: PeerLink) -> None: ...

    def link_received(self, link: PeerLink, messages: list[Message]) -> None: ...

    def link_drained(self, link: PeerLink, size: int) -> None:
        """Pieces of ``size`` bytes in total were passed to the kernel."""
        ...

    def link_lost(self, link: PeerLink, reason: str) -> None:
        """``reason``: why a parent could not be reached; empty if an open link ended."""
        ...


class Connections:
    """Until ``activate`` accepted connections wait, unread. ``close`` before the event loop ends."""

    def __init__(self, name: str, secret: bytes, listener: LinkListener) -> None:
        self.addresses: dict[str, Address] = {}
        self._name = name
        self._secret = secret
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._waiting: dict[Connection, list[Message]] | None = {}
        self._open: dict[PeerLink, Connection] = {}
        self._dialed: dict[PeerLink, Connection] = {}
        self._all: dict[Connection, None] = {}  # in order: a seed of the simulation always does the same
        self._none_left = asyncio.Event()
        self._dials: dict[asyncio.Task[None], None] = {}
        self._parents_paused = False
        self._closed = False

    async def listen(self, host: str, port: int) -> Address:
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    def activate(self, addresses: Mapping[str, Address]) -> None:
        """Starts to notify the listener, of the connections that waited first."""
        self.addresses.update(addresses)
        waiting, self._waiting = self._waiting or {}, None
        for connection, messages in waiting.items():
            self.opened(connection)
            self.received(connection, messages)
            connection.resume_reading()

    def connect(self, peer: str) -> None:
        dial = asyncio.get_running_loop().create_task(self._dial(peer))
        self._dials[dial] = None
        dial.add_done_callback(self._dials.pop)

    def disconnect(self, link: PeerLink) -> None:
        """The listener is not notified."""
        for connections in (self._open, self._dialed) if link.up else (self._open,):
            connection = connections.pop(link, None)
            if connection is not None:
                connection.close()

    def write(self, link: PeerLink, parts: list[bytes], piece_bytes: int) -> None:
        connection = self._open.get(link)
        if connection is not None and parts:
            connection.write(parts, piece_bytes)

    def pause_parents(self, paused: bool) -> None:
        """Stops reading what parents send, or resumes it."""
        self._parents_paused = paused
        for link, connection in self._open.items():
            if link.up:
                (connection.pause_reading if paused else connection.resume_reading)()

    async def close(self) -> None:
        """Ends dials, server and connections; returns once all have ended. The listener is not notified."""
        self._closed = True
        for dial in self._dials:
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        if self._server is not None:
            await stop_listening(self._server)
        for connection in list(self._all):
            connection.close()
        if self._all:
            await self._none_left.wait()

    def _accept(self) -> Connection:
        connection = incoming(self, self._secret)
        self._all[connection] = None
        return connection

    async def _dial(self, peer: str) -> None:
        connection = self._dialed[PeerLink(peer, up=True)] = outgoing(self, self._secret, self._name, peer)
        self._all[connection] = None
        try:
            address = self.addresses.get(peer)
            if address is None:
                raise ConnectionError(f"its address is not known to {self._name}")
            loop = asyncio.get_running_loop()
            dialing = loop.create_connection(lambda: connection, *address)
            await asyncio.wait_for(dialing, _DIAL_TIMEOUT)  # noqa: TID251 - nothing is awaited after it
        except asyncio.TimeoutError:
            self.closed(connection, TimeoutError(f"no connection within {_DIAL_TIMEOUT:.0f} s"))
        except OSError as error:
            self.closed(connection, error)
        except asyncio.CancelledError:
            if not connection.was_established:
                self._all.pop(connection, None)
            raise

    # --- tcp.ConnectionListener -------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if self._waiting is not None:
            connection.pause_reading()
            self._waiting[connection] = []
            return
        link = PeerLink(connection.peer, connection.up)
        if connection.up and self._dialed.pop(link, None) is not connection:
            connection.close()
            return
        earlier = self._open.get(link)
        self._open[link] = connection
        if earlier is not None and earlier is not connection:
            earlier.close()
        if connection.up and self._parents_paused:
            connection.pause_reading()
        self._listener.link_opened(link)

    def received(self, connection: Connection, messages: list[Message]) -> None:
        """Raises what the listener raises."""
        link = PeerLink(connection.peer, connection.up)
        if self._waiting is not None:
            self._waiting[connection] += messages
        elif self._open.get(link) is connection:
            self._listener.link_received(link, messages)

    def drained(self, connection: Connection, size: int) -> None:
        link = PeerLink(connection.peer, connection.up)
        if self._open.get(link) is connection:
            self._listener.link_drained(link, size)

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        self._all.pop(connection, None)
        if self._closed and not self._all:
            self._none_left.set()
        if self._waiting is not None:
            self._waiting.pop(connection, None)
        link = PeerLink(connection.peer, connection.up)
        if self._open.get(link) is connection:
            del self._open[link]
            why = ""
        elif self._dialed.get(link) is connection:
            del self._dialed[link]
            address = self.addresses.get(link.peer)
            at = f" at {address[0]}:{address[1]}" if address is not None else ""
            why = f"cannot reach {link.peer or 'the gateway'}{at} ({_text(reason)})"
        else:
            return
        if not self._closed:
            self._listener.link_lost(link, why)


def _text(reason: Exception | None) -> str:
    if isinstance(reason, OSError) and reason.errno:
        return os.strerror(reason.errno)
    return str(reason) if reason is not None else "it closed the connection"


# How two relays prove to each other that they belong to the same session, before any frame is decoded.
#
# Both know the session's secret. The child opens::
#
#     child  -> parent   "MGR1", nonce (16), name (length 2)
#     parent -> child    nonce (16), HMAC-SHA256 over both nonces and the name, as the parent
#     child  -> parent   HMAC-SHA256 over the same, as the child
#
# Frames follow at once. They are not encrypted: code travels between pods of one cluster.


def _proof(secret: bytes, role: bytes, child_nonce: bytes, parent_nonce: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, role + child_nonce + parent_nonce + name, "sha256")


class ChildHandshake:
    """The child's side: send ``opening``, then pass received bytes to ``receive`` until it returns a reply."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret = secret
        self._name = name.encode()
        self._nonce = os.urandom(_NONCE)
        self._buffer = b""
        self.opening = _MAGIC + self._nonce + len(self._name).to_bytes(2, "big") + self._name

    def receive(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Returns the reply and the bytes that already belong to frames; None if more bytes are needed. Raises
        PeerRefused."""
        self._buffer += data
        if len(self._buffer) < _NONCE + _MAC:
            return None
        nonce, proof, rest = self._buffer[:_NONCE], self._buffer[_NONCE:][:_MAC], self._buffer[_NONCE + _MAC :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"parent", self._nonce, nonce, self._name)):
            raise PeerRefused("handshake failed: the parent does not have this session's secret")
        return _proof(self._secret, b"child", self._nonce, nonce, self._name), rest


class ParentHandshake:
    """The parent's side: ``receive`` returns what to send. Once the child is authenticated ``name`` is set, and
    ``rest`` holds the bytes that already belong to frames."""

    def __init__(self, secret: bytes) -> None:
        self.name: str | None = None
        self.rest = b""
        self._secret = secret
        self._buffer = b""
        self._child: tuple[bytes, bytes] | None = None
        self._nonce = os.urandom(_NONCE)

    def receive(self, data: bytes) -> bytes:
        """Raises MalformedMessage, PeerRefused."""
        self._buffer += data
        reply = b""
        if self._child is None:
            if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
                raise MalformedMessage("handshake failed: the peer is not a meshgate relay of this protocol version")
            head = len(_MAGIC) + _NONCE + 2
            length = int.from_bytes(self._buffer[head - 2 : head], "big")
            if length > _MAX_NAME:
                raise MalformedMessage(f"handshake failed: host name of {length} bytes (at most {_MAX_NAME} allowed)")
            if len(self._buffer) < max(head + length, head):
                return b""
            nonce, name = self._buffer[len(_MAGIC) : head - 2], self._buffer[head : head + length]
            self._child = nonce, name
            self._buffer = self._buffer[head + length :]
            reply = self._nonce + _proof(self._secret, b"parent", nonce, self._nonce, name)
        nonce, name = self._child
        if len(self._buffer) >= _MAC:
            proof, self.rest = self._buffer[:_MAC], self._buffer[_MAC:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"child", nonce, self._nonce, name)):
                raise PeerRefused("handshake failed: the child does not have this session's secret")
            self.name = name.decode(errors="replace")
        return reply


class ConnectionListener(Protocol):
    """Is notified of what happens to a connection, in its event loop."""

    def opened(self, connection: Connection) -> None: ...
    def received(self, connection: Connection, messages: list[Message]) -> None:
        """All messages of one read."""
        ...

    def drained(self, connection: Connection, size: int) -> None:
        """Pieces of ``size`` bytes in total were passed to the kernel."""
        ...

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        """Called once, also if the connection was never opened."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection, from its dial or accept to its end. ``peer`` is the name of the other side once it is open;
    ``up``: the other side is the parent.

    Received bytes go into one buffer, and a piece is copied out of it once. ``_start`` and ``_end`` bound the bytes
    that are not decoded yet.
    """

    def __init__(
        self, listener: ConnectionListener, handshake: ChildHandshake | ParentHandshake, peer: str = "", *, up: bool
    ) -> None:
        self.peer = peer
        self.up = up
        self._listener = listener
        self._handshake: ChildHandshake | ParentHandshake | None = handshake
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._buffer = bytearray(_MIN_READ)
        self._start = self._end = 0
        self._paused = False
        self._undrained = 0
        self._reason: Exception | None = None
        self._closing = False

    @property
    def was_established(self) -> bool:
        """Whether TCP connected, so that the listener will be notified of the end."""
        return self._transport is not None

    def write(self, parts: list[bytes], piece_bytes: int) -> None:
        """Writes frames, in parts. ``piece_bytes`` of them are reported once they have drained."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.writelines(parts)
        self._undrained += piece_bytes
        if not self._paused:
            self._report_drained()

    def close(self, reason: Exception | None = None) -> None:
        """``ConnectionListener.closed`` follows if TCP connected."""
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
        transport = cast("asyncio.Transport", transport)  # uvloop's transport has the methods but not the base class
        self._transport = transport
        if self._closing:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        late = PeerRefused(f"handshake not completed within {_HANDSHAKE_TIMEOUT:.0f} s")
        self._timeout = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT, self.close, late)
        if isinstance(self._handshake, ChildHandshake):
            transport.write(self._handshake.opening)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 2 * _BUFFER:
                self._buffer = bytearray(_BUFFER)
        if len(self._buffer) - self._end < _MIN_READ:
            self._reserve(_BUFFER)
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            if self._handshake is not None:
                self._continue_handshake()
            if self._handshake is None:
                self._decode_frames()
        except SyncError as error:
            self.close(error)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._report_drained()

    def connection_lost(self, reason: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._listener.closed(self, self._reason or reason)

    def _report_drained(self) -> None:
        if self._undrained:
            size, self._undrained = self._undrained, 0
            # Deferred, because the listener may be in the middle of writing.
            asyncio.get_running_loop().call_soon(self._listener.drained, self, size)

    def _continue_handshake(self) -> None:
        """The bytes that follow the handshake belong to frames."""
        assert self._transport is not None
        data = bytes(memoryview(self._buffer)[self._start : self._end])
        self._start = self._end
        if isinstance(self._handshake, ChildHandshake):
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
        self._start = self._end - len(rest)  # the handshake returns the bytes it did not use
        self._handshake = None
        assert self._timeout is not None
        self._timeout.cancel()
        self._listener.opened(self)

    def _decode_frames(self) -> None:
        view, start, end, length = memoryview(self._buffer), self._start, self._end, 0
        messages: list[Message] = []
        while end - start >= 4:
            length = int.from_bytes(view[start : start + 4], "big")
            if not 0 < length <= MAX_FRAME:
                raise MalformedMessage(f"invalid frame length: {length} bytes (1 to {MAX_FRAME} allowed)")
            if end - start - 4 < length:
                break
            messages.append(decode_frame(view[start + 4 : start + 4 + length]))
            start, length = start + 4 + length, 0
        self._start = start
        needed = 4 + length + _MIN_READ  # so that the buffer always has room for the next read
        if length and needed > len(self._buffer) - start:
            self._reserve(needed)
        if messages:
            self._listener.received(self, messages)

    def _reserve(self, size: int) -> None:
        """Makes the buffer at least ``size`` bytes long and moves the bytes that are not decoded yet to its start. The
        old buffer may be in use by the transport and is never resized."""
        rest = bytes(memoryview(self._buffer)[self._start : self._end])
        if len(self._buffer) < size:
            self._buffer = bytearray(max(size, _BUFFER))
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


def outgoing(listener: ConnectionListener, secret: bytes, name: str, peer: str) -> Connection:
    """For ``loop.create_connection``: this host, ``name``, connects to its parent ``peer``."""
    return Connection(listener, ChildHandshake(secret, name), peer, up=True)


def incoming(listener: ConnectionListener, secret: bytes) -> Connection:
    """For ``loop.create_server``."""
    return Connection(listener, ParentHandshake(secret), up=False)


async def stop_listening(server: asyncio.Server) -> None:
    """Closes ``server`` after every accepted socket has its transport. ``Server.close()`` alone forgets a socket that
    has none yet (python/cpython#109564): its protocol is never notified of the end."""
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(2):  # the first creates the transport, the second notifies its protocol
        await asyncio.sleep(0)
    server.close()

"""The connections of one relay: it listens for children, dials parents, and keeps one connection for each link.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Protocol

from ..relay.commands import PeerLink
from ..relay.frames import Message
from .tcp import Connection, incoming, outgoing, stop_listening

Address = tuple[str, int]

_DIAL_TIMEOUT = 2.0


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
        self._all: set[Connection] = set()
        self._none_left = asyncio.Event()
        self._dials: set[asyncio.Task[None]] = set()
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
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

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
        self._all.add(connection)
        return connection

    async def _dial(self, peer: str) -> None:
        connection = self._dialed[PeerLink(peer, up=True)] = outgoing(self, self._secret, self._name, peer)
        self._all.add(connection)
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
                self._all.discard(connection)
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
        self._all.discard(connection)
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

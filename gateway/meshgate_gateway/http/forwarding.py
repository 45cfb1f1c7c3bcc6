"""Forwards the connection of an authenticated client to another server, with other credentials.

A gateway in front of the engines' pod does nothing else (``Forwarder``), and a provisioning gateway does it besides.
What it forwards are the head of a request and then bytes, which it does not read, so it keeps nothing of a session: if
it dies, the client dials another gateway, and both ends of the session send again what the other has not received.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TypeAlias, cast
from urllib.parse import urlsplit

import async_timeout
from pydantic import SecretStr

from meshgate_gateway.http.auth import (
    READING,
    RUNS_PATH,
    Authenticator,
    Denied,
    action_of,
    audit,
    busy,
    credentials_for,
    origin_of,
)
from meshgate_gateway.http.messages import Request, Response
from meshgate_wire.handshake import SOFTWARE_VERSION

CONNECT_TIMEOUT = 5.0
FLUSH_TIMEOUT = 30.0
"""Seconds that the client has, once the server has ended the connection, to take what it has sent."""
FAREWELL_TIMEOUT = 2.0
"""Seconds that the server beside the engines has to close the connections of a gateway that ends."""
MAX_CONNECTIONS = 512
_READS = {*READING.values(), action_of(RUNS_PATH, "GET")}

Address: TypeAlias = tuple[str, int]


class EnginesUnavailable(Exception):
    """The server beside the engines is not known, or does not answer. The message is for the client, who retries."""


class Forwarder:
    """Responds to requests by forwarding them to the server beside the engines. ``find`` returns its address, or raises
    EnginesUnavailable; ``key`` is what that server accepts. ``job``: what identifies the job in the audit log."""

    def __init__(
        self,
        authenticator: Authenticator,
        key: SecretStr,
        find: Callable[[], Awaitable[Address]],
        job: Mapping[str, str],
    ) -> None:
        self._authenticator, self._key, self._find, self._job = authenticator, key, find, job
        self._found = False  # the server, at least once
        self._connections: set[asyncio.Task[None]] = set()

    async def respond(self, request: Request, connection: socket.socket) -> Response | None:
        """The response, or None if the connection is now forwarded. Raises MalformedRequest."""
        path = urlsplit(request.path).path
        if path in ("/healthz", "/readyz"):
            return await self._health(path)
        verb = action_of(path, request.method)
        audited = partial(audit, "forward", origin_of(request, connection), verb=verb, **self._job)
        caller = await self._authenticator.authenticate(request)
        if isinstance(caller, Denied):
            audited(caller=None, refused=caller.reason)
            return caller.response()
        if len(self._connections) >= MAX_CONNECTIONS:
            return busy(
                f"this gateway forwards {MAX_CONNECTIONS} connections, which is its limit: retry later"
            ).response()
        credentials = credentials_for(request, caller.end_user, self._key, identity=caller.name)
        try:
            upstream = await self._connect()
        except EnginesUnavailable as error:
            return busy(str(error)).response()
        if verb not in _READS:  # the server beside the engines logs who reads, once a minute
            audited(caller=caller.caller)
        forwarding = forward_bytes(
            connection.dup(), request, path, upstream, credentials, farewell_timeout=FAREWELL_TIMEOUT
        )
        task = asyncio.create_task(forwarding)
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        return None

    async def _health(self, path: str) -> Response:
        """A gateway is ready once it has found the engines: no client is sent to one that has not. Afterwards it says
        itself what keeps it from them."""
        if path == "/readyz" and not self._found:
            try:
                await self._find()
            except EnginesUnavailable as error:
                return busy(str(error)).response()
            self._found = True
        return Response(HTTPStatus.OK, {"status": "ok", "version": SOFTWARE_VERSION})

    async def _connect(self) -> socket.socket:
        host, port = await self._find()  # for each connection, because an earlier answer may be out of date
        try:
            return await _connect(host, port)
        except OSError as error:
            reason = f"the server beside the engines of this job, at {host}:{port}, cannot be reached: {error}"
            raise EnginesUnavailable(reason) from error


async def _connect(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    upstream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        upstream.setblocking(False)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with async_timeout.timeout(CONNECT_TIMEOUT):
            await asyncio.get_running_loop().sock_connect(upstream, (host, port))
    except asyncio.TimeoutError:
        upstream.close()
        raise TimeoutError(f"no connection within {CONNECT_TIMEOUT:g} s") from None
    except BaseException:
        upstream.close()
        raise
    return upstream


async def proxy_bytes(
    connection: socket.socket, request: Request, path: str, host: str, port: int, credentials: Mapping[str, str]
) -> None:
    """As ``forward_bytes``, to the server at ``host``; ends the connection if that cannot be reached."""
    with connection, suppress(OSError):
        await forward_bytes(connection, request, path, await _connect(host, port), credentials)


async def forward_bytes(
    connection: socket.socket,
    request: Request,
    path: str,
    upstream: socket.socket,
    credentials: Mapping[str, str],
    *,
    farewell_timeout: float = 0,
) -> None:
    """Sends ``request``, with ``path`` and ``credentials`` in place of its own, to the server that ``upstream`` is
    connected to; then copies bytes both ways until one side ends. Owns both sockets.

    When it is cancelled, the server gets the end of the client's bytes, and has ``farewell_timeout`` seconds to reply
    to that: an engine closes the websocket, which clients behind a port-forward notice a second before its end.
    """
    loop = asyncio.get_running_loop()
    inner, outer = _Side(), _Side(_head(request, path, credentials) + request.body)
    inner.other, outer.other = outer, inner
    ends = (inner.lost, outer.lost)
    with connection, upstream, suppress(OSError):
        try:
            for each in (connection, upstream):
                each.setblocking(False)
            await loop.connect_accepted_socket(lambda: inner, upstream)
            await loop.connect_accepted_socket(lambda: outer, connection)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=FLUSH_TIMEOUT)
        except asyncio.CancelledError:
            if farewell_timeout and outer.end():
                await asyncio.wait(ends, timeout=farewell_timeout)
            raise
        finally:
            inner.abort()
            outer.abort()


class _Side(asyncio.Protocol):
    """One of two connections. What it receives goes to the other one, and so does its end. Callbacks, because with
    uvloop they take less than half the time of coroutines (docs/decisions/engine-beside-workers.md).

    ``first``, that of the client's side, is sent to the other one before anything that this one receives: a client
    cannot get anything in front of the head with the credentials.
    """

    other: _Side
    transport: asyncio.Transport

    def __init__(self, first: bytes = b"") -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self._first, self._connected, self._ended = first, False, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it
        self._connected = True
        if self.other.lost.done():
            self.transport.close()
        elif self._first:
            self.other.transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        if not self._ended:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Whether this connection stays open: a client may have sent all that it will, and wait for the response. A
        server that has ended reads no more either."""
        if not self._first or self.other.transport.is_closing():
            return False
        self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)
        if self.other._connected:
            self.other.transport.close()  # once it has sent what it has received

    def end(self) -> bool:
        """Ends what the other side gets from this one, whatever arrives here later. False if there is no other side."""
        if not self._connected or self.other.transport.is_closing():
            return False
        self._ended = True
        self.other.transport.write_eof()
        return True

    def abort(self) -> None:
        if self._connected:
            self.transport.abort()


def _head(request: Request, path: str, credentials: Mapping[str, str]) -> bytes:
    """The request head for ``path``, which has no query, with ``credentials``; ``Request.head`` has none."""
    first, _, rest = request.head.partition(b"\r\n")
    method, asked, version = first.split(b" ", 2)
    if query := asked.partition(b"?")[2]:
        path = f"{path}?{query.decode('latin-1')}"
    added = "".join(f"{name}: {value}\r\n" for name, value in credentials.items()).encode("latin-1")
    return b" ".join((method, path.encode("latin-1"), version)) + b"\r\n" + added + rest

"""The HTTP server: accepts connections and reads one request from each, then responds or hands the connection over.

It uses plain sockets instead of streams, because a handed-over descriptor must keep every byte after the request head.
An unauthenticated peer can hold a connection for a few seconds and a few kilobytes. When too many connections are
pending, the oldest is closed.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import TypeAlias

import async_timeout

from meshgate_gateway.http.auth import prover_of
from meshgate_gateway.http.messages import HeadParser, MalformedRequest, Request, Response
from meshgate_gateway.logs import EventLog

log = EventLog()

Handler: TypeAlias = Callable[[Request, socket.socket], Awaitable["Response | None"]]

HEAD_TIMEOUT = 10.0
HANDLER_TIMEOUT = 30.0
SEND_TIMEOUT = 5.0
LINGER = 1.0  # seconds to let pending responses finish
MAX_PENDING = 256
LOG_INTERVAL = 10.0  # seconds between events about closed connections
BACKLOG = 512
ACCEPT_RETRY_DELAY = 0.1  # seconds to wait while the kernel has no descriptor for another connection
RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    # Where Kubernetes itself uses IPv6, pods may have no address of IPv4.
    everywhere = host == "0.0.0.0" and ":" in os.environ.get("KUBERNETES_SERVICE_HOST", "")
    host = "::" if everywhere else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = everywhere and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


class LocalSocket:
    """A listening unix socket in a directory that only this user can enter. Small messages take half as long as over
    TCP."""

    def __init__(self, path: str, listener: socket.socket) -> None:
        self.path, self.listener = path, listener
        listener.setblocking(False)

    @classmethod
    def create(cls) -> LocalSocket:
        path = f"{tempfile.mkdtemp(prefix='meshgate_')}/gateway"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(BACKLOG)
        return cls(path, listener)

    @classmethod
    def adopt(cls, path: str, descriptor: int) -> LocalSocket:
        """The socket of an earlier server."""
        return cls(path, socket.socket(fileno=descriptor))

    def remove(self) -> None:
        self.listener.close()
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)


class Server:
    """Serves connections until closed. ``handler`` returns None if it has handed the connection over. ``name`` is that
    of the gateway in the proofs of its responses."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        handler: Handler,
        *,
        head_timeout: float = HEAD_TIMEOUT,
        max_pending: int = MAX_PENDING,
        name: str = "",
    ) -> None:
        self._listeners, self._handler, self._name = listeners, handler, name
        self._head_timeout, self._max_pending = head_timeout, max_pending
        self._loop = asyncio.get_running_loop()
        self._pending: dict[asyncio.Task[None], None] = {}  # oldest first
        self._closed_early = 0  # connections above the limit that the log does not mention yet
        self._log_timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Accepts until cancelled."""
        await asyncio.gather(*map(self._accept, self._listeners))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in RESOURCE_ERRORS:
                    log.warning("cannot accept connections", reason=str(error))
                    await asyncio.sleep(ACCEPT_RETRY_DELAY)
                continue
            if len(self._pending) >= self._max_pending:
                self._close_oldest()
                await asyncio.sleep(0)  # lets it close: accepting alone does not yield while connections wait
            task = self._loop.create_task(self._serve_connection(connection, str(peer[0]) if peer else "this machine"))
            self._pending[task] = None
            task.add_done_callback(functools.partial(self._forget, connection))

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._pending.pop(task, None)
        connection.close()  # a task that is cancelled before it starts does not

    def _close_oldest(self) -> None:
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        oldest.cancel()
        self._closed_early += 1
        if self._log_timer is None:
            self._log_closed_early()

    def _log_closed_early(self) -> None:
        """Logs how many connections were closed since the last time, at most once in ``LOG_INTERVAL``."""
        self._log_timer = None
        if self._closed_early:
            facts = {"limit": self._max_pending, "closed": self._closed_early}
            log.warning("too many pending connections; closed the oldest", **facts)
            self._closed_early = 0
            self._log_timer = self._loop.call_later(LOG_INTERVAL, self._log_closed_early)

    async def close(self) -> None:
        """Stops listening and gives pending responses a moment to finish."""
        for listener in self._listeners:
            listener.close()
        if self._pending:
            await asyncio.wait([*self._pending], timeout=LINGER)
        for task in [*self._pending]:
            task.cancel()
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_closed_early()
        if self._log_timer is not None:
            self._log_timer.cancel()

    async def _serve_connection(self, connection: socket.socket, peer: str) -> None:
        with connection:
            try:
                connection.setblocking(False)
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                response = await self._respond(connection, peer)
                if response is not None:
                    await self._send(connection, response)
            except (OSError, EOFError, asyncio.TimeoutError):  # the peer has disconnected, or does not read
                return

    async def _respond(self, connection: socket.socket, peer: str) -> bytes | None:
        """The response to send; None if the connection was handed over."""
        try:
            async with async_timeout.timeout(self._head_timeout):
                request = await self._read_head(connection)
            prover = prover_of(request)
        except asyncio.TimeoutError:
            seconds = f"{self._head_timeout:g}"
            return Response.error(HTTPStatus.REQUEST_TIMEOUT, f"no complete request within {seconds} s").encode()
        except MalformedRequest as error:
            return self._reject(error, peer).encode()
        response = await self._handle(request, connection, peer)
        if response is None:
            return None
        return response.encode(with_body=request.method != "HEAD", prover=prover, gateway=self._name)

    async def _handle(self, request: Request, connection: socket.socket, peer: str) -> Response | None:
        try:
            async with async_timeout.timeout(HANDLER_TIMEOUT):
                return await self._handler(request, connection)
        except asyncio.TimeoutError:
            return Response.error(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway is overloaded: retry later")
        except MalformedRequest as error:
            return self._reject(error, peer)
        except Exception:
            log.exception("request failed", path=request.path, peer=peer)
            return Response.error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: see the gateway's log")

    def _reject(self, error: MalformedRequest, peer: str) -> Response:
        log.info("malformed request", peer=peer, reason=str(error))
        return Response.error(error.status, str(error))

    async def _read_head(self, connection: socket.socket) -> Request:
        parser = HeadParser()
        while True:
            data = await self._loop.sock_recv(connection, 4096)
            if not data:
                raise EOFError
            if request := parser.feed(data):
                return request

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        """Sends the response and closes so that even a peer that is still sending can read all of it."""
        async with async_timeout.timeout(SEND_TIMEOUT):
            await self._loop.sock_sendall(connection, data)
        connection.shutdown(socket.SHUT_WR)
        async with async_timeout.timeout(LINGER):
            await self._drain(connection)

    async def _drain(self, connection: socket.socket) -> None:
        for _ in range(64):
            if not await self._loop.sock_recv(connection, 4096):
                return

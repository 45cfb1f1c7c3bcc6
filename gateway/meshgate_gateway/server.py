"""Accepts connections and reads one request from each, within limits, until it is answered or handed on.

Plain sockets, not streams: what is handed on is the descriptor, so not one byte after the head may be read here.
A stranger can hold a connection for some seconds and a few kilobytes, no more; when too many do, the one that
has dawdled longest gives way.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import TypeAlias

import structlog

from meshgate_gateway.http import HeadParser, MalformedRequest, Request, Response

__all__ = ["LocalSocket", "Server", "listen"]

log = structlog.get_logger()

Answer: TypeAlias = Callable[[Request, socket.socket], Awaitable["Response | None"]]

HEAD_TIMEOUT = 10.0
ANSWER_TIMEOUT = 30.0
SEND_TIMEOUT = 5.0
LINGER = 1.0
MAX_UNANSWERED = 256
BACKLOG = 512
PAUSE = 0.1  # when the kernel has no descriptor for another connection
RESOURCE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


class LocalSocket:
    """A unix socket to listen at, in a directory that only this user enters: half of TCP's time for a small message."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="meshgate_")
        self.path = f"{self._directory.name}/gateway"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)

    def remove(self) -> None:
        self.listener.close()
        self._directory.cleanup()


class Server:
    """Serves its listeners until closed. ``answer`` returns None when it has handed the connection on."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        answer: Answer,
        *,
        head_timeout: float = HEAD_TIMEOUT,
        max_unanswered: int = MAX_UNANSWERED,
    ) -> None:
        self._listeners, self._answer = listeners, answer
        self._head_timeout, self._max_unanswered = head_timeout, max_unanswered
        self._loop = asyncio.get_running_loop()
        self._conversations: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def serve(self) -> None:
        """Accepts until cancelled."""
        await asyncio.gather(*map(self._accept, self._listeners))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in RESOURCE_ERRORS:
                    log.warning("cannot accept a connection", reason=str(error))
                    await asyncio.sleep(PAUSE)
                continue
            if len(self._conversations) >= self._max_unanswered:
                log.warning("too many unanswered connections", limit=self._max_unanswered)
                next(iter(self._conversations)).cancel()
            task = self._loop.create_task(self._converse(connection, str(peer[0]) if peer else "this machine"))
            self._conversations[task] = None
            task.add_done_callback(lambda done: self._conversations.pop(done, None))

    async def close(self) -> None:
        """Stops listening and lets answers under way finish, for a moment."""
        for listener in self._listeners:
            listener.close()
        if self._conversations:
            await asyncio.wait([*self._conversations], timeout=LINGER)
        for task in [*self._conversations]:
            task.cancel()

    async def _converse(self, connection: socket.socket, peer: str) -> None:
        with connection:
            try:
                connection.setblocking(False)
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                method, response = await self._respond(connection, peer)
                if response is not None:
                    await self._send(connection, response.encode(with_body=method != "HEAD"))
            except (OSError, EOFError, asyncio.TimeoutError):  # the peer is gone, or does not read
                return

    async def _respond(self, connection: socket.socket, peer: str) -> tuple[str, Response | None]:
        try:
            request = await asyncio.wait_for(self._read_head(connection), self._head_timeout)
        except asyncio.TimeoutError:
            seconds = f"{self._head_timeout:g}"
            return "", Response.error(HTTPStatus.REQUEST_TIMEOUT, f"no complete request within {seconds} s")
        except MalformedRequest as error:
            return "", self._refuse(error, peer)
        try:
            return request.method, await asyncio.wait_for(self._answer(request, connection), ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            return request.method, Response.error(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway is too busy")
        except MalformedRequest as error:
            return request.method, self._refuse(error, peer)
        except Exception:
            log.exception("a request failed", path=request.path, peer=peer)
            return request.method, Response.error(HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway's log says why")

    def _refuse(self, error: MalformedRequest, peer: str) -> Response:
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
        """Sends and closes so that the peer can read it all, even if it is still sending itself."""
        await asyncio.wait_for(self._loop.sock_sendall(connection, data), SEND_TIMEOUT)
        connection.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(self._drain(connection), LINGER)

    async def _drain(self, connection: socket.socket) -> None:
        for _ in range(64):
            if not await self._loop.sock_recv(connection, 4096):
                return

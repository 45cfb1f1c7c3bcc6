"""Conversations with callers that want jobs, whatever the cluster: a websocket at ``/v1/jobs`` for each request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Generic, TypeVar

from meshgate_gateway.http.auth import Denied, Origin, audit, origin_of, prover_of
from meshgate_gateway.http.messages import MalformedRequest, Request, Response
from meshgate_gateway.http.text_websocket import TextWebSocket

PATH = "/v1/jobs"

CallerT = TypeVar("CallerT")


class Conversations(Generic[CallerT]):
    """The open conversations, one task each."""

    def __init__(
        self,
        authenticate: Callable[[Request], Awaitable[CallerT | Denied]],
        converse: Callable[[TextWebSocket, CallerT, Origin], Awaitable[None]],
    ) -> None:
        """``converse`` receives the request of an authenticated caller and sends the replies."""
        self._authenticate, self._converse = authenticate, converse
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, path: str, request: Request, connection: socket.socket) -> Response | None:
        """The response, or None if a conversation has begun. Raises MalformedRequest."""
        if path != PATH:
            reason = f"this gateway serves {PATH} and the gateways of jobs below it, not {path}"
            return Response.error(HTTPStatus.NOT_FOUND, reason)
        if not request.is_websocket:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"{PATH} needs a websocket handshake: no Upgrade header")
        origin = origin_of(request, connection)
        caller = await self._authenticate(request)
        if isinstance(caller, Denied):
            audit("start job", origin, caller=None, refused=caller.reason)
            return caller.response()
        websocket = TextWebSocket(connection.dup(), request.head, prover_of(request))
        task = asyncio.create_task(self._run(websocket, caller, origin))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, connection: TextWebSocket, caller: CallerT, origin: Origin) -> None:
        async with connection:
            await self._converse(connection, caller, origin)

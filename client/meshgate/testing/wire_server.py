"""The gateway's side of the wire over real websockets, in a thread of the test's process: everything but the cluster.

Sessions survive cuts as they do in the real gateway. What a request does is up to the handlers in ``on``.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import async_timeout
from typing_extensions import Self
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import OPEN

from meshgate_wire import Established, Fragments, Header, MessageReceived, Pump, Role, Session
from meshgate_wire.proof import NONCE_HEADER, PROOF_HEADER, Prover

T = TypeVar("T")
TIMEOUT = 30.0  # seconds that work on the server's loop may take


class ServerSession:
    """One session, as the gateway sees it. All methods run on the server's loop."""

    def __init__(self, server: WireServer) -> None:
        self.server = server
        self.wire = Session(Role.GATEWAY)
        self.link: _Link | None = None
        self.pump: Pump | None = None

    def send(self, header: Header, *buffers: bytes, stream: int = 0) -> None:
        """Sends a message to the client, now or when it has connected again."""
        self.wire.send(header, buffers, stream=stream)
        self.flush()

    def flush(self) -> None:
        """Writes what is ready to be sent."""
        if self.pump is not None:
            self.pump.flush()

    def connected(self, link: _Link) -> None:
        """Continues the session on ``link``, in place of an older connection."""
        if self.link is not None:
            self.link.transport.abort()
        self.link = link
        self.pump = Pump(self.wire, link)
        self.wire.connection_made()
        self.pump.flush()

    def disconnected(self, link: _Link) -> None:
        """Keeps the session for the next connection."""
        if link is self.link:
            assert self.pump is not None
            self.pump.close()
            self.link = self.pump = None
            self.wire.connection_lost()

    def data_received(self, link: _Link, data: bytes) -> None:
        """Passes the messages in ``data`` to the server's handlers."""
        if link is not self.link:
            return
        self.server.websocket_messages += 1
        for event in self.wire.receive_data(data):
            if isinstance(event, MessageReceived):
                self.server.received.append(event.header)
                self.server.dispatch(self, event.header, event.buffers)
            else:
                assert isinstance(event, Established)
        self.flush()


Handler: TypeAlias = Callable[[Any, Any, Sequence[Fragments]], None]
"""Takes the session, the header and the buffers of a request."""


class _Link(ServerConnection):
    """A websocket that passes binary messages to its session as they arrive, without a task for each."""

    session: ServerSession | None = None

    def process_event(self, event: Any) -> None:
        if self.session is not None and type(event) is Frame and event.opcode is Opcode.BINARY:
            self.session.data_received(self, bytes(event.data))
        else:
            super().process_event(event)

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self.protocol.state is OPEN:
            self.protocol.send_binary(b"".join(pieces))
            self.send_data()

    def buffered(self) -> int:
        return self.transport.get_write_buffer_size()

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay, callback)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.session is not None:
            self.session.flush()


class WireServer:
    """Accepts sessions on ``url`` inside a ``with`` block and passes each request to its handler in ``on``.

    ``received`` lists the headers of all requests, ``requests`` the HTTP headers of all connections. ``refuse`` can
    return a status and a JSON body with which to refuse a connection. ``proves``: whether a response is the gateway's
    own, and not that of an ingress in its place.
    """

    token = "the-token"
    name = "abc"

    def __init__(self) -> None:
        self.on: dict[type, Handler] = {}
        self.received: list[Header] = []
        self.requests: list[Headers] = []
        self.websocket_messages = 0
        self.refuse: Callable[[Request], tuple[int, dict[str, Any]] | None] = lambda request: None
        self.proves: Callable[[Response], bool] = lambda response: True
        self.sessions: dict[str, ServerSession] = {}
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshgate-wire-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self.run(self._serve())
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"ws://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the server's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT)

    def do(self, function: Callable[[], T]) -> T:
        """Calls ``function`` on the server's loop and returns its result."""

        async def run() -> T:
            return function()

        return self.run(run())

    def do_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Calls ``function`` on the server's loop without waiting for it; does nothing once the server has stopped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def new_session(self) -> ServerSession:
        """Makes a session for a client that connects for the first time."""
        return ServerSession(self)

    def dispatch(self, session: ServerSession, header: Header, buffers: Sequence[Fragments]) -> None:
        """Passes a request to its handler; ignores a request without one."""
        handler = self.on.get(type(header))
        if handler is not None:
            handler(session, header, buffers)

    def cut(self) -> None:
        """Resets the connection of every session; their clients redial."""
        self.do(lambda: _abort(session.link for session in self.sessions.values()))

    def cut_links(self) -> None:
        """Resets every connection, including those of sessions that were removed from ``sessions``."""
        self.do(lambda: _abort(self._links))

    def close(self, code: CloseCode, reason: str) -> None:
        """Closes every connection with a websocket close code."""
        for session in list(self.sessions.values()):
            if session.link is not None:
                self.run(session.link.close(code, reason))

    async def _serve(self) -> Server:
        server: Server = await serve(
            self._serve_connection,
            "127.0.0.1",
            0,
            process_request=self._check_request,
            process_response=self._prove,
            create_connection=_Link,
            compression=None,
            max_size=None,
            ping_interval=None,
            write_limit=(128 << 10, 32 << 10),
        )
        return server

    async def _stop(self) -> None:
        self._server.close(close_connections=False)
        _abort(session.link for session in self.sessions.values())
        await asyncio.sleep(0)
        async with async_timeout.timeout(10):
            await self._server.wait_closed()

    def _check_request(self, link: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request.headers)
        refusal = self.refuse(request)
        if refusal is None and request.headers.get("Authorization") != f"Bearer {self.token}":
            refusal = 401, {"error": "the token is wrong: set MESHGATE_TOKEN"}
        if refusal is None:
            return None
        status, body = refusal
        data = json.dumps(body).encode()
        headers = Headers({"Content-Length": str(len(data)), "Connection": "close"})
        return Response(status, http.HTTPStatus(status).phrase, headers, data)

    def _prove(self, link: ServerConnection, request: Request, response: Response) -> None:
        """Adds the proof that this response is the gateway's."""
        presented = request.headers.get("Authorization", "").partition(" ")[2]
        prover = Prover.of_request(request.headers.get(NONCE_HEADER), presented)
        if prover is not None and self.proves(response):
            proof = prover.prove(self.name, response.status_code, bytes(response.body or b""))
            response.headers[PROOF_HEADER] = proof

    async def _serve_connection(self, link: ServerConnection) -> None:
        assert isinstance(link, _Link)
        assert link.request is not None
        session_id = link.request.path.rpartition("/")[2]
        self._links.add(link)
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = self.new_session()
        link.session = session
        session.connected(link)
        await link.wait_closed()
        self._links.discard(link)
        session.disconnected(link)


def _abort(links: Iterable[_Link | None]) -> None:
    for link in links:
        if link is not None:
            link.transport.abort()

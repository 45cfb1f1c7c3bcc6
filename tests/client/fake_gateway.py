"""A gateway without Monarch: the true wire over a true websocket, and a function in place of the actors.

It keeps sessions over cuts as the real one does, records every message it was sent, and answers calls by running
the endpoint's function here, in the test's own process. What a test wants different it overrides in ``on``.
"""

from __future__ import annotations

import asyncio
import http
import io
import json
import math
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import OPEN

from meshgate.shape import Region
from meshgate_wire import Established, Fragments, Header, MessageReceived, Pump, Role, Session
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Done,
    EndSession,
    Host,
    HostsAttached,
    Initialized,
    Item,
    MeshRef,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
    stream_of,
)

TOKEN = "the-token"
Handler = Callable[["FakeSession", Any, Sequence[Fragments]], None]


class FakeSession:
    """One session's side of the gateway. Runs on the gateway's loop."""

    def __init__(self, gateway: FakeGateway) -> None:
        self.gateway = gateway
        self.wire = Session(Role.GATEWAY)
        self.link: _Link | None = None
        self.pump: Pump | None = None
        self.ranks: dict[int, list[int]] = {}  # of each object: its base ranks

    def attached(self, link: _Link) -> None:
        if self.link is not None:
            self.link.transport.abort()
        self.link = link
        self.pump = Pump(self.wire, link)
        self.wire.connection_made()
        self.pump.flush()

    def detached(self, link: _Link) -> None:
        if link is self.link:
            assert self.pump is not None
            self.pump.close()
            self.link = self.pump = None
            self.wire.connection_lost()

    def data(self, link: _Link, data: bytes) -> None:
        if link is not self.link:
            return
        self.gateway.websocket_messages += 1
        for event in self.wire.receive_data(data):
            if isinstance(event, MessageReceived):
                self.gateway.received.append(event.header)
                self.gateway.dispatch(self, event.header, event.buffers)
            else:
                assert isinstance(event, Established)
        self.flush()

    def send(self, header: Header, *buffers: bytes, stream: int = 0) -> None:
        self.wire.send(header, buffers, stream=stream)
        self.flush()

    def flush(self) -> None:
        if self.pump is not None:
            self.pump.flush()

    def ranks_of(self, ref: MeshRef) -> list[int]:
        """The base ranks that ``ref`` names."""
        return self.ranks[ref.object] if ref.region is None else list(Region.from_wire(ref.region).slice())


class _Link(ServerConnection):
    session: FakeSession | None = None

    def process_event(self, event: Any) -> None:
        if self.session is not None and type(event) is Frame and event.opcode is Opcode.BINARY:
            self.session.data(self, bytes(event.data))
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


class FakeGateway:
    """Serves on ``url`` inside a ``with`` block. ``functions[endpoint](rank, *args, **kwargs)`` answers calls."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.functions = functions
        self.hosts = ("workers-0", "workers-1")
        self.received: list[Header] = []
        self.requests: list[Headers] = []
        self.websocket_messages = 0
        self.refuse: Callable[[Request], tuple[int, dict[str, Any]] | None] = lambda request: None
        self.sessions: dict[str, FakeSession] = {}
        self.on: dict[type, Handler] = {
            AttachHosts: self._attach,
            SpawnProcs: self._spawn_procs,
            SpawnActors: self._spawn_actors,
            Call: self._call,
            Stop: lambda session, header, _: session.send(
                Done(call=header.call), stream=stream_of(header.target.object)
            ),
            Initialized: lambda session, header, _: session.send(Done(call=header.call)),
            EndSession: lambda session, header, _: session.send(Done(call=header.call)),
        }
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-gateway", daemon=True)

    def __enter__(self) -> FakeGateway:
        self._thread.start()
        self._server = self.run(self._serve())
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Any) -> Any:
        """Runs a coroutine on the gateway's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def do(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` on the gateway's loop."""

        async def run() -> Any:
            return function()

        return self.run(run())

    def session(self) -> FakeSession:
        """The one session there is."""
        (session,) = self.sessions.values()
        return session

    def got(self, kind: type) -> list[Any]:
        """The messages of a type, in the order in which they came."""
        return [header for header in self.received if type(header) is kind]

    def dispatch(self, session: FakeSession, header: Header, buffers: Sequence[Fragments]) -> None:
        handler = self.on.get(type(header))
        if handler is not None:
            handler(session, header, buffers)

    async def _serve(self) -> Server:
        return await serve(
            self._connected,
            "127.0.0.1",
            0,
            process_request=self._request,
            create_connection=_Link,
            compression=None,
            max_size=None,
            ping_interval=None,
            write_limit=(128 << 10, 32 << 10),
        )

    async def _stop(self) -> None:
        self._server.close(close_connections=False)
        for session in self.sessions.values():
            if session.link is not None:
                session.link.transport.abort()
        await asyncio.sleep(0)
        await asyncio.wait_for(self._server.wait_closed(), 10)

    def _request(self, link: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request.headers)
        refusal = self.refuse(request)
        if refusal is None and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            refusal = 401, {"error": "the token is wrong: set MESHGATE_TOKEN"}
        if refusal is None:
            return None
        status, body = refusal
        data = json.dumps(body).encode()
        headers = Headers({"Content-Length": str(len(data)), "Connection": "close"})
        return Response(status, http.HTTPStatus(status).phrase, headers, data)

    async def _connected(self, link: ServerConnection) -> None:
        assert isinstance(link, _Link)
        assert link.request is not None
        number = link.request.path.rpartition("/")[2]
        self._links.add(link)
        session = self.sessions.setdefault(number, FakeSession(self))
        link.session = session
        session.attached(link)
        await link.wait_closed()
        self._links.discard(link)
        session.detached(link)

    def cut(self) -> None:
        """Ends every connection without a word."""
        self.do(lambda: [session.link.transport.abort() for session in self.sessions.values() if session.link])

    def cut_links(self) -> None:
        """Ends every connection, of forgotten sessions too."""
        self.do(lambda: [link.transport.abort() for link in self._links])

    def close(self, code: CloseCode, reason: str) -> None:
        """Ends every connection with a reason."""
        for session in list(self.sessions.values()):
            if session.link is not None:
                self.run(session.link.close(code, reason))

    # --- what it answers

    def _attach(self, session: FakeSession, header: AttachHosts, _: Sequence[Fragments]) -> None:
        session.ranks[header.object] = list(range(len(self.hosts)))
        session.send(HostsAttached(object=header.object, hosts=tuple(Host(name=name) for name in self.hosts)))

    def _spawn_procs(self, session: FakeSession, header: SpawnProcs, _: Sequence[Fragments]) -> None:
        size = len(session.ranks_of(header.hosts)) * math.prod(header.per_host.values())
        session.ranks[header.object] = list(range(size))

    def _spawn_actors(self, session: FakeSession, header: SpawnActors, _: Sequence[Fragments]) -> None:
        session.ranks[header.object] = session.ranks_of(header.procs)

    def _call(self, session: FakeSession, header: Call, buffers: Sequence[Fragments]) -> None:
        if header.adverb == "broadcast":
            return
        function = self.functions[header.endpoint]
        args, kwargs = unpickle(header, buffers)
        ranks = session.ranks_of(header.target)
        if header.adverb == "choose":
            ranks = ranks[:1]
        values = [pickle.dumps(function(rank, *args, **kwargs)) for rank in ranks]
        stream = stream_of(header.target.object)
        if header.adverb == "stream":
            for position, value in enumerate(values):
                session.send(Item(call=header.call, rank=position), value, stream=stream)
        else:
            session.send(Values(call=header.call), *values, stream=stream)


class Reference:
    """What stands in the arguments for a proxy."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument


def unpickle(header: Any, buffers: Sequence[Fragments]) -> Any:
    """The ``(args, kwargs)`` of a call, a :class:`Reference` where a proxy was."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Reference:
            return Reference(header.arguments[pid])

    data, *beside = (buffer.join() for buffer in buffers)
    return Unpickler(io.BytesIO(data), buffers=beside).load()

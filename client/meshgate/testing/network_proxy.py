"""A TCP proxy that stands in for the network between a driver and a gateway: it delays, cuts, freezes and refuses.

In a test::

    with NetworkProxy("127.0.0.1", gateway_port, delay=0.025) as proxy:   # 50 ms round trip
        connect(f"ws://127.0.0.1:{proxy.port}")
        proxy.cut()

For measurements, run it as its own process, so that it does not compete with the client for the interpreter::

    python -m meshgate.testing 127.0.0.1:43211 --delay 0.025      # prints the port it listens on

Each read is delivered ``delay`` seconds after it arrived, whatever else is in flight. With a ``rate``, in bytes a
second for each direction, all connections share a link as slow as that, and a read is delivered once its last byte has
passed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Literal, TypeVar, cast

from meshgate_sync.transport.connections import stop_listening

T = TypeVar("T")

_IN_FLIGHT_LIMIT = 64 << 20
_QUEUE = 0.1  # seconds
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class NetworkProxy:
    """Forwards connections to ``host:port``; use it as a context manager. ``delay`` is in seconds, ``rate`` in bytes a
    second for each direction, of all connections together; 0: as fast as it can.

    All methods can be called from any thread and take effect before they return.
    """

    def __init__(self, host: str, port: int, *, delay: float = 0.0, rate: float = 0.0) -> None:
        self.target = (host, port)
        self.delay, self.rate = delay, rate
        self.frozen = False
        self.accepted = 0
        self.forwarded = 0  # bytes that arrived so far, from either end
        self.port = 0
        self._pairs: set[_Pair] = set()
        self._budgets: dict[str, int] = {}  # by direction: bytes that may pass before the next cut
        self._free = {"up": 0.0, "down": 0.0}  # when all that has arrived will have passed the link
        self._server: asyncio.Server | None = None
        self._bound: socket.socket | None = None  # keeps the port from others while it refuses connections
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshgate-network-proxy", daemon=True)

    def __enter__(self) -> NetworkProxy:
        self._thread.start()
        self._on_loop(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        if self._bound is not None:
            self._bound.close()
        self._on_loop(self._settle)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def connections(self) -> int:
        """The number of open connections through the proxy."""
        return len(self._pairs)

    def cut(self) -> None:
        """Resets every connection and drops the data in flight. New connections are accepted."""
        self._call(self._cut)

    def cut_after(self, nbytes: int, direction: Literal["up", "down"] = "up") -> None:
        """Calls ``cut`` once ``nbytes`` more have passed ``up`` to or ``down`` from the target."""
        self._call(lambda: self._budgets.__setitem__(direction, nbytes))

    def freeze(self) -> None:
        """Stops forwarding without closing anything, as when a laptop sleeps or a cable is unplugged."""
        self._call(lambda: self._set_frozen(True))

    def thaw(self) -> None:
        """Resumes forwarding; delivers the data that arrived in the meantime."""
        self._call(lambda: self._set_frozen(False))

    def refuse(self) -> None:
        """Resets every connection and refuses new ones until ``accept``."""
        self._on_loop(self._stop_listening)

    def accept(self) -> None:
        """Accepts connections again, on the same port."""
        self._on_loop(self._listen)

    async def _listen(self) -> None:
        if self._bound is not None:
            self._bound.close()
        self._server = await self._loop.create_server(
            lambda: _Side(self, None), "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None
            self._bound = socket.socket()
            self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # a child of this process that was not executed holds the port as well
                self._bound.bind(("127.0.0.1", self.port))
        self._cut()

    async def _settle(self) -> None:
        if dialing := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(dialing)
        for _ in range(2):  # aborted transports call connection_lost in the next turn of the loop
            await asyncio.sleep(0)

    def _cut(self) -> None:
        for pair in list(self._pairs):
            pair.cut()

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for pair in list(self._pairs):  # what is delivered may be the bytes after which all are cut
            pair.up.pump()
            pair.down.pump()

    def _due(self, direction: str, nbytes: int) -> float:
        """The time to deliver ``nbytes`` that have just arrived."""
        now = self._loop.time()
        if not self.rate:
            return now + self.delay
        self._free[direction] = max(now, self._free[direction]) + nbytes / self.rate
        return self._free[direction] + self.delay

    @property
    def _in_flight_limit(self) -> float:
        """Bytes. Of a slow link it is what fits onto it and into the short queue before it, as a router has."""
        return min(_IN_FLIGHT_LIMIT, self.rate * (self.delay + _QUEUE)) if self.rate else _IN_FLIGHT_LIMIT

    def _allowed(self, direction: str, wanted: int) -> int:
        """How many of ``wanted`` bytes may pass before the next cut."""
        budget = self._budgets.get(direction)
        if budget is None:
            return wanted
        self._budgets[direction] = budget - min(budget, wanted)
        return min(budget, wanted)

    def _cut_is_due(self, direction: str) -> bool:
        if self._budgets.get(direction) != 0:
            return False
        del self._budgets[direction]
        return True

    def _call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self._on_loop(run)

    def _on_loop(self, function: Callable[[], Coroutine[object, object, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result(30)


class _Side(asyncio.Protocol):
    """One side of a proxied connection; ``pair`` is None on the accepting side until it is connected."""

    def __init__(self, proxy: NetworkProxy, pair: _Pair | None) -> None:
        self.proxy = proxy
        self.pair = pair
        self.outgoing: _Direction | None = None  # for data read from this side
        self.incoming: _Direction | None = None  # for data written to this side
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.pair is None:
            self.proxy.accepted += 1
            self.pair = _Pair(self.proxy, self)
        else:
            self.pair.connected()

    def data_received(self, data: bytes) -> None:
        assert self.outgoing is not None
        self.proxy.forwarded += len(data)
        self.outgoing.put(data)

    def eof_received(self) -> bool:
        assert self.outgoing is not None
        self.outgoing.put(b"")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.pair is not None
        self.transport = None
        if exc is not None:
            self.pair.cut()
        else:
            self.pair.lost(self)

    def pause_writing(self) -> None:
        if self.incoming is not None:
            self.incoming.paused = True

    def resume_writing(self) -> None:
        if self.incoming is not None:
            self.incoming.paused = False
            self.incoming.pump()


class _Direction:
    """The data in flight from one side to the other, each read with the time it is due. ``b""`` is end of file."""

    def __init__(self, pair: _Pair, name: str, source: _Side, sink: _Side) -> None:
        self.pair, self.name, self.source, self.sink = pair, name, source, sink
        self.chunks: deque[tuple[float, bytes]] = deque()
        self.in_flight = 0
        self.paused = False
        self.timer: asyncio.TimerHandle | None = None
        source.outgoing = self
        sink.incoming = self

    def put(self, data: bytes) -> None:
        proxy = self.pair.proxy
        self.chunks.append((proxy._due(self.name, len(data)), data))
        self.in_flight += len(data)
        if self.in_flight > proxy._in_flight_limit and self.source.transport is not None:
            self.source.transport.pause_reading()
        self.pump()

    def pump(self) -> None:
        proxy, transport = self.pair.proxy, self.sink.transport
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        while self.chunks and not (self.paused or proxy.frozen or transport is None or self.pair.is_cut):
            due, data = self.chunks[0]
            if (proxy.delay or proxy.rate) and due > proxy._loop.time():
                self.timer = proxy._loop.call_at(due, self.pump)
                return
            self.chunks.popleft()
            self._deliver(transport, data)

    def _deliver(self, transport: asyncio.Transport, data: bytes) -> None:
        proxy = self.pair.proxy
        self.in_flight -= len(data)
        if not data:
            try:
                if not transport.is_closing():
                    transport.write_eof()
            except OSError:  # the sink has reset the connection, and the event loop has not read that yet
                self.pair.cut()
                return
            self.pair.half_closed()
            return
        transport.write(data[: proxy._allowed(self.name, len(data))])
        if proxy._cut_is_due(self.name):
            proxy._cut()
        elif self.in_flight <= proxy._in_flight_limit and self.source.transport is not None:
            self.source.transport.resume_reading()


class _Pair:
    """Both sides of a proxied connection."""

    def __init__(self, proxy: NetworkProxy, accepted: _Side) -> None:
        self.proxy = proxy
        self.is_cut = False
        self.accepted = accepted
        self.dialed = _Side(proxy, self)
        self.up = _Direction(self, "up", accepted, self.dialed)
        self.down = _Direction(self, "down", self.dialed, accepted)
        self.open = 2
        self.ended = 0
        proxy._pairs.add(self)
        self.dialing = proxy._loop.create_task(self._dial())

    async def _dial(self) -> None:
        try:
            await self.proxy._loop.create_connection(lambda: self.dialed, *self.proxy.target)
        except OSError:
            self.cut()

    def connected(self) -> None:
        if self.is_cut:
            self.cut()
        self.up.pump()

    def half_closed(self) -> None:
        self.ended += 1
        if self.ended == 2:
            for side in (self.accepted, self.dialed):
                if side.transport is not None:
                    side.transport.close()

    def lost(self, side: _Side) -> None:
        self.open -= 1
        if self.open == 0 or self.is_cut:
            self.proxy._pairs.discard(self)

    def cut(self) -> None:
        self.is_cut = True
        self.dialing.cancel()
        for side in (self.accepted, self.dialed):
            if side.transport is not None:
                with contextlib.suppress(OSError):
                    side.transport.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
                    )
                side.transport.abort()
        self.proxy._pairs.discard(self)

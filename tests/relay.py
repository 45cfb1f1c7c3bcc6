"""A TCP relay that stands for the network between a laptop and a gateway: it delays, cuts, freezes and refuses.

In a test::

    with Relay("127.0.0.1", gateway_port, delay=0.025) as relay:   # 50 ms round trip
        connect(f"ws://127.0.0.1:{relay.port}")
        relay.cut()

For measurements it runs as a process of its own, so that it takes no time from the client's interpreter::

    python tests/relay.py 127.0.0.1:43211 --delay 0.025      # prints its own port on the first line

Every chunk is delivered ``delay`` seconds after it came, whatever else is on its way: latency, not bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Literal, TypeVar, cast

from meshgate_sync.tcp import stop_listening

T = TypeVar("T")

_IN_FLIGHT_LIMIT = 64 << 20
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relay:
    """Forwards connections to ``host:port``. All methods may be called from any thread and act before they return."""

    def __init__(self, host: str, port: int, *, delay: float = 0.0) -> None:
        self.target = (host, port)
        self.delay = delay
        self.frozen = False
        self.accepted = 0
        self.port = 0
        self._pairs: set[_Pair] = set()
        self._budgets: dict[str, int] = {}  # bytes that may still pass, by direction, before the next cut
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._on_loop(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._on_loop(self._settle)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def connections(self) -> int:
        """How many connections pass through the relay now."""
        return len(self._pairs)

    def cut(self) -> None:
        """Resets every connection; what was on its way is lost. New ones are accepted."""
        self._call(self._cut)

    def cut_after(self, nbytes: int, direction: Literal["up", "down"] = "up") -> None:
        """Cuts as :meth:`cut` does, once ``nbytes`` more have passed ``up`` to or ``down`` from the target."""
        self._call(lambda: self._budgets.__setitem__(direction, nbytes))

    def freeze(self) -> None:
        """Forwards nothing more, closes nothing: a laptop asleep, a cable pulled."""
        self._call(lambda: self._set_frozen(True))

    def thaw(self) -> None:
        self._call(lambda: self._set_frozen(False))

    def refuse(self) -> None:
        """Cuts, and refuses new connections until :meth:`accept`."""
        self._on_loop(self._stop_listening)

    def accept(self) -> None:
        """Listens again, on the same port."""
        self._on_loop(self._listen)

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(
            lambda: _End(self, None), "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            await stop_listening(self._server)
            self._server = None
        self._cut()

    async def _settle(self) -> None:
        if dialling := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(dialling)
        for _ in range(2):  # aborted transports tell of their end in the next turn of the loop
            await asyncio.sleep(0)

    def _cut(self) -> None:
        for pair in list(self._pairs):
            pair.cut()

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for pair in self._pairs:
            pair.up.pump()
            pair.down.pump()

    def _allowed(self, direction: str, wanted: int) -> int:
        """How many of ``wanted`` bytes may pass before the cut that is due."""
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


class _End(asyncio.Protocol):
    """One end of a relayed connection; ``pair`` is None on the accepting end until it is connected."""

    def __init__(self, relay: Relay, pair: _Pair | None) -> None:
        self.relay = relay
        self.pair = pair
        self.outgoing: _Direction | None = None  # where received data goes
        self.incoming: _Direction | None = None  # what is written here
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.pair is None:
            self.relay.accepted += 1
            self.pair = _Pair(self.relay, self)
        else:
            self.pair.connected()

    def data_received(self, data: bytes) -> None:
        assert self.outgoing is not None
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
    """What is on its way from one end to the other, each chunk with the time it is due. ``b""`` is end of file."""

    def __init__(self, pair: _Pair, name: str, source: _End, sink: _End) -> None:
        self.pair, self.name, self.source, self.sink = pair, name, source, sink
        self.chunks: deque[tuple[float, bytes]] = deque()
        self.in_flight = 0
        self.paused = False
        self.timer: asyncio.TimerHandle | None = None
        source.outgoing = self
        sink.incoming = self

    def put(self, data: bytes) -> None:
        loop = self.pair.relay._loop
        self.chunks.append((loop.time() + self.pair.relay.delay, data))
        self.in_flight += len(data)
        if self.in_flight > _IN_FLIGHT_LIMIT and self.source.transport is not None:
            self.source.transport.pause_reading()
        self.pump()

    def pump(self) -> None:
        relay, transport = self.pair.relay, self.sink.transport
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        while self.chunks and not (self.paused or relay.frozen or transport is None or self.pair.is_cut):
            due, data = self.chunks[0]
            if relay.delay and due > relay._loop.time():
                self.timer = relay._loop.call_at(due, self.pump)
                return
            self.chunks.popleft()
            self._deliver(transport, data)

    def _deliver(self, transport: asyncio.Transport, data: bytes) -> None:
        relay = self.pair.relay
        self.in_flight -= len(data)
        if not data:
            if not transport.is_closing():
                transport.write_eof()
            self.pair.half_closed()
            return
        transport.write(data[: relay._allowed(self.name, len(data))])
        if relay._cut_is_due(self.name):
            relay._cut()
        elif self.in_flight <= _IN_FLIGHT_LIMIT and self.source.transport is not None:
            self.source.transport.resume_reading()


class _Pair:
    """Both ends of a relayed connection."""

    def __init__(self, relay: Relay, accepted: _End) -> None:
        self.relay = relay
        self.is_cut = False
        self.accepted = accepted
        self.dialled = _End(relay, self)
        self.up = _Direction(self, "up", accepted, self.dialled)
        self.down = _Direction(self, "down", self.dialled, accepted)
        self.open = 2
        self.ended = 0
        relay._pairs.add(self)
        self.dialling = relay._loop.create_task(self._dial())

    async def _dial(self) -> None:
        try:
            await self.relay._loop.create_connection(lambda: self.dialled, *self.relay.target)
        except OSError:
            self.cut()

    def connected(self) -> None:
        if self.is_cut:
            self.cut()
        self.up.pump()

    def half_closed(self) -> None:
        self.ended += 1
        if self.ended == 2:
            for end in (self.accepted, self.dialled):
                if end.transport is not None:
                    end.transport.close()

    def lost(self, end: _End) -> None:
        self.open -= 1
        if self.open == 0 or self.is_cut:
            self.relay._pairs.discard(self)

    def cut(self) -> None:
        self.is_cut = True
        self.dialling.cancel()
        for end in (self.accepted, self.dialled):
            if end.transport is not None:
                with contextlib.suppress(OSError):
                    end.transport.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
                    )
                end.transport.abort()
        self.relay._pairs.discard(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port to forward to")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds each way")
    options = parser.parse_args()
    host, _, port = options.target.rpartition(":")
    with Relay(host, int(port), delay=options.delay) as relay, contextlib.suppress(KeyboardInterrupt):
        print(relay.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()

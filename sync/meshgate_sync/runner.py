"""Runs a relay: carries its commands out on TCP connections and a store, and tells it what came of them.

The event loop never waits for the disk: the store has a thread of its own. When the disk does not keep up with
the network, reading from the parents pauses, and the laptop is asked for no more.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from .commands import (
    Ask,
    Begin,
    Command,
    Connect,
    Describe,
    Disconnect,
    Finish,
    Forget,
    Keep,
    Link,
    Load,
    Report,
    ReportTrouble,
    Reserve,
    Send,
)  # fmt: skip
from .digest import piece_digest, short
from .disk import Begun, Disk, Loaded, Made
from .errors import MalformedMessage
from .frames import Data, Message, Offer, encode_frame
from .plan import Routes
from .questions import Questions
from .relay import Relay
from .store import Store
from .store_thread import StoreThread
from .tcp import Connection, accepting, dialling, stop_listening
from .timing import Timing

__all__ = ["Address", "Gateway", "Runner"]

Address = tuple[str, int]

_TICK = 0.05
_DIAL_SECONDS = 2.0
_MOST_ASKED = 64 * 1024 * 1024
_UPKEEP_SECONDS = 0.5


class Gateway(Protocol):
    """What the engine gives to the relay at the root: called in the relay's event loop."""

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """Get these pieces from the laptop, and hand each to ``Runner.supply``."""
        ...

    def report(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None: ...

    def report_trouble(self, hosts: tuple[tuple[str, str], ...]) -> None: ...


_T = TypeVar("_T")


def _why(reason: Exception | None) -> str:
    if isinstance(reason, OSError) and reason.errno:
        return os.strerror(reason.errno)
    return str(reason) if reason is not None else "it hung up"


class Runner:
    """A relay at work. One event loop; ``close`` before the loop ends. ``owner`` names the session whose versions
    these are, for the store."""

    def __init__(
        self, name: str, store: Store, *, secret: bytes, owner: str = "", gateway: Gateway | None = None,
        timing: Timing | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.disk = Disk(store, owner)
        self.relay: Relay | None = None
        self._secret = secret
        self._gateway = gateway
        self._timing = timing
        self._addresses: dict[str, Address] = {}
        self._links: dict[Link, Connection] = {}
        self._waiting: dict[Connection, list[Message]] = {}
        self._dialled: dict[Link, Connection] = {}
        self._connections: set[Connection] = set()
        self._none_left = asyncio.Event()
        self._dials: set[asyncio.Task[None]] = set()
        self._thread = StoreThread(self.disk, self)
        self._questions = Questions(_MOST_ASKED)
        self._working = False
        self._newest: bytes | None = None
        self._reserved: set[bytes] = set()
        self._due: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    def _accept(self) -> Connection:
        connection = accepting(self, self._secret)
        self._connections.add(connection)
        return connection

    def configure(self, routes: Routes | None, addresses: Mapping[str, Address]) -> None:
        """Starts to take part: with ``routes``, as a host; without, as the gateway. Called once. Connections that came
        earlier have waited for this."""
        assert self.relay is None
        self._addresses.update(addresses)
        self.relay = Relay(self.name, routes, roots=self.disk.store.records.trees, timing=self._timing)
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self.relay.start(self._now())
        waiting, self._waiting = self._waiting, {}
        for connection, messages in waiting.items():
            self.opened(connection)
            self.received(connection, messages)
            connection.resume_reading()
        self._work()

    def moved(self, addresses: Mapping[str, Address]) -> None:
        """Hosts that had ended are there again, at these addresses."""
        self._addresses.update(addresses)
        if self.relay is not None:
            self.relay.moved(addresses, self._now())
            self._work()

    async def close(self) -> None:
        """Ends connections and tasks; what the store is doing is waited for. The store stays open."""
        self._closed = True
        self._thread.stop()
        if self._due is not None:
            self._due.cancel()
        tasks = [task for task in (self._ticker, *self._dials) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await stop_listening(self._server)
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            await self._none_left.wait()
        await self._thread.close()

    # --- for the engine ---------------------------------------------------------------------------------

    def publish(self, offer: Offer, retire: Iterable[bytes] = ()) -> None:
        assert self.relay is not None
        self.relay.publish(offer, self._now(), retire=retire)
        self._work()

    def hold(self, root: bytes) -> None:
        assert self.relay is not None
        self.relay.hold(root, self._now())
        self._work()

    def supply(self, pieces: list[tuple[bytes, bytes]]) -> None:
        """Pieces from the laptop, their digests checked by the caller."""
        assert self.relay is not None
        for digest, data in pieces:
            self._questions.came(digest)
            self.relay.supplied(digest, data, self._now())
        self._work()
        self._ask()

    # --- tcp.Listener -----------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if self.relay is None:
            connection.pause_reading()
            self._waiting[connection] = []
            return
        link = Link(connection.peer, connection.up)
        if connection.up and self._dialled.pop(link, None) is not connection:
            connection.close()
            return
        earlier = self._links.get(link)
        self._links[link] = connection
        if earlier is not None and earlier is not connection:
            earlier.close()
        if connection.up:
            if self._thread.behind:
                connection.pause_reading()
            self.relay.connected(connection.peer, self._now())
        else:
            self.relay.accepted(connection.peer, self._now())
        self._work()

    def received(self, connection: Connection, messages: list[Message]) -> None:
        link = Link(connection.peer, connection.up)
        if self.relay is None:
            self._waiting[connection] += messages
            return
        if self._links.get(link) is not connection:
            return
        now = self._now()
        for message in messages:
            if isinstance(message, Data) and piece_digest(message.data) != message.digest:
                raise MalformedMessage(f"piece {short(message.digest)} is not what its digest says")
            self.relay.received(link, message, now)
        self._work()

    def drained(self, connection: Connection, size: int) -> None:
        link = Link(connection.peer, connection.up)
        if self.relay is not None and self._links.get(link) is connection:
            self.relay.sent(link, size, self._now())
            self._work()

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        self._connections.discard(connection)
        if self._closed and not self._connections:
            self._none_left.set()
        link = Link(connection.peer, connection.up)
        self._waiting.pop(connection, None)
        if self._closed or self.relay is None:
            return
        why = ""
        if self._links.get(link) is connection:
            del self._links[link]
        elif self._dialled.get(link) is connection:
            del self._dialled[link]
            host, port = self._addresses.get(link.peer, ("an unknown address", 0))
            why = f"cannot reach {link.peer or 'the gateway'} at {host}:{port} ({_why(reason)})"
        else:
            return
        self.relay.lost(link, self._now(), why)
        self._work()

    # --- commands ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Carries out what the relay wants done. Frames to one link go out in one write."""
        if self._working or self.relay is None or self._closed:
            return
        self._working = True
        try:
            while commands := self.relay.commands():
                frames: dict[Link, tuple[list[bytes], list[int]]] = {}
                for command in commands:
                    if isinstance(command, Send):
                        parts, sizes = frames.setdefault(command.link, ([], []))
                        parts += encode_frame(command.message)
                        if isinstance(command.message, Data):
                            sizes.append(len(command.message.data))
                    elif isinstance(command, Keep):
                        self._thread.keep(command.digest, command.data)
                    else:
                        if isinstance(command, Disconnect):
                            self._flush(command.link, frames)
                        self._carry_out(command)
                for link in list(frames):
                    self._flush(link, frames)
            self._thread.keep_many()
        finally:
            self._working = False
        if self.relay.deadline is not None and self._due is None:
            self._due = asyncio.get_running_loop().call_at(self.relay.deadline, self._wake)

    def _wake(self) -> None:
        self._due = None
        if self.relay is not None and not self._closed:
            self.relay.tick(self._now())
            self._work()

    def _flush(self, link: Link, frames: dict[Link, tuple[list[bytes], list[int]]]) -> None:
        parts, sizes = frames.pop(link, ([], []))
        connection = self._links.get(link)
        if connection is not None and parts:
            connection.write(parts, sum(sizes))

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Connect):
            dial = asyncio.get_running_loop().create_task(self._dial(command.peer))
            self._dials.add(dial)
            dial.add_done_callback(self._dials.discard)
        elif isinstance(command, Disconnect):
            self._disconnect(command.link)
        elif isinstance(command, Begin):
            self._thread.run(
                lambda: self.disk.begin(command.offer), lambda begun: self._begun(command.offer.root, begun)
            )
        elif isinstance(command, Finish):
            self._thread.run(lambda: self.disk.finish(command), lambda made: self._finished(command.root, made))
        elif isinstance(command, Load):
            self._thread.run(lambda: self.disk.load(command), lambda loaded: self._loaded(command, loaded))
        elif isinstance(command, Describe):
            self._thread.run(lambda: self.disk.describe(command.root), lambda delta: self._described(command, delta))
        elif isinstance(command, Forget):
            self._questions.forget(command.root)
            self._thread.run(lambda: self.disk.store.forget(command.root), lambda _: None)
        elif isinstance(command, Reserve):
            self._reserved.add(command.root)
            self._thread.run(lambda: self.disk.hold(command.root), lambda failure: self._held(command.root, failure))
        elif isinstance(command, Ask):
            self._questions.add(command.root, dict(zip(command.digests, command.sizes, strict=True)))
            self._ask()
        elif isinstance(command, Report):
            assert self._gateway is not None
            self._gateway.report(command.root, command.ready, command.failed)
        elif isinstance(command, ReportTrouble):
            assert self._gateway is not None
            self._gateway.report_trouble(command.hosts)

    def _disconnect(self, link: Link) -> None:
        for connections in (self._links, self._dialled) if link.up else (self._links,):
            connection = connections.pop(link, None)
            if connection is not None:
                connection.close()

    async def _dial(self, peer: str) -> None:
        connection = self._dialled[Link(peer, up=True)] = dialling(self, self._secret, self.name, peer)
        self._connections.add(connection)
        try:
            address = self._addresses.get(peer)
            if address is None:
                raise ConnectionError(f"the address of {peer or 'the gateway'} is not known")
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.create_connection(lambda: connection, *address), _DIAL_SECONDS)
        except asyncio.TimeoutError:
            self.closed(connection, TimeoutError(f"no connection within {_DIAL_SECONDS:.0f} s"))
        except OSError as problem:
            self.closed(connection, problem)
        except asyncio.CancelledError:
            if not connection.made:
                self._connections.discard(connection)
            raise

    def _ask(self) -> None:
        """Asks the laptop for more, if the disk keeps up with what came."""
        if self._gateway is not None and not self._thread.behind:
            for root, digests in self._questions.due():
                self._gateway.ask(root, digests)

    # --- store_thread.Listener --------------------------------------------------------------------------

    def unkept(self, failure: str) -> None:
        assert self.relay is not None
        self.relay.failed(None, failure, self._now())

    def disk_behind(self, behind: bool) -> None:
        assert self.relay is not None
        (self.relay.pause if behind else self.relay.resume)(self._now())
        self._ask()
        for link, connection in self._links.items():
            if link.up:
                (connection.pause_reading if behind else connection.resume_reading)()

    def store_broke(self, problem: BaseException) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"the store of {self.name or 'the gateway'} failed unexpectedly", "exception": problem}
        )
        assert self.relay is not None
        self.relay.failed(None, f"unexpectedly: {problem!r}", self._now())

    def store_stepped(self) -> None:
        self._work()

    # --- outcomes of commands ---------------------------------------------------------------------------

    def _begun(self, root: bytes, begun: Begun) -> None:
        assert self.relay is not None
        if begun.baseless:
            self.relay.base_unknown(root, self._now())
        elif begun.failure is not None:
            self.relay.failed(root, begun.failure, self._now())
        else:
            self.relay.begun(root, begun.missing, self._now())

    def _finished(self, root: bytes, made: Made) -> None:
        assert self.relay is not None
        if made.damaged:
            self.relay.damaged(root, self._now())
        elif made.failure is not None:
            self.relay.failed(root, made.failure, self._now())
        else:
            self._newest = root
            self.relay.finished(root, self._now())

    def _held(self, root: bytes, failure: str | None) -> None:
        assert self.relay is not None
        if failure is not None:
            self.relay.failed(root, failure, self._now())

    def _loaded(self, command: Load, loaded: Loaded) -> None:
        assert self.relay is not None
        self.relay.loaded(command.child, command.root, loaded.read, loaded.unread, loaded.lost, self._now())

    def _described(self, command: Describe, delta: bytes | None) -> None:
        assert self.relay is not None
        if delta is not None:
            self.relay.described(command.child, command.root, delta, self._now())

    # --- time -------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _tick(self) -> None:
        """Wakes the relay when it is due, and looks after the store between versions."""
        upkeep_due = self._now()
        while True:
            assert self.relay is not None
            await asyncio.sleep(_TICK)
            self.relay.tick(self._now())
            self._work()
            if self._newest is not None and self._now() >= upkeep_due:
                upkeep_due = self._now() + _UPKEEP_SECONDS
                newest, reserve = self._newest, self._newest in self._reserved
                self._thread.run(functools.partial(self.disk.look_after, newest, reserve=reserve), lambda _: None)

"""Runs a relay: executes its commands on TCP connections and a store, and passes the results to it.

The event loop never waits for the disk: the store has a thread of its own. While the disk does not keep up with the
network, nothing is read from the parents and nothing more is requested from the client.

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import MalformedMessage
from ..relay.commands import (
    BuildFullDelta,
    Command,
    Connect,
    Disconnect,
    Finish,
    Forget,
    HoldSnapshot,
    PeerLink,
    Prepare,
    ReadPieces,
    ReportStatus,
    ReportUnreachable,
    RequestPieces,
    Send,
    StorePiece,
    Timeouts,
)  # fmt: skip
from ..relay.frames import Data, Message, Offer, encode_frame
from ..relay.plan import Routes
from ..relay.relay import Relay
from ..store.store import Store
from ..tree.tree import piece_digest, short
from .connections import Address, Connections
from .disk import Disk, FinishResult, PrepareResult, ReadResult, StoreThread

__all__ = ["Address", "GatewayCallbacks", "Runner"]

_TICK_INTERVAL = 0.05
_REQUEST_WINDOW = 64 * 1024 * 1024
_MAINTENANCE_INTERVAL = 0.5


@dataclass(slots=True)
class _Version:
    """Pieces not requested yet, and those requested that have not arrived, digest to size."""

    waiting: dict[bytes, int]
    requested: dict[bytes, int] = field(default_factory=dict)


class RequestWindow:
    """At most about ``limit`` bytes of a version are requested at once. Versions do not wait for each other: the
    pieces of one may never arrive, if files changed after it was scanned."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._versions: dict[bytes, _Version] = {}

    def add(self, root: bytes, pieces: Mapping[bytes, int]) -> None:
        """The pieces to request for a version, in this order; replaces earlier ones of the same version."""
        self._versions[root] = _Version(dict(pieces))

    def arrived(self, digest: bytes) -> None:
        for version in self._versions.values():
            version.requested.pop(digest, None)
            version.waiting.pop(digest, None)

    def forget(self, root: bytes) -> None:
        self._versions.pop(root, None)

    def take(self) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """What to request now, by version; it counts as requested. A version takes more once half of its window has
        arrived, so that requests are few."""
        taken = []
        for root, version in list(self._versions.items()):
            size = sum(version.requested.values())
            if size > self._limit // 2:
                continue
            digests = []
            while version.waiting and size < self._limit:
                digest = next(iter(version.waiting))
                version.requested[digest] = version.waiting.pop(digest)
                size += version.requested[digest]
                digests.append(digest)
            if digests:
                taken.append((root, tuple(digests)))
            elif not version.requested:
                del self._versions[root]
        return taken


class GatewayCallbacks(Protocol):
    """What the relay at the gateway needs from the engine; called in the relay's event loop."""

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        """Request these pieces from the client and pass each to ``Runner.supply``."""
        ...

    def report_status(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None: ...

    def report_unreachable(self, hosts: tuple[tuple[str, str], ...]) -> None: ...


class Runner:
    """A relay at work in one event loop; ``close`` before the loop ends. ``owner`` names the session that the versions
    belong to, for the store. ``gateway``: None on a host."""

    def __init__(
        self, name: str, store: Store, *, secret: bytes, owner: str = "", gateway: GatewayCallbacks | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.disk = Disk(store, owner)
        self.relay: Relay | None = None
        self._gateway = gateway
        self._timeouts = timeouts
        self._connections = Connections(name, secret, self)
        self._thread = StoreThread(self.disk, self)
        self._requests = RequestWindow(_REQUEST_WINDOW)
        self._executing = False
        self._newest: bytes | None = None
        self._held: set[bytes] = set()
        self._maintaining = False
        self._wake_up: asyncio.TimerHandle | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        return await self._connections.listen(host, port)

    def configure(self, routes: Routes | None, addresses: Mapping[str, Address]) -> None:
        """Starts to take part: with ``routes`` as a host, without as the gateway. Call once. Connections that were
        accepted earlier have waited for this."""
        assert self.relay is None
        self.relay = Relay(self.name, routes, roots=self.disk.store.records.trees, timeouts=self._timeouts)
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self.relay.start(self._now())
        self._connections.activate(addresses)
        self._execute()

    def restarted(self, addresses: Mapping[str, Address]) -> None:
        """Hosts that had ended are back, at these addresses."""
        self._connections.addresses.update(addresses)
        if self.relay is not None:
            self.relay.restarted(addresses, self._now())
            self._execute()

    async def close(self) -> None:
        """Ends connections and tasks, and waits for the step of the store that is running. The store stays open."""
        self._closed = True
        self._thread.stop()
        if self._wake_up is not None:
            self._wake_up.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._connections.close()
        await self._thread.close()

    @property
    def _running(self) -> Relay:
        assert self.relay is not None
        return self.relay

    # --- for the engine ---------------------------------------------------------------------------------

    def publish(self, offer: Offer, retire: Iterable[bytes] = ()) -> None:
        self._running.publish(offer, self._now(), retire=retire)
        self._execute()

    def hold(self, root: bytes) -> None:
        self._running.versions.hold(root, self._now())
        self._execute()

    def supply(self, pieces: list[tuple[bytes, bytes]]) -> None:
        """Pieces from the client, their digests checked by the caller."""
        for digest, data in pieces:
            self._requests.arrived(digest)
            self._running.supplied(digest, data, self._now())
        self._execute()
        self._request_pieces()

    def _request_pieces(self) -> None:
        """Requests more from the client, if the disk keeps up."""
        if self._gateway is not None and not self._thread.behind:
            for root, digests in self._requests.take():
                self._gateway.request_pieces(root, digests)

    # --- connections.LinkListener -----------------------------------------------------------------------

    def link_opened(self, link: PeerLink) -> None:
        (self._running.connected if link.up else self._running.accepted)(link.peer, self._now())
        self._execute()

    def link_received(self, link: PeerLink, messages: list[Message]) -> None:
        """Raises MalformedMessage for a piece that does not match its digest."""
        now = self._now()
        for message in messages:
            if isinstance(message, Data) and piece_digest(message.data) != message.digest:
                raise MalformedMessage(f"piece {short(message.digest)} does not match its digest")
            self._running.received(link, message, now)
        self._execute()

    def link_drained(self, link: PeerLink, size: int) -> None:
        self._running.sent(link, size, self._now())
        self._execute()

    def link_lost(self, link: PeerLink, reason: str) -> None:
        self._running.lost(link, self._now(), reason)
        self._execute()

    # --- commands ---------------------------------------------------------------------------------------

    def _execute(self) -> None:
        """Executes the commands of the relay. Frames of one link go out in one write."""
        if self._executing or self.relay is None or self._closed:
            return
        self._executing = True
        try:
            while commands := self.relay.commands():
                frames: dict[PeerLink, tuple[list[bytes], list[int]]] = {}
                for command in commands:
                    if isinstance(command, Send):
                        parts, sizes = frames.setdefault(command.link, ([], []))
                        parts += encode_frame(command.message)
                        if isinstance(command.message, Data):
                            sizes.append(len(command.message.data))
                    elif isinstance(command, StorePiece):
                        self._thread.add(command.digest, command.data)
                    else:
                        if isinstance(command, Disconnect):
                            parts, sizes = frames.pop(command.link, ([], []))
                            self._connections.write(command.link, parts, sum(sizes))
                        self._execute_one(command)
                for link, (parts, sizes) in frames.items():
                    self._connections.write(link, parts, sum(sizes))
            self._thread.flush_if_large()
        finally:
            self._executing = False
        if self.relay.deadline is not None and self._wake_up is None:
            self._wake_up = asyncio.get_running_loop().call_at(self.relay.deadline, self._woken)

    def _woken(self) -> None:
        self._wake_up = None
        if not self._closed:
            self._running.tick(self._now())
            self._execute()

    def _execute_one(self, command: Command) -> None:
        disk = self.disk
        if isinstance(command, Connect):
            self._connections.connect(command.peer)
        elif isinstance(command, Disconnect):
            self._connections.disconnect(command.link)
        elif isinstance(command, Prepare):
            self._thread.run(lambda: disk.prepare(command.offer), lambda result: self._prepared(command, result))
        elif isinstance(command, Finish):
            self._thread.run(lambda: disk.finish(command), lambda result: self._finished(command, result))
        elif isinstance(command, ReadPieces):
            self._thread.run(lambda: disk.read(command), lambda result: self._read(command, result))
        elif isinstance(command, BuildFullDelta):
            self._thread.run(lambda: disk.full_delta(command.root), lambda delta: self._full_delta(command, delta))
        elif isinstance(command, Forget):
            self._requests.forget(command.root)
            self._thread.run(lambda: disk.store.abandon(command.root), lambda _: None)
        elif isinstance(command, HoldSnapshot):
            self._held.add(command.root)
            self._thread.run(lambda: disk.hold(command.root), lambda failure: self._hold_done(command, failure))
        elif isinstance(command, RequestPieces):
            self._requests.add(command.root, dict(zip(command.digests, command.sizes, strict=True)))
            self._request_pieces()
        elif isinstance(command, ReportStatus):
            assert self._gateway is not None
            self._gateway.report_status(command.root, command.ready, command.failed)
        elif isinstance(command, ReportUnreachable):
            assert self._gateway is not None
            self._gateway.report_unreachable(command.hosts)

    # --- store_thread.StoreListener ---------------------------------------------------------------------

    def pieces_failed(self, reason: str) -> None:
        self._running.versions.store_failed(reason, self._now())

    def disk_behind(self, behind: bool) -> None:
        (self._running.pause if behind else self._running.resume)(self._now())
        self._request_pieces()
        self._connections.pause_parents(behind)

    def step_raised(self, error: BaseException) -> None:
        message = f"a step of the store of {self.name or 'the gateway'} raised an unexpected error"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
        self._running.versions.store_failed(f"unexpected error of the store: {error!r}", self._now())

    def step_done(self) -> None:
        self._execute()

    # --- results of store commands ----------------------------------------------------------------------

    def _prepared(self, command: Prepare, result: PrepareResult) -> None:
        versions, root = self._running.versions, command.offer.root
        if result.base_unknown:
            versions.base_unknown(root, command.attempt, self._now())
        elif result.failure is not None:
            versions.failed(root, command.attempt, result.failure, self._now())
        else:
            versions.prepared(root, command.attempt, result.missing, self._now())

    def _finished(self, command: Finish, result: FinishResult) -> None:
        versions = self._running.versions
        if result.incomplete:
            return  # ``pieces_failed`` has failed the version
        if result.damaged:
            versions.damaged(command.root, command.attempt, self._now())
        elif result.failure is not None:
            versions.failed(command.root, command.attempt, result.failure, self._now())
        else:
            self._newest = command.root
            versions.finished(command.root, command.attempt, self._now())
            self._thread.run(lambda: self.disk.check(command.root), lambda result: self._checked(command, result))

    def _checked(self, command: Finish, result: FinishResult) -> None:
        if result.damaged:
            self._running.versions.damaged(command.root, command.attempt, self._now())
        elif result.failure is not None:
            self._running.versions.failed(command.root, command.attempt, result.failure, self._now())
        self._maintain()

    def _hold_done(self, command: HoldSnapshot, failure: str | None) -> None:
        if failure is not None:
            self._running.versions.hold_failed(command.root, failure, self._now())
        self._maintain()

    def _read(self, command: ReadPieces, result: ReadResult) -> None:
        pieces = result.read, result.unread, result.lost
        self._running.versions.pieces_read(command.child, command.root, *pieces, self._now())

    def _full_delta(self, command: BuildFullDelta, delta: bytes | None) -> None:
        if delta is not None:
            self._running.versions.full_delta_built(command.child, command.root, delta, self._now())

    # --- time -------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _tick(self) -> None:
        """Ticks the relay, and maintains the store between versions."""
        maintenance_due = self._now()
        while True:
            await asyncio.sleep(_TICK_INTERVAL)
            self._running.tick(self._now())
            self._execute()
            if self._now() >= maintenance_due:
                maintenance_due = self._now() + _MAINTENANCE_INTERVAL
                self._maintain()

    def _maintain(self) -> None:
        """Does the store's work between versions, a slice at a time: commands go first."""
        if self._newest is not None and not self._maintaining:
            self._maintaining = True
            newest, held = self._newest, self._newest in self._held
            self._thread.run(functools.partial(self.disk.maintain, newest, held=held), self._maintained)

    def _maintained(self, more: bool) -> None:
        self._maintaining = False
        if more:
            self._maintain()

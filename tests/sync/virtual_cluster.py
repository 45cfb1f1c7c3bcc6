"""Relays with real stores on a virtual clock and a network that delays, cuts and loses, driven by a random source.

After each event the state of the relay that it reached is validated.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from pathlib import Path

from meshgate_sync.relay.commands import (
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
)
from meshgate_sync.relay.frames import Data, Message, Offer, decode_frame, encode_frame
from meshgate_sync.relay.plan import GATEWAY, HostSlot, Plan, plan
from meshgate_sync.relay.relay import Relay
from meshgate_sync.store.store import Store
from meshgate_sync.transport.disk import Disk, FinishResult
from meshgate_sync.tree.delta import diff, encode
from meshgate_sync.tree.tree import EMPTY, NOTHING, Directory, piece_digest
from tests.sync.trees import Content

TICK = 0.1


class VirtualHost:
    """A relay, its store and its connections. ``inbox``: events that happen while it is frozen; ``full``: so is its
    disk."""

    def __init__(self, name: str, home: Path, relay: Relay, disk: Disk) -> None:
        self.name = name
        self.home = home
        self.relay = relay
        self.disk = disk
        self.alive = True
        self.frozen = False
        self.inbox: list[Callable[[], None]] = []
        self.full = False
        self.links: dict[PeerLink, int] = {}
        self.received_bytes = 0

    def snapshot(self, tree: Directory) -> str:
        return self.disk.store.snapshots.path(tree.digest)


class VirtualCluster:
    """Hosts ``names`` in the trees of ``plan``, below a gateway that requests pieces from ``content``."""

    def __init__(
        self, directory: Path, names: list[str], content: Content, *, seed: int = 0, fanout: int = 2, stripes: int = 2,
        window: int = 64,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.content = content
        self.ready: dict[bytes, set[str]] = {}
        self.failed: dict[str, str] = {}
        self.requested: list[bytes] = []
        self.client_is_silent = False
        self.random = random.Random(seed)
        self.plan: Plan = plan([HostSlot(name) for name in names], fanout=fanout, stripes=stripes)
        self._directory = directory
        self._window = window
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.hosts: dict[str, VirtualHost] = {}
        for name in [GATEWAY, *names]:
            self.start(name)

    # --- hosts ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Starts a host, or restarts it with what is on its disk."""
        home = self._directory / (name or "gateway")
        store = Store(str(home), snapshots=name != GATEWAY)
        relay = Relay(name, self.plan.routes.get(name), roots=store.records.trees, window=self._window)
        host = self.hosts[name] = VirtualHost(name, home, relay, Disk(store, "owner"))
        self.call(host, lambda: relay.start(self.now))
        self._schedule(TICK * self.random.random(), lambda: self._tick(host))

    def kill(self, name: str, *, silently: bool = False) -> None:
        """Ends a host as a crash does. ``silently``: its peers are not notified, as after a loss of power."""
        host = self.hosts[name]
        if not host.alive:
            return
        host.alive = False
        host.disk.store.objects.close_assemblies()
        os.close(host.disk.store._held)
        for link in list(host.links):
            if silently:
                del host.links[link]
            else:
                self._cut(host, link)

    def cut(self, child: str, parent: str) -> None:
        link = PeerLink(parent, up=True)
        if link in self.hosts[child].links:
            self._cut(self.hosts[child], link)
            self._schedule(0.0, lambda: self._lost(self.hosts[child], link))

    def freeze(self, name: str) -> None:
        self.hosts[name].frozen = True

    def thaw(self, name: str) -> None:
        host = self.hosts[name]
        host.frozen = False
        inbox, host.inbox = host.inbox, []
        for step in inbox:
            if host.alive:
                self.call(host, step)

    def close(self) -> None:
        for host in self.hosts.values():
            if host.alive:
                host.disk.store.close()

    # --- versions ---------------------------------------------------------------------------------------

    def publish(
        self,
        tree: Directory,
        base: Directory = EMPTY,
        *,
        striped: bool = False,
        inline: bool = False,
        retire: tuple[Directory, ...] = (),
    ) -> None:
        delta = diff(base, tree)
        pieces = tuple(self.content.pieces.items()) if inline else ()
        offer = Offer(tree.digest, delta.base, base.digest if base.entries else NOTHING, striped, encode(delta), pieces)
        gateway = self.hosts[GATEWAY]
        self.call(gateway, lambda: gateway.relay.publish(offer, self.now, retire=[old.digest for old in retire]))

    def supply(self, digest: bytes) -> None:
        """The client sends a piece to the gateway."""
        gateway = self.hosts[GATEWAY]
        self.call(gateway, lambda: gateway.relay.supplied(digest, self.content.pieces[digest], self.now))

    def everyone_ready(self, tree: Directory) -> bool:
        alive = {name for name, host in self.hosts.items() if host.alive and name != GATEWAY}
        return alive <= self.ready.get(tree.digest, set())

    # --- time -------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit: float = 120.0) -> None:
        end = self.now + limit
        while not until():
            assert self.now < end, f"not within {limit} virtual seconds: {self.describe()}"
            self.step()

    def step(self) -> None:
        self.now, _, step = heapq.heappop(self._events)
        step()

    def call(self, host: VirtualHost, step: Callable[[], None]) -> None:
        """Runs ``step`` at a host, executes the commands that follow, and validates the state of its relay."""
        if host.frozen:
            host.inbox.append(step)
            return
        step()
        while commands := host.relay.commands():
            for command in commands:
                self._execute(host, command)
        host.relay.validate_state()
        if host.relay.deadline is not None:
            self._schedule(max(0.0, host.relay.deadline - self.now), lambda: self._wake(host))

    def describe(self) -> str:
        return "; ".join(
            f"{name or 'gateway'}: {[version.state for version in host.relay.versions]}"
            for name, host in self.hosts.items()
            if host.alive
        )

    def _schedule(self, delay: float, step: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay, self._serial, step))

    def _tick(self, host: VirtualHost) -> None:
        if host.alive:
            if not host.frozen:
                self.call(host, lambda: host.relay.tick(self.now))
            self._schedule(TICK, lambda: self._tick(host))

    def _wake(self, host: VirtualHost) -> None:
        if host.alive and not host.frozen and host.relay.deadline is not None and self.now >= host.relay.deadline:
            self.call(host, lambda: host.relay.tick(self.now))

    # --- commands ---------------------------------------------------------------------------------------

    def _execute(self, host: VirtualHost, command: Command) -> None:
        if isinstance(command, Send):
            self._send(host, command.link, command.message)
        elif isinstance(command, Connect):
            self._schedule(self._delay(), lambda: self._connect(host, command.peer))
        elif isinstance(command, Disconnect):
            self._cut(host, command.link)
        elif isinstance(command, StorePiece):
            self._store_piece(host, command)
        elif isinstance(command, ReportStatus):
            self._report_status(command)
        elif isinstance(command, RequestPieces):
            self.requested += command.digests
            if not self.client_is_silent:
                for digest in command.digests:
                    self._schedule(self._delay(), lambda digest=digest: self.supply(digest))  # type: ignore[misc]
        elif isinstance(command, Forget):
            host.disk.store.abandon(command.root)
        elif not isinstance(command, HoldSnapshot | ReportUnreachable):
            result = self._in_store(host, command)
            self._schedule(0.001, lambda: self.call(host, result) if host.alive else None)

    def _report_status(self, command: ReportStatus) -> None:
        self.ready.setdefault(command.root, set()).update(command.ready)
        self.failed = {name: why for name, why in self.failed.items() if name not in command.ready}
        self.failed.update(command.failed)

    def _store_piece(self, host: VirtualHost, command: StorePiece) -> None:
        failure = "no space" if host.full else host.disk.add([(command.digest, command.data)])
        if failure is not None:
            versions = host.relay.versions
            self._schedule(0.0, lambda: self.call(host, lambda: versions.store_failed(failure, self.now)))

    def _in_store(self, host: VirtualHost, command: Command) -> Callable[[], None]:
        """Executes a command of the store at once; returns what reports its result."""
        if isinstance(command, Prepare):
            return self._prepare(host, command)
        if isinstance(command, Finish):
            return self._finish(host, command)
        versions = host.relay.versions
        if isinstance(command, ReadPieces):
            read = host.disk.read(command)
            return lambda: versions.pieces_read(
                command.child, command.root, read.read, read.unread, read.lost, self.now
            )
        assert isinstance(command, BuildFullDelta)
        delta = host.disk.full_delta(command.root)
        assert delta is not None
        return lambda: versions.full_delta_built(command.child, command.root, delta, self.now)

    def _prepare(self, host: VirtualHost, command: Prepare) -> Callable[[], None]:
        versions, root, attempt = host.relay.versions, command.offer.root, command.attempt
        result = host.disk.prepare(command.offer)
        if result.base_unknown:
            return lambda: versions.base_unknown(root, attempt, self.now)
        if result.failure is not None:
            return lambda: versions.failed(root, attempt, result.failure or "", self.now)
        return lambda: versions.prepared(root, attempt, result.missing, self.now)

    def _finish(self, host: VirtualHost, command: Finish) -> Callable[[], None]:
        versions, root, attempt = host.relay.versions, command.root, command.attempt
        result = FinishResult("no space") if host.full else host.disk.finish(command)
        if result.damaged:
            return lambda: versions.damaged(root, attempt, self.now)
        if result.failure is not None:
            return lambda: versions.failed(root, attempt, result.failure or "", self.now)
        checked = host.disk.check(root)

        def finished() -> None:
            versions.finished(root, attempt, self.now)
            if checked.damaged:
                versions.damaged(root, attempt, self.now)

        return finished

    # --- the network ------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return 0.001 + 0.004 * self.random.random()

    def _connect(self, host: VirtualHost, peer: str) -> None:
        other = self.hosts[peer]
        link, back = PeerLink(peer, up=True), PeerLink(host.name, up=False)
        if not host.alive:
            return
        if not other.alive:
            self._schedule(self._delay(), lambda: self._lost(host, link))
            return
        self._serial += 1
        host.links[link] = other.links[back] = self._serial
        self.call(other, lambda: other.relay.accepted(host.name, self.now))
        if back in other.links:
            self.call(host, lambda: host.relay.connected(peer, self.now))

    def _cut(self, host: VirtualHost, link: PeerLink) -> None:
        serial = host.links.pop(link, None)
        other = self.hosts[link.peer]
        back = PeerLink(host.name, up=not link.up)
        if serial is not None and other.links.get(back) == serial:
            del other.links[back]
            self._schedule(self._delay(), lambda: self._lost(other, back))

    def _lost(self, host: VirtualHost, link: PeerLink) -> None:
        if host.alive and link not in host.links:
            self.call(host, lambda: host.relay.lost(link, self.now))

    def _send(self, host: VirtualHost, link: PeerLink, message: Message) -> None:
        serial = host.links.get(link)
        if serial is None:
            return
        frame = b"".join(encode_frame(message))
        # One delay for all, so that messages of a link keep their order.
        self._schedule(0.002, lambda: self._deliver(host, link, serial, frame))

    def _deliver(self, host: VirtualHost, link: PeerLink, serial: int, frame: bytes) -> None:
        other = self.hosts[link.peer]
        back = PeerLink(host.name, up=not link.up)
        if not other.alive or other.links.get(back) != serial:
            return
        message = decode_frame(frame[4:])
        if isinstance(message, Data):
            assert piece_digest(message.data) == message.digest
            other.received_bytes += len(message.data)
        self.call(other, lambda: other.relay.received(back, message, self.now))
        if isinstance(message, Data) and host.alive and host.links.get(link) == serial:
            self.call(host, lambda: host.relay.sent(link, len(message.data), self.now))

"""Relays with real stores on a virtual clock and a network that delays, cuts and loses, steered by a random source."""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from pathlib import Path

from meshgate_sync.commands import (
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
    Reserve,
    Send,
)
from meshgate_sync.delta import decode, diff, encode, whole
from meshgate_sync.digest import NOTHING, piece_digest
from meshgate_sync.disk import Disk, Made
from meshgate_sync.frames import Data, Message, Offer, decode_frame, encode_frame
from meshgate_sync.plan import GATEWAY, HostSlot, Plan, plan
from meshgate_sync.relay import Relay, State
from meshgate_sync.store import Store
from meshgate_sync.tree import EMPTY, Directory
from tests.sync.trees import Content

TICK = 0.1


class Inhabitant:
    def __init__(self, name: str, home: Path, relay: Relay, disk: Disk) -> None:
        self.name = name
        self.home = home
        self.relay = relay
        self.disk = disk
        self.alive = True
        self.frozen = False
        self.inbox: list[Callable[[], None]] = []  # what happens to it while it is frozen
        self.full = False
        self.links: dict[Link, int] = {}
        self.received_bytes = 0


class Village:
    """``names`` on the trees of ``plan``, below a gateway that asks ``content`` for pieces."""

    def __init__(
        self, directory: Path, names: list[str], content: Content, *, seed: int = 0, fanout: int = 2, stripes: int = 2,
        window: int = 64,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.content = content
        self.ready: dict[bytes, set[str]] = {}
        self.failed: dict[str, str] = {}
        self.asked: list[bytes] = []
        self.silent_laptop = False
        self.random = random.Random(seed)
        self.plan: Plan = plan([HostSlot(name) for name in names], fanout=fanout, stripes=stripes)
        self._directory = directory
        self._window = window
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.hosts: dict[str, Inhabitant] = {}
        for name in [GATEWAY, *names]:
            self.start(name)

    # --- hosts ------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Starts a host, or starts it again on what its disk holds."""
        home = self._directory / (name or "gateway")
        store = Store(str(home), snapshots=name != GATEWAY)
        relay = Relay(name, self.plan.routes.get(name), roots=store.records.trees, window=self._window)
        host = self.hosts[name] = Inhabitant(name, home, relay, Disk(store, "owner"))
        self._do(host, lambda: relay.start(self.now))
        self._later(TICK * self.random.random(), lambda: self._tick(host))

    def kill(self, name: str, *, silently: bool = False) -> None:
        """Ends a host as a crash does. ``silently``: its peers are not told, as when its machine loses power."""
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
        link = Link(parent, up=True)
        if link in self.hosts[child].links:
            self._cut(self.hosts[child], link)
            self._later(0.0, lambda: self._lost(self.hosts[child], link))

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
        self._do(gateway, lambda: gateway.relay.publish(offer, self.now, retire=[old.digest for old in retire]))

    def everyone_ready(self, tree: Directory) -> bool:
        alive = {name for name, host in self.hosts.items() if host.alive and name != GATEWAY}
        return alive <= self.ready.get(tree.digest, set())

    def run(self, until: Callable[[], bool], limit: float = 120.0) -> None:
        end = self.now + limit
        while not until():
            assert self.now < end, f"not within {limit} virtual seconds: {self.describe()}"
            self.step()

    def step(self) -> None:
        self.now, _, step = heapq.heappop(self._events)
        step()

    def describe(self) -> str:
        return "; ".join(
            f"{name or 'gateway'}: {[version.state for version in host.relay._versions.values()]}"
            for name, host in self.hosts.items()
            if host.alive
        )

    # --- carrying out -----------------------------------------------------------------------------------

    def _later(self, delay: float, step: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay, self._serial, step))

    def freeze(self, name: str) -> None:
        self.hosts[name].frozen = True

    def thaw(self, name: str) -> None:
        host = self.hosts[name]
        host.frozen = False
        inbox, host.inbox = host.inbox, []
        for step in inbox:
            if host.alive:
                self._do(host, step)

    def _do(self, host: Inhabitant, step: Callable[[], None]) -> None:
        if host.frozen:
            host.inbox.append(step)
            return
        step()
        while commands := host.relay.commands():
            for command in commands:
                self._carry_out(host, command)
        if host.relay.deadline is not None:
            self._later(max(0.0, host.relay.deadline - self.now), lambda: self._wake(host))

    def _tick(self, host: Inhabitant) -> None:
        if host.alive:
            if not host.frozen:
                self._do(host, lambda: host.relay.tick(self.now))
            self._later(TICK, lambda: self._tick(host))

    def _wake(self, host: Inhabitant) -> None:
        if host.alive and not host.frozen and host.relay.deadline is not None and self.now >= host.relay.deadline:
            self._do(host, lambda: host.relay.tick(self.now))

    def _carry_out(self, host: Inhabitant, command: Command) -> None:
        disk = host.disk
        if isinstance(command, Send):
            self._send(host, command.link, command.message)
        elif isinstance(command, Connect):
            self._later(self._delay(), lambda: self._connect(host, command.peer))
        elif isinstance(command, Disconnect):
            self._cut(host, command.link)
        elif isinstance(command, Keep):
            failure = "no space" if host.full else disk.add([(command.digest, command.data)])
            if failure is not None:
                self._later(0.0, lambda: self._do(host, lambda: host.relay.failed(None, failure, self.now)))
        elif isinstance(command, Report):
            self.ready.setdefault(command.root, set()).update(command.ready)
            for name in command.ready:
                self.failed.pop(name, None)
            self.failed.update(command.failed)
        elif isinstance(command, Ask):
            self.asked += command.digests
            if not self.silent_laptop:
                for digest in command.digests:
                    self._later(self._delay(), lambda digest=digest: self.supply(digest))  # type: ignore[misc]
        elif isinstance(command, Forget):
            disk.store.forget(command.root)
        elif not isinstance(command, Reserve):
            self._in_store(host, command)

    def supply(self, digest: bytes) -> None:
        gateway = self.hosts[GATEWAY]
        self._do(gateway, lambda: gateway.relay.supplied(digest, self.content.pieces[digest], self.now))

    def _in_store(self, host: Inhabitant, command: Command) -> None:
        relay, disk = host.relay, host.disk
        if isinstance(command, Begin):
            root = command.offer.root
            begun = disk.begin(command.offer)
            if begun.baseless:
                outcome = lambda: relay.base_unknown(root, self.now)  # noqa: E731
            elif begun.failure is not None:
                outcome = lambda: relay.failed(root, begun.failure or "", self.now)  # noqa: E731
            else:
                outcome = lambda: relay.begun(root, begun.missing, self.now)  # noqa: E731
        elif isinstance(command, Finish):
            made = Made("no space") if host.full else disk.finish(command)
            if made.damaged:
                outcome = lambda: relay.damaged(command.root, self.now)  # noqa: E731
            elif made.failure is None:
                outcome = lambda: relay.finished(command.root, self.now)  # noqa: E731
            else:
                outcome = lambda: relay.failed(command.root, made.failure or "", self.now)  # noqa: E731
        elif isinstance(command, Load):
            loaded = disk.load(command)
            outcome = lambda: relay.loaded(  # noqa: E731
                command.child, command.root, loaded.read, loaded.unread, loaded.lost, self.now
            )
        else:
            assert isinstance(command, Describe)
            delta = disk.describe(command.root)
            if delta is None:
                return
            outcome = lambda: relay.described(command.child, command.root, delta, self.now)  # noqa: E731
        self._later(0.001, lambda: self._do(host, outcome) if host.alive else None)

    # --- the network ------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return 0.001 + 0.004 * self.random.random()

    def _connect(self, host: Inhabitant, peer: str) -> None:
        other = self.hosts[peer]
        link, back = Link(peer, up=True), Link(host.name, up=False)
        if not host.alive:
            return
        if not other.alive:
            self._later(self._delay(), lambda: self._lost(host, link))
            return
        self._serial += 1
        host.links[link] = other.links[back] = self._serial
        self._do(other, lambda: other.relay.accepted(host.name, self.now))
        if back in other.links:
            self._do(host, lambda: host.relay.connected(peer, self.now))

    def _cut(self, host: Inhabitant, link: Link) -> None:
        serial = host.links.pop(link, None)
        other = self.hosts[link.peer]
        back = Link(host.name, up=not link.up)
        if serial is not None and other.links.get(back) == serial:
            del other.links[back]
            self._later(self._delay(), lambda: self._lost(other, back))

    def _lost(self, host: Inhabitant, link: Link) -> None:
        if host.alive and link not in host.links:
            self._do(host, lambda: host.relay.lost(link, self.now))

    def _send(self, host: Inhabitant, link: Link, message: Message) -> None:
        serial = host.links.get(link)
        if serial is None:
            return
        frame = b"".join(encode_frame(message))
        # One delay for all, so that messages of a link keep their order.
        self._later(0.002, lambda: self._deliver(host, link, serial, frame))

    def _deliver(self, host: Inhabitant, link: Link, serial: int, frame: bytes) -> None:
        other = self.hosts[link.peer]
        back = Link(host.name, up=not link.up)
        if not other.alive or other.links.get(back) != serial:
            return
        message = decode_frame(frame[4:])
        if isinstance(message, Data):
            assert piece_digest(message.data) == message.digest
            other.received_bytes += len(message.data)
        self._do(other, lambda: other.relay.received(back, message, self.now))
        if isinstance(message, Data) and host.alive and host.links.get(link) == serial:
            self._do(host, lambda: host.relay.sent(link, len(message.data), self.now))


def snapshot(host: Inhabitant, tree: Directory) -> str:
    return host.disk.store.snapshots.path(tree.digest)


def delta_of(tree: Directory) -> bytes:
    return encode(whole(tree))


__all__ = ["Inhabitant", "State", "Village", "decode", "delta_of", "snapshot"]

"""What a relay owes its children: one queue for each, so that a slow one holds up nobody.

A piece that arrives goes at once to every child that waits for it and has room in its window. For the others it is
noted, and read back from the store when they have room: what is buffered for a child is bounded by its window.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from .commands import Command, Disconnect, Link, Load, Send
from .frames import Alive, Data, Message, Offer

__all__ = ["Child", "Downstream"]

_LOADED_AT_ONCE = 64
_WRITE_STALL = 10.0


@dataclass(slots=True)
class Child:
    """``ready``: pieces to be read from the store for it, as (root, digest); ``waiting``: those not here yet.
    ``greeted``: its Hello has come, so it follows the announcements."""

    greeted: bool = False
    roots: frozenset[bytes] = frozenset()
    ready: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    waiting: dict[bytes, bytes] = field(default_factory=dict)
    in_flight: int = 0
    loading: bool = False
    told: float = 0.0
    moved: float = 0.0


class Downstream:
    """Appends what is to be done to ``commands``."""

    def __init__(self, window: int, heartbeat: float, pulse: float, commands: list[Command]) -> None:
        self.children: dict[str, Child] = {}
        self.piece_bytes_sent = 0
        self.delta_bytes_sent = 0
        self._window = window
        self._heartbeat = heartbeat
        self._pulse = pulse
        self._commands = commands
        self._waiters: dict[bytes, list[str]] = {}

    def add(self, peer: str, now: float) -> None:
        self.remove(peer)
        self.children[peer] = Child(told=now, moved=now)

    def remove(self, peer: str) -> None:
        child = self.children.pop(peer, None)
        if child is not None:
            self._stop_waiting(peer, child.waiting)

    def want(self, peer: str, root: bytes, digests: Iterable[bytes], missing: Container[bytes], now: float) -> None:
        child = self.children[peer]
        for digest in digests:
            if digest in missing:
                if digest not in child.waiting:
                    child.waiting[digest] = root
                    self._waiters.setdefault(digest, []).append(peer)
            else:
                child.ready.append((root, digest))
        self._pump(peer, child, now)

    def unwant(self, peer: str, digests: Iterable[bytes]) -> None:
        child = self.children[peer]
        gone = set(digests)
        self._stop_waiting(peer, gone & child.waiting.keys())
        for digest in gone:
            child.waiting.pop(digest, None)
        child.ready = deque(item for item in child.ready if item[1] not in gone)

    def arrived(self, digest: bytes, data: bytes, now: float) -> None:
        for peer in self._waiters.pop(digest, ()):
            child = self.children[peer]
            root = child.waiting.pop(digest)
            if child.in_flight < self._window:
                self._send_piece(peer, child, digest, data, now)
            else:
                child.ready.append((root, digest))

    def loaded(
        self, peer: str, root: bytes, read: Iterable[tuple[bytes, bytes]], unread: tuple[bytes, ...], now: float
    ) -> None:
        """Pieces read for ``peer``, and those left for the next time."""
        child = self.children.get(peer)
        if child is not None:
            child.loading = False
            child.ready.extendleft((root, digest) for digest in reversed(unread))
            for digest, data in read:
                self._send_piece(peer, child, digest, data, now)
            self._pump(peer, child, now)

    def sent(self, peer: str, size: int, now: float) -> None:
        child = self.children.get(peer)
        if child is not None:
            child.in_flight -= size
            child.moved = now
            self._pump(peer, child, now)

    def tell(self, peer: str, message: Message, now: float) -> None:
        self.children[peer].told = now
        if isinstance(message, Offer):
            self.delta_bytes_sent += len(message.delta)
            self.piece_bytes_sent += sum([len(data) for _, data in message.inline])
        self._commands.append(Send(Link(peer, up=False), message))

    def starve(self, root: bytes) -> list[tuple[str, bytes]]:
        """Takes back all that waits for a version; returns it as (child, digest)."""
        owed = []
        for peer, child in self.children.items():
            digests = [digest for digest, of in child.waiting.items() if of == root]
            owed += [(peer, digest) for digest in digests]
            self._stop_waiting(peer, digests)
            for digest in digests:
                del child.waiting[digest]
        return owed

    def tick(self, now: float, *, hungry: bool, alert: bool) -> None:
        """``hungry``: this relay waits for pieces itself. ``alert``: a version was announced lately."""
        for peer, child in list(self.children.items()):
            if child.in_flight and now - child.moved > _WRITE_STALL:
                self._commands.append(Disconnect(Link(peer, up=False)))
                self.remove(peer)
            elif now - child.told >= (self._pulse if alert or child.waiting or child.ready else self._heartbeat):
                self.tell(peer, Alive(hungry and bool(child.waiting) and not child.ready), now)

    def _pump(self, peer: str, child: Child, now: float) -> None:
        if child.ready and not child.loading and child.in_flight < self._window:
            root = child.ready[0][0]
            digests: list[bytes] = []
            while child.ready and len(digests) < _LOADED_AT_ONCE and child.ready[0][0] == root:
                digests.append(child.ready.popleft()[1])
            child.loading = True
            self._commands.append(Load(peer, root, tuple(digests), self._window // 2))

    def _send_piece(self, peer: str, child: Child, digest: bytes, data: bytes, now: float) -> None:
        if not child.in_flight:
            child.moved = now
        child.in_flight += len(data)
        self.piece_bytes_sent += len(data)
        self.tell(peer, Data(digest, data), now)

    def _stop_waiting(self, peer: str, digests: Iterable[bytes]) -> None:
        for digest in digests:
            waiters = self._waiters.get(digest, [])
            if peer in waiters:
                waiters.remove(peer)
            if not waiters:
                self._waiters.pop(digest, None)

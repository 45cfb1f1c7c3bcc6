"""What a relay owes its children: one queue for each, so that a slow child delays no other.

A piece that arrives goes at once to every child that waits for it and has room in its window. For the others it is
queued by name and read back from the store once they have room: what is buffered for a child is bounded by its window.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from .commands import Command, Disconnect, PeerLink, ReadPieces, Send, Timeouts
from .frames import Data, Heartbeat, Message, Offer

_MAX_READ = 64


@dataclass(slots=True)
class Child:
    """``greeted``: its Hello has arrived, so it follows the announcements; ``roots`` are the versions it holds.

    ``waiting``: requested pieces that are not here yet, digest to root. ``queue``: those to be read from the store,
    (root, digest); ``reading``: a read is under way. ``in_flight``: bytes of pieces on their way. ``sent_at`` is the
    time of the last message to it, ``progressed_at`` that of the last piece that left.
    """

    greeted: bool = False
    roots: frozenset[bytes] = frozenset()
    queue: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    waiting: dict[bytes, bytes] = field(default_factory=dict)
    in_flight: int = 0
    reading: bool = False
    sent_at: float = 0.0
    progressed_at: float = 0.0


class Downstream:
    """Appends what is to be done to ``commands``."""

    def __init__(self, window: int, timeouts: Timeouts, commands: list[Command]) -> None:
        self.children: dict[str, Child] = {}
        self.piece_bytes_sent = 0
        self.delta_bytes_sent = 0
        self._window = window
        self._timeouts = timeouts
        self._commands = commands
        self._waiters: dict[bytes, list[str]] = {}

    def add(self, peer: str, now: float) -> None:
        self.remove(peer)
        self.children[peer] = Child(sent_at=now, progressed_at=now)

    def remove(self, peer: str) -> None:
        child = self.children.pop(peer, None)
        if child is not None:
            self._stop_waiting(peer, child.waiting)

    def disconnect(self, peer: str) -> None:
        self._commands.append(Disconnect(PeerLink(peer, up=False)))
        self.remove(peer)

    def request(self, peer: str, root: bytes, digests: Iterable[bytes], missing: Container[bytes], now: float) -> None:
        """``peer`` requests pieces of a version, of which those in ``missing`` are not here yet."""
        child = self.children[peer]
        for digest in digests:
            if digest in missing:
                if digest not in child.waiting:
                    child.waiting[digest] = root
                    self._waiters.setdefault(digest, []).append(peer)
            else:
                child.queue.append((root, digest))
        self._pump(peer, child)

    def cancel(self, peer: str, digests: Iterable[bytes]) -> None:
        child = self.children[peer]
        gone = set(digests)
        self._stop_waiting(peer, gone & child.waiting.keys())
        for digest in gone:
            child.waiting.pop(digest, None)
        child.queue = deque(item for item in child.queue if item[1] not in gone)

    def arrived(self, digest: bytes, data: bytes, now: float) -> None:
        """A piece arrived here; passes it on."""
        for peer in self._waiters.pop(digest, ()):
            child = self.children[peer]
            root = child.waiting.pop(digest)
            if child.in_flight < self._window:
                self._send_piece(peer, child, digest, data, now)
            else:
                child.queue.append((root, digest))

    def pieces_read(
        self, peer: str, root: bytes, read: Iterable[tuple[bytes, bytes]], unread: tuple[bytes, ...], now: float
    ) -> None:
        """Pieces read for ``peer``, and digests left for the next read."""
        child = self.children.get(peer)
        if child is not None:
            child.reading = False
            child.queue.extendleft((root, digest) for digest in reversed(unread))
            for digest, data in read:
                self._send_piece(peer, child, digest, data, now)
            self._pump(peer, child)

    def sent(self, peer: str, size: int, now: float) -> None:
        """A piece of ``size`` bytes has left for ``peer``."""
        child = self.children.get(peer)
        if child is not None:
            child.in_flight -= size
            child.progressed_at = now
            self._pump(peer, child)

    def send(self, peer: str, message: Message, now: float) -> None:
        self.children[peer].sent_at = now
        if isinstance(message, Offer):
            self.delta_bytes_sent += len(message.delta)
            self.piece_bytes_sent += sum([len(data) for _, data in message.inline])
        self._commands.append(Send(PeerLink(peer, up=False), message))

    def broadcast(self, message: Message, now: float) -> None:
        """To every child that has greeted."""
        for peer, child in self.children.items():
            if child.greeted:
                self.send(peer, message, now)

    def stop_waiting(self, root: bytes) -> list[tuple[str, bytes]]:
        """Drops every request for pieces of a version that are not here yet; returns them, (child, digest)."""
        dropped = []
        for peer, child in self.children.items():
            digests = [digest for digest, of in child.waiting.items() if of == root]
            dropped += [(peer, digest) for digest in digests]
            self._stop_waiting(peer, digests)
            for digest in digests:
                del child.waiting[digest]
        return dropped

    def tick(self, now: float, *, starved: bool, alert: bool) -> None:
        """``starved``: this relay waits for pieces itself. ``alert``: a version was announced lately."""
        timeouts = self._timeouts
        for peer, child in list(self.children.items()):
            busy = alert or child.waiting or child.queue
            interval = timeouts.busy_heartbeat_interval if busy else timeouts.heartbeat_interval
            if child.in_flight and now - child.progressed_at > timeouts.write_timeout:
                self.disconnect(peer)
            elif now - child.sent_at >= interval:
                self.send(peer, Heartbeat(starved and bool(child.waiting) and not child.queue), now)

    def _pump(self, peer: str, child: Child) -> None:
        """Reads the next pieces for a child that has room."""
        if child.queue and not child.reading and child.in_flight < self._window:
            root = child.queue[0][0]
            digests: list[bytes] = []
            while child.queue and len(digests) < _MAX_READ and child.queue[0][0] == root:
                digests.append(child.queue.popleft()[1])
            child.reading = True
            self._commands.append(ReadPieces(peer, root, tuple(digests), self._window // 2))

    def _send_piece(self, peer: str, child: Child, digest: bytes, data: bytes, now: float) -> None:
        if not child.in_flight:
            child.progressed_at = now
        child.in_flight += len(data)
        self.piece_bytes_sent += len(data)
        self.send(peer, Data(digest, data), now)

    def _stop_waiting(self, peer: str, digests: Iterable[bytes]) -> None:
        for digest in digests:
            waiters = self._waiters.get(digest, [])
            if peer in waiters:
                waiters.remove(peer)
            if not waiters:
                self._waiters.pop(digest, None)

    def validate_state(self, roots: Container[bytes]) -> None:
        """Raises AssertionError unless the two indexes of waiting children agree, children wait only for the versions
        ``roots``, and none with room in its window has a queue that is not being read."""
        waiting = {(digest, peer) for peer, child in self.children.items() for digest in child.waiting}
        assert waiting == {(digest, peer) for digest, peers in self._waiters.items() for peer in peers}
        assert len(waiting) == sum(len(peers) for peers in self._waiters.values())
        for peer, child in self.children.items():
            assert child.in_flight >= 0, (peer, child.in_flight)
            assert all(root in roots for root in child.waiting.values()), peer
            assert not child.queue or child.reading or child.in_flight >= self._window, peer

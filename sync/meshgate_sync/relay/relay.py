"""One host's part in handing versions on, without I/O: events in, commands out, time as an argument.

A relay announces a version as soon as it hears of it, requests what it lacks from its parents, passes pieces on as they
arrive, and sends acknowledgements, its own and those from below, towards the gateway. Events are method calls, of
``Relay`` and of ``Relay.versions``; after each the caller takes ``commands()`` and executes them. The gateway's relay
has no routes: it requests pieces from the client.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from .commands import Command, Disconnect, PeerLink, Send, Timeouts
from .downstream import Downstream
from .frames import (
    Ack,
    Cancel,
    Data,
    Heartbeat,
    Hello,
    Hold,
    Message,
    Offer,
    RequestFullDelta,
    Unreachable,
    Want,
    Withdraw,
)
from .plan import Routes
from .status_reporter import StatusReporter
from .upstream import Upstream
from .version_state import VersionState
from .versions import Versions

WINDOW = 2 * 1024 * 1024


class Relay:
    """``routes``: None at the gateway. ``roots``: the versions in the store. ``window``: bytes of pieces on their way
    to one child. Call ``start`` first, ``tick`` every twentieth of a second or so, and, if ``deadline`` is not None, at
    that time. ``versions`` takes the results of store commands."""

    def __init__(
        self, name: str, routes: Routes | None, *, roots: Iterable[bytes] = (), timeouts: Timeouts | None = None,
        window: int = WINDOW,
    ) -> None:  # fmt: skip
        timeouts = timeouts or Timeouts()
        self.name = name
        self._commands: list[Command] = []
        self._upstream = Upstream(name, routes, timeouts, window, self._commands) if routes is not None else None
        self._downstream = Downstream(window, timeouts, self._commands)
        self._status = StatusReporter(name, self._upstream, timeouts.ack_gather_timeout, self._commands)
        self.versions = Versions(
            name, self._upstream, self._downstream, self._status, timeouts, self._commands, roots=roots
        )
        self._serial = 0

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, if that is soon."""
        return self._status.deadline

    def commands(self) -> list[Command]:
        """What is to be done now, each command once."""
        taken = list(self._commands)
        self._commands.clear()
        return taken

    def state(self, root: bytes) -> VersionState | None:
        return self.versions.state(root)

    @property
    def bytes_sent(self) -> int:
        """Bytes of pieces and deltas that were sent to children."""
        return self.piece_bytes_sent + self._downstream.delta_bytes_sent

    @property
    def piece_bytes_sent(self) -> int:
        return self._downstream.piece_bytes_sent

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of pieces that arrived when they were no longer needed."""
        return self._upstream.duplicate_bytes if self._upstream is not None else 0

    # --- the program around it --------------------------------------------------------------------------

    def start(self, now: float) -> None:
        if self._upstream is not None:
            self._upstream.start(now)

    def pause(self, now: float) -> None:
        """The disk does not keep up: nothing is read from the parents until ``resume``."""
        if self._upstream is not None:
            self._upstream.pause(now)

    def resume(self, now: float) -> None:
        if self._upstream is not None:
            self._upstream.resume(now)

    def tick(self, now: float) -> None:
        self._downstream.tick(now, starved=self.versions.starved, alert=self.versions.announced_lately(now))
        if self._upstream is not None:
            control, backup = self._upstream.control, self._upstream.backup
            self._upstream.tick(now)
            self._follow(control, now)
            if self._upstream.backup is not None and backup is None:
                self._status.report_all(self._upstream.backup, now)
            self._status.add_unreachable([(self.name, "; ".join(self._upstream.unreachable.values()))])
        self._status.report_if_due(now)

    # --- at the gateway ---------------------------------------------------------------------------------

    def publish(self, offer: Offer, now: float, *, retire: Iterable[bytes] = ()) -> None:
        """Distributes a version, in place of those in ``retire``."""
        self._serial += 1
        retired = {offer.root, *retire}
        live = tuple(version.root for version in self.versions if version.root not in retired)
        self.versions.offer(replace(offer, serial=self._serial, live=live), None, now)

    def supplied(self, digest: bytes, data: bytes, now: float) -> None:
        """A piece arrived from the client."""
        self.versions.arrived(digest, data, None, now)

    # --- links ------------------------------------------------------------------------------------------

    def connected(self, peer: str, now: float) -> None:
        """The connection to a parent is up."""
        assert self._upstream is not None
        self._upstream.connected(peer, now)
        if peer == self._upstream.control:
            self._greet(now)
        elif peer == self._upstream.backup:
            self._status.report_all(peer, now)

    def _greet(self, now: float) -> None:
        assert self._upstream is not None
        link = PeerLink(self._upstream.control, up=True)
        self._commands.append(Send(link, Hello(self.name, tuple(sorted(self.versions.roots)))))
        self._status.report_all(link.peer, now)
        self._status.report_unreachable(link.peer)
        self.versions.request_full_deltas(link)

    def _follow(self, before: str, now: float) -> None:
        """Greets the control parent if it is not the one ``before`` and the connection to it is up already."""
        assert self._upstream is not None
        if self._upstream.control != before and self._upstream.connected_to_control:
            self._greet(now)

    def restarted(self, peers: Container[str], now: float) -> None:
        """Hosts that had ended are back: the lanes that prefer them return to them."""
        if self._upstream is not None:
            control = self._upstream.control
            self._upstream.restarted(peers, now)
            self._follow(control, now)

    def accepted(self, peer: str, now: float) -> None:
        """A child has connected; its earlier connection is void."""
        if self.versions.store_broken:
            self._commands.append(Disconnect(PeerLink(peer, up=False)))
        else:
            self._downstream.add(peer, now)

    def lost(self, link: PeerLink, now: float, reason: str = "") -> None:
        """A connection ended, or could not be opened for this ``reason``."""
        if not link.up:
            self._downstream.remove(link.peer)
        elif self._upstream is not None:
            control = self._upstream.control
            self._upstream.lost(link.peer, now, reason)
            self._follow(control, now)

    def sent(self, link: PeerLink, size: int, now: float) -> None:
        """A piece of ``size`` bytes has left this host."""
        if not link.up:
            self._downstream.sent(link.peer, size, now)

    # --- messages ---------------------------------------------------------------------------------------

    def received(self, link: PeerLink, message: Message, now: float) -> None:
        """A message arrived. The caller has checked the digest of a piece."""
        if link.up:
            self._from_parent(link.peer, message, now)
        elif link.peer in self._downstream.children:
            self._from_child(link.peer, message, now)

    def _from_parent(self, peer: str, message: Message, now: float) -> None:
        assert self._upstream is not None
        self._upstream.heard(peer, now, starved=isinstance(message, Heartbeat) and message.starved)
        if isinstance(message, Data):
            if self._upstream.received(peer, message.digest, len(message.data), now):
                self.versions.arrived(message.digest, message.data, peer, now)
        elif isinstance(message, Offer):
            self.versions.offer(message, peer, now)
        elif isinstance(message, Withdraw):
            self.versions.withdraw(message.root, now)
        elif isinstance(message, Hold):
            self.versions.hold(message.root, now)

    def _from_child(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, Want):
            self.versions.request_pieces(peer, message.root, message.digests, now)
        elif isinstance(message, Cancel):
            self._downstream.cancel(peer, message.digests)
        elif isinstance(message, Ack):
            self.versions.add_status(message.root, message.ready, dict(message.failed), now)
        elif isinstance(message, Unreachable):
            self._status.add_unreachable(message.hosts)
        elif isinstance(message, Hello):
            child = self._downstream.children[peer]
            child.greeted, child.roots = True, frozenset(message.roots)
            self.versions.introduce(peer, now)
        elif isinstance(message, RequestFullDelta):
            self.versions.request_full_delta(peer, message.root)

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant of the relay or of any of its parts does not hold. For tests."""
        self.versions.validate_state()

"""One host's part in handing versions on, without I/O: events in, commands out, time as an argument.

A relay announces what it hears of at once, asks its parents for what it lacks, passes pieces on as they arrive, and
sends acknowledgements, its own and those from below, towards the gateway. It is told what happened by calling a
method, and what it wants done is taken from ``commands()`` after each. The gateway's relay has no routes: it asks the
laptop.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from .commands import (
    Ask,
    Begin,
    Command,
    Describe,
    Disconnect,
    Finish,
    Forget,
    Keep,
    Link,
    Reserve,
    Send,
)  # fmt: skip
from .digest import NOTHING
from .downstream import Downstream
from .frames import Ack, Alive, Data, Hello, Hold, Message, Offer, Tell, Trouble, Unwant, Want, Withdraw
from .plan import Routes
from .tidings import Tidings
from .timing import Timing
from .upstream import Upstream
from .version import State, Version

__all__ = ["Relay", "State"]

WINDOW = 2 * 1024 * 1024
_RESTARTS = 3


class Relay:
    """``routes``: None at the gateway. Call ``start`` first, ``tick`` every twentieth of a second or so, and, when
    ``deadline`` is not None, at that time."""

    def __init__(
        self, name: str, routes: Routes | None, *, roots: Iterable[bytes] = (), timing: Timing | None = None,
        window: int = WINDOW,
    ) -> None:  # fmt: skip
        self.name = name
        self.roots = set(roots)
        self._timing = timing or Timing()
        self._commands: list[Command] = []
        self._upstream = Upstream(routes, self._timing, window, self._commands) if routes is not None else None
        self._downstream = Downstream(window, self._timing.heartbeat, self._timing.pulse, self._commands)
        self._versions: dict[bytes, Version] = {}
        self._early: dict[bytes, list[tuple[str, tuple[bytes, ...]]]] = {}
        self._tidings = Tidings(self._upstream, self._timing.gather, self._commands)
        self._announced_at = float("-inf")
        self._broken = False
        self._serial = 0

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, if that is soon."""
        return self._tidings.deadline

    def commands(self) -> list[Command]:
        """What is to be done now, each once."""
        taken = list(self._commands)
        self._commands.clear()
        return taken

    def state(self, root: bytes) -> State | None:
        version = self._versions.get(root)
        return version.state if version is not None else None

    @property
    def bytes_sent(self) -> int:
        """Bytes of pieces and deltas that have gone to children."""
        return self.piece_bytes_sent + self._downstream.delta_bytes_sent

    @property
    def piece_bytes_sent(self) -> int:
        return self._downstream.piece_bytes_sent

    @property
    def wasted(self) -> int:
        """Bytes of pieces that came twice."""
        return self._upstream.wasted if self._upstream is not None else 0

    def pause(self, now: float) -> None:
        """The disk does not keep up: nothing is read from the parents until ``resume``."""
        if self._upstream is not None:
            self._upstream.pause(now)

    def resume(self, now: float) -> None:
        if self._upstream is not None:
            self._upstream.resume(now)

    def start(self, now: float) -> None:
        if self._upstream is not None:
            self._upstream.start(now)

    # --- versions ---------------------------------------------------------------------------------------

    def publish(self, offer: Offer, now: float, *, retire: Iterable[bytes] = ()) -> None:
        """At the gateway: a version to hand on, in place of those in ``retire``."""
        self._serial += 1
        retired = set(retire)
        live = tuple(root for root in self._versions if root not in retired and root != offer.root)
        self._offer(replace(offer, serial=self._serial, live=live), now)

    def _offer(self, offer: Offer, now: float) -> None:
        version = self._versions.get(offer.root)
        if version is None:
            version = self._versions[offer.root] = Version(offer.without_pieces())
            self._announced_at = now
            if self._upstream is not None:
                # The parent goes on pulsing a little longer than we rely on it.
                self._upstream.alert_until = now + 0.8 * self._timing.alert_for
            self._announce(offer, now)
            self._commands.append(Begin(offer))
            self._tidings.open(offer.root, now)
        elif version.state is State.BASELESS and offer.base == NOTHING:
            version.offer = offer.without_pieces()
            version.state = State.BEGINNING
            self._commands.append(Begin(offer))
        elif self._tidings.failed(offer.root):
            self._announce(offer, now)
            if version.state is State.FAILED:
                self._begin_again(version)
        self._clear_out(offer, now)

    def _clear_out(self, offer: Offer, now: float) -> None:
        """Gives up what ``offer`` says is of no use any more."""
        for root, version in list(self._versions.items()):
            if version.offer.serial < offer.serial and root != offer.root and root not in offer.live:
                self.withdraw(root, now)

    def _announce(self, offer: Offer, now: float) -> None:
        """Passes an offer on."""
        for peer, child in self._downstream.children.items():
            if child.greeted:
                self._downstream.tell(peer, offer, now)

    def withdraw(self, root: bytes, now: float) -> None:
        """A version is no longer of use: what is not here of it is not asked for any more."""
        version = self._versions.pop(root, None)
        if version is None:
            return
        self._early.pop(root, None)
        self._tidings.close(root)
        self._downstream.starve(root)
        if self._upstream is not None:
            self._upstream.unwant(version.missing)
            for other_root, other in self._versions.items():  # what they lack as well was asked for in this one's name
                shared = {digest: size for digest, size in other.missing.items() if digest in version.missing}
                self._upstream.want(other_root, shared, striped=other.offer.striped, now=now)
        for other in self._versions.values():
            other.offer = replace(other.offer, live=tuple(live for live in other.offer.live if live != root))
        if version.state is not State.READY:
            self._commands.append(Forget(root))
        for peer, child in self._downstream.children.items():
            if child.greeted:
                self._downstream.tell(peer, Withdraw(root), now)

    def hold(self, root: bytes, now: float) -> None:
        """Processes are about to be started from this version; told anew each time, for hosts keep it only for so
        long."""
        version = self._versions.get(root)
        if version is not None:
            version.held = True
            if self._upstream is not None:
                self._commands.append(Reserve(root))
            for peer, child in self._downstream.children.items():
                if child.greeted:
                    self._downstream.tell(peer, Hold(root), now)

    def begun(self, root: bytes, missing: Mapping[bytes, int], now: float) -> None:
        """The store lacks these pieces, digest to size."""
        version = self._versions.get(root)
        if version is None:
            return
        version.state = State.FETCHING
        version.missing = dict(missing)
        self.roots.add(version.offer.root)
        self._unpark(version, now)
        if not missing:
            self._finish(version)
        elif self._upstream is None:
            self._commands.append(Ask(root, tuple(missing), tuple(missing.values())))
        else:
            self._upstream.want(root, missing, striped=version.offer.striped, now=now)

    def base_unknown(self, root: bytes, now: float) -> None:
        version = self._versions.get(root)
        if version is None:
            return
        if self._upstream is None:
            self.failed(root, "the gateway does not hold the version that this one was told against", now)
            return
        version.state = State.BASELESS
        if self._upstream.connected_to_control:
            self._commands.append(Send(Link(self._upstream.control, up=True), Tell(root)))

    def finished(self, root: bytes, now: float) -> None:
        self._broken = False
        version = self._versions.get(root)
        if version is not None:
            version.state = State.READY
            self._note(root, [self.name], {}, now)

    def damaged(self, root: bytes, now: float) -> None:
        """Files of a version whose pieces were all kept have been written to, or have vanished: it is looked through
        again."""
        version = self._versions.get(root)
        if version is None:
            return
        if version.restarts >= _RESTARTS:
            self.failed(root, f"its files were written to in the store {1 + _RESTARTS} times while it was made", now)
        else:
            version.restarts += 1
            self._begin_again(version)

    def failed(self, root: bytes | None, reason: str, now: float) -> None:
        """The store could not begin or finish a version, or, with ``root`` None, keep a piece. The children are sent
        elsewhere, for this host has nothing for them."""
        for of, version in self._versions.items():
            if of == root or (root is None and version.state in (State.FETCHING, State.FINISHING)):
                version.state = State.FAILED
                if self._upstream is not None:
                    self._upstream.unwant(version.missing)
                version.missing = {}
                self._note(of, [], {self.name: reason}, now)
        if self._upstream is not None:
            self._broken = True
            for peer in list(self._downstream.children):
                self._commands.append(Disconnect(Link(peer, up=False)))
                self._downstream.remove(peer)

    def _finish(self, version: Version) -> None:
        version.state = State.FINISHING
        offer = version.offer
        self._commands.append(Finish(offer.root, offer.base, offer.replaces))

    def _begin_again(self, version: Version) -> None:
        version.state = State.BEGINNING
        self._commands.append(Begin(version.offer))

    # --- pieces -----------------------------------------------------------------------------------------

    def supplied(self, digest: bytes, data: bytes, now: float) -> None:
        """A piece came from the laptop."""
        self._piece(digest, data, now)

    def _piece(self, digest: bytes, data: bytes, now: float) -> None:
        lacking = [version for version in self._versions.values() if digest in version.missing]
        if not lacking:
            return
        self._commands.append(Keep(digest, data))
        self._downstream.arrived(digest, data, now)
        for version in lacking:
            del version.missing[digest]
            if not version.missing:
                self._finish(version)

    def _wanted(self, peer: str, root: bytes, digests: tuple[bytes, ...], now: float) -> None:
        version = self._versions.get(root)
        if version is None:
            self._early.setdefault(root, []).append((peer, digests))
        elif version.state in (State.BEGINNING, State.BASELESS):
            version.parked.append((peer, digests))
        else:
            self._downstream.want(peer, root, digests, version.missing, now)

    def _unpark(self, version: Version, now: float) -> None:
        root = version.offer.root
        parked, version.parked = version.parked + self._early.pop(root, []), []
        for peer, digests in parked:
            if peer in self._downstream.children:
                self._downstream.want(peer, root, digests, version.missing, now)
        describe, version.untold_whole = version.untold_whole, []
        for peer in describe:
            self._commands.append(Describe(peer, root))

    def loaded(
        self, child: str, root: bytes, read: list[tuple[bytes, bytes]], unread: tuple[bytes, ...],
        lost: tuple[bytes, ...], now: float,
    ) -> None:  # fmt: skip
        """The outcome of Load: pieces, digests not looked at for lack of room, and digests that are not there or
        corrupt, for which the version is looked through again."""
        self._downstream.loaded(child, root, read, unread, now)
        version = self._versions.get(root)
        if not lost or version is None or child not in self._downstream.children:
            return
        if version.restarts >= _RESTARTS:
            self._commands.append(Disconnect(Link(child, up=False)))
            self._downstream.remove(child)
        elif version.state in (State.BEGINNING, State.BASELESS):
            version.parked.append((child, lost))
        elif version.state is State.FETCHING:
            self._downstream.want(child, root, lost, version.missing, now)
        else:
            version.restarts += 1
            version.parked.append((child, lost))
            version.parked += [(peer, (digest,)) for peer, digest in self._downstream.starve(root)]
            self._begin_again(version)

    def described(self, child: str, root: bytes, delta: bytes, now: float) -> None:
        version = self._versions.get(root)
        if version is not None and child in self._downstream.children:
            whole = replace(version.offer, base=NOTHING, delta=delta)
            self._downstream.tell(child, whole, now)

    # --- links ------------------------------------------------------------------------------------------

    def connected(self, peer: str, now: float) -> None:
        """The connection to a parent is up."""
        assert self._upstream is not None
        self._upstream.connected(peer, now)
        if peer == self._upstream.control:
            self._greet(now)
        elif peer == self._upstream.second:
            self._tidings.tell_everything(peer, now)

    def _greet(self, now: float) -> None:
        assert self._upstream is not None
        link = Link(self._upstream.control, up=True)
        self._commands.append(Send(link, Hello(self.name, tuple(sorted(self.roots)))))
        self._tidings.tell_everything(self._upstream.control, now)
        self._tidings.tell_troubles()
        for root, version in self._versions.items():
            if version.state is State.BASELESS:
                self._commands.append(Send(link, Tell(root)))

    def moved(self, peers: Container[str], now: float) -> None:
        """Hosts that had ended are there again: where they come first on this one's route, they are asked again."""
        if self._upstream is not None:
            control = self._upstream.control
            self._upstream.moved(peers, now)
            self._follow(control, now)

    def accepted(self, peer: str, now: float) -> None:
        """A child has connected; an earlier connection of it is void."""
        if self._broken:
            self._commands.append(Disconnect(Link(peer, up=False)))
        else:
            self._downstream.add(peer, now)

    def lost(self, link: Link, now: float, reason: str = "") -> None:
        """A connection is down, or could not be opened, for this ``reason``."""
        if not link.up:
            self._downstream.remove(link.peer)
        elif self._upstream is not None:
            control = self._upstream.control
            self._upstream.lost(link.peer, now, reason)
            self._follow(control, now)

    def sent(self, link: Link, size: int, now: float) -> None:
        """A piece of ``size`` bytes has left this host."""
        if not link.up:
            self._downstream.sent(link.peer, size, now)

    def received(self, link: Link, message: Message, now: float) -> None:
        """A message came. The digest of a piece has been checked by the caller."""
        if link.up:
            self._from_parent(link.peer, message, now)
        elif link.peer in self._downstream.children:
            self._from_child(link.peer, message, now)

    def _from_parent(self, peer: str, message: Message, now: float) -> None:
        assert self._upstream is not None
        self._upstream.heard(peer, now, starved=isinstance(message, Alive) and message.starved)
        if isinstance(message, Data):
            if self._upstream.got(peer, message.digest, len(message.data), now):
                self._piece(message.digest, message.data, now)
        elif isinstance(message, Offer):
            self._offer(message, now)
        elif isinstance(message, Withdraw):
            self.withdraw(message.root, now)
        elif isinstance(message, Hold):
            self.hold(message.root, now)

    def _from_child(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, Want):
            self._wanted(peer, message.root, message.digests, now)
        elif isinstance(message, Unwant):
            self._downstream.unwant(peer, message.digests)
        elif isinstance(message, Ack):
            self._note(message.root, message.ready, dict(message.failed), now)
        elif isinstance(message, Trouble):
            self._tidings.note_troubles(message.hosts)
        elif isinstance(message, Hello):
            child = self._downstream.children[peer]
            child.greeted, child.roots = True, frozenset(message.roots)
            for root, version in self._versions.items():
                self._introduce(peer, root, version, now)
        elif isinstance(message, Tell):
            self._describe(peer, message.root)

    def _introduce(self, peer: str, root: bytes, version: Version, now: float) -> None:
        """Offers a version to a child that came after it was announced."""
        roots = self._downstream.children[peer].roots
        if version.offer.base in roots or version.offer.base == NOTHING or root in roots:
            self._downstream.tell(peer, version.offer, now)
        else:
            self._describe(peer, root)
        if version.held:
            self._downstream.tell(peer, Hold(root), now)

    def _describe(self, peer: str, root: bytes) -> None:
        version = self._versions.get(root)
        if version is None:
            return
        if version.state in (State.BEGINNING, State.BASELESS):
            version.untold_whole.append(peer)
        else:
            self._commands.append(Describe(peer, root))

    def _note(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        if self._upstream is None and root not in self._versions:
            return  # it was given up meanwhile; what is heard of it next time counts then
        self._tidings.note(root, ready, failed, now)

    # --- time -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        hungry = any(version.state in (State.FETCHING, State.BASELESS) for version in self._versions.values())
        alert = now < self._announced_at + self._timing.alert_for
        self._downstream.tick(now, hungry=hungry, alert=alert)
        if self._upstream is not None:
            control, second = self._upstream.control, self._upstream.second
            self._upstream.tick(now)
            self._follow(control, now)
            if self._upstream.second is not None and second is None:
                self._tidings.tell_everything(self._upstream.second, now)
            self._tidings.note_troubles([(self.name, "; ".join(self._upstream.unreachable.values()))])
        self._tidings.tell_if_due(now)

    def _follow(self, before: str, now: float) -> None:
        """Greets the parent that the control lane has moved to, if the connection to it is up already."""
        assert self._upstream is not None
        if self._upstream.control != before and self._upstream.connected_to_control:
            self._greet(now)

"""The versions at one relay: what is announced, prepared, fetched, finished and served to children.

Every change of a version's state goes through ``Versions._apply``, and so through the table in ``version_state``.

Imports nothing but the standard library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..tree.tree import NOTHING, short
from .commands import (
    BuildFullDelta,
    Command,
    Finish,
    Forget,
    HoldSnapshot,
    PeerLink,
    Prepare,
    RequestPieces,
    Send,
    StorePiece,
    Timeouts,
)
from .downstream import Downstream
from .frames import Hold, Offer, RequestFullDelta, Withdraw
from .status_reporter import StatusReporter
from .upstream import Upstream
from .version_state import Version, VersionEvent, VersionLog, VersionState

log = logging.getLogger(__name__)

_MAX_RESTARTS = 3


# Requests of children that cannot be answered yet.
#
# A child that learned of a version elsewhere may request pieces before the version is announced here, or while the
# store is still preparing it.


@dataclass(slots=True)
class Requests:
    """``pieces``: (child, digests). ``full_delta``: children."""

    pieces: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    full_delta: list[str] = field(default_factory=list)


class PendingRequests:
    """By version. ``take`` returns what is pending once it can be answered, ``discard`` drops it."""

    def __init__(self) -> None:
        self._by_root: dict[bytes, Requests] = {}

    def add_pieces(self, root: bytes, child: str, digests: tuple[bytes, ...]) -> None:
        self._by_root.setdefault(root, Requests()).pieces.append((child, digests))

    def add_full_delta(self, root: bytes, child: str) -> None:
        self._by_root.setdefault(root, Requests()).full_delta.append(child)

    def take(self, root: bytes) -> Requests:
        return self._by_root.pop(root, Requests())

    def discard(self, root: bytes) -> None:
        self._by_root.pop(root, None)

    def validate_state(self, answerable: Iterable[bytes]) -> None:
        """Raises AssertionError if requests for versions that are ``answerable`` are pending."""
        late = self._by_root.keys() & set(answerable)
        assert not late, f"requests are pending for {len(late)} versions that can be answered"


class Versions:
    """Appends what is to be done to ``commands``. ``upstream``: None at the gateway. ``roots``: the versions in the
    store. ``store_broken``: the store reported an error, and this host serves no children until a version finishes."""

    def __init__(
        self, name: str, upstream: Upstream | None, downstream: Downstream, status: StatusReporter, timeouts: Timeouts,
        commands: list[Command], *, roots: Iterable[bytes],
    ) -> None:  # fmt: skip
        self.roots = set(roots)
        self.store_broken = False
        self._name = name
        self._upstream = upstream
        self._downstream = downstream
        self._status = status
        self._timeouts = timeouts
        self._commands = commands
        self._versions: dict[bytes, Version] = {}
        self._pending = PendingRequests()
        self._attempts = 0
        self._announced_at = float("-inf")
        self._log = VersionLog(log, name)

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def state(self, root: bytes) -> VersionState | None:
        version = self._versions.get(root)
        return version.state if version is not None else None

    @property
    def starved(self) -> bool:
        """Whether any version waits for parents."""
        return any(of.state in (VersionState.FETCHING, VersionState.NEEDS_FULL_DELTA) for of in self)

    def announced_lately(self, now: float) -> bool:
        return now < self._announced_at + self._timeouts.alert_duration

    def _apply(self, version: Version, event: VersionEvent, **facts: object) -> None:
        before = version.state
        version.apply(event)
        if self._log.enabled:
            self._log(version.root, f"{before.name} -> {version.state.name}", None, event=event.name, **facts)

    # --- offers -----------------------------------------------------------------------------------------

    def offer(self, offer: Offer, peer: str | None, now: float) -> None:
        """A version is offered by the parent ``peer``, or published here if None."""
        version = self._versions.get(offer.root)
        self._log(offer.root, "offered", peer, base=short(offer.base), inline=len(offer.inline))
        if version is None:
            self._attempts += 1
            self._versions[offer.root] = Version(offer.without_pieces(), self._attempts)
            self._announced_at = now
            if self._upstream is not None:
                # A parent keeps up its frequent heartbeats a little longer than its children rely on them.
                self._upstream.alert_until = now + 0.8 * self._timeouts.alert_duration
            self._downstream.broadcast(offer, now)
            self._commands.append(Prepare(offer, self._attempts))
            self._status.open(offer.root, now)
        elif version.state is VersionState.NEEDS_FULL_DELTA and offer.base == NOTHING:
            version.offer = offer.without_pieces()
            self._prepare(version, VersionEvent.FULL_DELTA_OFFERED, offer)
        elif self._status.failed(offer.root):
            self._downstream.broadcast(offer, now)
            if version.state is VersionState.FAILED:
                self._prepare(version, VersionEvent.OFFERED_AGAIN)
        for other in list(self):
            if other.offer.serial < offer.serial and other.root not in (offer.root, *offer.live):
                self.withdraw(other.root, now)

    def withdraw(self, root: bytes, now: float) -> None:
        """A version is no longer needed: its missing pieces are cancelled."""
        version = self._versions.pop(root, None)
        if version is None:
            return
        self._log(root, "withdrawn")
        self._pending.discard(root)
        self._status.close(root)
        self._downstream.stop_waiting(root)
        self._stop_fetching(version, now)
        for other in self:
            other.offer = replace(other.offer, live=tuple(live for live in other.offer.live if live != root))
        if version.state is not VersionState.READY:
            self._commands.append(Forget(root))
        self._downstream.broadcast(Withdraw(root), now)

    def hold(self, root: bytes, now: float) -> None:
        """Processes are about to be started from this version. Sent each time, because hosts hold it for a limited
        time."""
        version = self._versions.get(root)
        if version is not None:
            version.held = True
            if self._upstream is not None:
                self._commands.append(HoldSnapshot(root))
            self._downstream.broadcast(Hold(root), now)

    def add_status(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        """Hosts, this one or others below it, are ready for a version or cannot get it."""
        if self._upstream is None and root not in self._versions:
            return  # withdrawn meanwhile; if it is published again, what hosts report after that counts
        self._status.add(root, ready, failed, now)

    def request_full_deltas(self, link: PeerLink) -> None:
        """Requests from a new parent what was requested from the one before."""
        for version in self:
            if version.state is VersionState.NEEDS_FULL_DELTA:
                self._commands.append(Send(link, RequestFullDelta(version.root)))

    # --- results of store commands ----------------------------------------------------------------------

    def _attempted(self, root: bytes, attempt: int) -> Version | None:
        """The version, unless the result of ``attempt`` is void."""
        version = self._versions.get(root)
        return version if version is not None and version.attempt == attempt else None

    def prepared(self, root: bytes, attempt: int, missing: Mapping[bytes, int], now: float) -> None:
        """The store lacks these pieces, digest to size."""
        version = self._attempted(root, attempt)
        if version is None:
            return
        self._apply(version, VersionEvent.PREPARED, missing=len(missing))
        version.fetched = 0
        version.missing = dict(missing)
        self.roots.add(root)
        self._answer_pending(version, now)
        if not missing:
            self._finish(version)
        elif self._upstream is None:
            self._log(root, "requested from the client", pieces=len(missing))
            self._commands.append(RequestPieces(root, tuple(missing), tuple(missing.values())))
        else:
            self._upstream.want(root, missing, striped=version.offer.striped, now=now)

    def base_unknown(self, root: bytes, attempt: int, now: float) -> None:
        version = self._attempted(root, attempt)
        if version is None:
            return
        if self._upstream is None:
            self.failed(root, attempt, "the gateway does not have the base version of this delta", now)
            return
        self._apply(version, VersionEvent.BASE_UNKNOWN, base=short(version.offer.base))
        if self._upstream.connected_to_control:
            self._commands.append(Send(PeerLink(self._upstream.control, up=True), RequestFullDelta(root)))

    def finished(self, root: bytes, attempt: int, now: float) -> None:
        self.store_broken = False
        version = self._attempted(root, attempt)
        if version is not None:
            self._apply(version, VersionEvent.FINISHED)
            self.add_status(root, [self._name], {}, now)

    def damaged(self, root: bytes, attempt: int, now: float) -> None:
        """Files that the snapshot needs changed or vanished after their pieces were stored: prepares it again."""
        version = self._attempted(root, attempt)
        if version is None:
            return
        if version.restarts >= _MAX_RESTARTS:
            self.failed(root, attempt, "its files in the store are modified again and again by another process", now)
        else:
            version.restarts += 1
            self._prepare(version, VersionEvent.DAMAGED)

    def failed(self, root: bytes, attempt: int, reason: str, now: float) -> None:
        """The store could not prepare or finish a version."""
        version = self._attempted(root, attempt)
        self._fail([version] if version is not None else [], reason, now)

    def hold_failed(self, root: bytes, reason: str, now: float) -> None:
        """The store could not hold a version for the processes to come."""
        version = self._versions.get(root)
        self._fail([version] if version is not None else [], reason, now)

    def store_failed(self, reason: str, now: float) -> None:
        """The store could not store a piece."""
        self._fail([of for of in self if of.state in (VersionState.FETCHING, VersionState.FINISHING)], reason, now)

    def _fail(self, versions: Iterable[Version], reason: str, now: float) -> None:
        """Children are sent to other parents, for this host has nothing for them."""
        for version in versions:
            self._apply(version, VersionEvent.STORE_FAILED, reason=repr(reason))
            self._stop_fetching(version, now)
            self.add_status(version.root, [], {self._name: reason}, now)
        if self._upstream is not None:
            self.store_broken = True
            for peer in list(self._downstream.children):
                self._downstream.disconnect(peer)

    def _prepare(self, version: Version, event: VersionEvent, offer: Offer | None = None) -> None:
        self._apply(version, event)
        self._attempts += 1
        version.attempt = self._attempts
        self._commands.append(Prepare(offer or version.offer, version.attempt))

    def _finish(self, version: Version) -> None:
        self._apply(version, VersionEvent.COMPLETED)
        offer = version.offer
        self._commands.append(Finish(offer.root, version.attempt, offer.base, offer.replaces))

    def _stop_fetching(self, version: Version, now: float) -> None:
        missing, version.missing = version.missing, {}
        if self._upstream is None or not missing:
            return
        self._upstream.cancel(missing)
        for other in self:  # pieces that they lack too were requested for this version
            shared = {digest: size for digest, size in other.missing.items() if digest in missing}
            self._upstream.want(other.root, shared, striped=other.offer.striped, now=now)

    # --- pieces and children ----------------------------------------------------------------------------

    def arrived(self, digest: bytes, data: bytes, peer: str | None, now: float) -> None:
        """A piece arrived from the parent ``peer``, or from the client if None."""
        lacking = [version for version in self if digest in version.missing]
        if not lacking:
            return
        self._commands.append(StorePiece(digest, data))
        self._downstream.arrived(digest, data, now)
        for version in lacking:
            if not version.fetched:
                self._log(version.root, "received first piece", peer)
            version.fetched += 1
            del version.missing[digest]
            if not version.missing:
                self._log(version.root, "received last piece", peer, pieces=version.fetched)
                self._finish(version)

    def introduce(self, child: str, now: float) -> None:
        """Offers every version to a child that greeted after they were announced."""
        roots = self._downstream.children[child].roots
        for version in self:
            if version.offer.base in roots or version.offer.base == NOTHING or version.root in roots:
                self._downstream.send(child, version.offer, now)
            else:
                self.request_full_delta(child, version.root)
            if version.held:
                self._downstream.send(child, Hold(version.root), now)

    def request_pieces(self, child: str, root: bytes, digests: tuple[bytes, ...], now: float) -> None:
        version = self._versions.get(root)
        self._log(root, "received request", child, pieces=len(digests))
        if version is None or not version.is_prepared:
            self._pending.add_pieces(root, child, digests)
        else:
            self._downstream.request(child, root, digests, version.missing, now)

    def request_full_delta(self, child: str, root: bytes) -> None:
        version = self._versions.get(root)
        if version is None:
            return
        if version.is_prepared:
            self._commands.append(BuildFullDelta(child, root))
        else:
            self._pending.add_full_delta(root, child)

    def _answer_pending(self, version: Version, now: float) -> None:
        pending = self._pending.take(version.root)
        for child, digests in pending.pieces:
            if child in self._downstream.children:
                self._downstream.request(child, version.root, digests, version.missing, now)
        for child in pending.full_delta:
            self._commands.append(BuildFullDelta(child, version.root))

    def full_delta_built(self, child: str, root: bytes, delta: bytes, now: float) -> None:
        version = self._versions.get(root)
        if version is not None and child in self._downstream.children:
            self._downstream.send(child, replace(version.offer, base=NOTHING, delta=delta), now)

    def pieces_read(
        self, child: str, root: bytes, read: list[tuple[bytes, bytes]], unread: tuple[bytes, ...],
        lost: tuple[bytes, ...], now: float,
    ) -> None:  # fmt: skip
        """The result of ReadPieces: pieces, digests left for the next read, and digests that the store does not have or
        that are corrupt; for those the version is prepared again."""
        self._downstream.pieces_read(child, root, read, unread, now)
        version = self._versions.get(root)
        if not lost or version is None or child not in self._downstream.children:
            return
        if version.restarts >= _MAX_RESTARTS:
            self._downstream.disconnect(child)
        elif not version.is_prepared:
            self._pending.add_pieces(root, child, lost)
        elif version.state is VersionState.FETCHING:
            self._downstream.request(child, root, lost, version.missing, now)
        else:
            version.restarts += 1
            self._pending.add_pieces(root, child, lost)
            for peer, digest in self._downstream.stop_waiting(root):
                self._pending.add_pieces(root, peer, (digest,))
            self._prepare(version, VersionEvent.PIECES_LOST)

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant of the versions, or of what is kept for them, does not hold."""
        for root, version in self._versions.items():
            assert version.root == root
            assert version.attempt <= self._attempts
            version.validate_state()
        fetched = (VersionState.FETCHING, VersionState.FINISHING, VersionState.READY)
        assert self.roots >= {of.root for of in self if of.state in fetched}
        self._pending.validate_state([of.root for of in self if of.state in fetched])
        self._status.validate_state(self._versions)
        self._downstream.validate_state(self._versions)
        if self._upstream is not None:
            self._upstream.validate_state({digest for of in self for digest in of.missing})

"""What a relay requests from which parent, and what happens when a parent dies, stalls or is slow.

There is one lane (``Lane``) for control and one for each stripe. On each lane pieces are requested from one parent
as long as it delivers. When a parent is lost, silent or delivers nothing, the lane moves to the next on its route. If
one is much slower than the other lanes, the second half of what it still owes is requested from the next parent
instead.

Imports nothing but the standard library.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from .commands import Command, Connect, Disconnect, PeerLink, Send, Timeouts
from .frames import Cancel, Want
from .plan import GATEWAY, Routes
from .version_state import VersionLog, node_name

log = logging.getLogger(__name__)

_MAX_WANTS = 8192
_REPLACEMENTS = 3
_FEW = 4
_LATE_TICK_FACTOR = 4
_LATE_TICK_DECAY = 0.9


# How much longer a parent may be silent, for reasons that are this host's own.
#
# A parent's messages queue behind pieces on this host's link, and a host that is short of CPU reads them late: its own
# ticks are late too.


class LivenessAllowance:
    """Seconds to add to the timeouts of parents. ``window``: bytes that each parent may have in flight to this host."""

    def __init__(self, window: int, timeouts: Timeouts) -> None:
        self._window = window
        self._timeouts = timeouts
        self._ticked_at: float | None = None
        self._late = 0.0
        self._received = 0
        self._bytes_per_second = 0.0

    def received(self, size: int) -> None:
        """A piece of ``size`` bytes arrived."""
        self._received += size

    def paused(self, seconds: float, now: float) -> None:
        """Nothing was read for ``seconds``; that time does not count."""
        if self._ticked_at is not None:
            self._ticked_at = min(now, self._ticked_at + seconds)

    def tick(self, now: float, busy: int) -> float:
        """The allowance while ``busy`` parents owe pieces: twice the time in which their windows arrive, plus some for
        ticks that came late."""
        elapsed = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        interval = self._timeouts.busy_heartbeat_interval
        self._late = max(elapsed - interval, _LATE_TICK_DECAY * self._late)
        if self._received:
            rate = self._received / max(elapsed, 1e-9)
            self._bytes_per_second = (self._bytes_per_second + rate) / 2 if self._bytes_per_second else rate
            self._received = 0
        late = _LATE_TICK_FACTOR * max(self._late - interval, 0.0)
        if not busy:
            return late
        if not self._bytes_per_second:
            return late + self._timeouts.stall_timeout
        return late + 2 * busy * self._window / self._bytes_per_second


@dataclass(slots=True)
class ParentLink:
    """A connection to a parent. ``heard_at``: its last message; ``starved``: it waits for pieces itself."""

    heard_at: float
    up: bool = False
    starved: bool = False


@dataclass(slots=True)
class Supplier:
    """A parent from which pieces are requested on one lane. ``received`` bytes since ``since`` are its speed;
    ``progressed_at`` is the time of its last piece."""

    since: float
    progressed_at: float
    requested: dict[bytes, None] = field(default_factory=dict)
    received: int = 0


class Lane:
    """One route and the pieces requested along it. Past the end of the route the lane rests until ``resting_until``;
    ``deferred`` pieces are requested then."""

    def __init__(self, name: str, route: tuple[str, ...]) -> None:
        self.name = name
        self.route = route
        self.position = 0
        self.suppliers: dict[str, Supplier] = {}
        self.resting_until: float | None = None
        self.deferred: dict[bytes, None] = {}

    @property
    def current(self) -> str:
        return self.route[self.position]

    @property
    def idle(self) -> bool:
        """Whether nothing is requested on it and it does not rest."""
        return self.resting_until is None and not any(of.requested for of in self.suppliers.values())

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        assert 0 <= self.position < len(self.route)
        assert self.resting_until is not None or not self.deferred, f"{self.name} defers pieces but does not rest"
        assert self.suppliers.keys() <= set(self.route)


@dataclass(frozen=True, slots=True)
class WantedPiece:
    root: bytes
    size: int
    lane: Lane


class Upstream:
    """Appends what is to be done to ``commands``. ``wanted`` holds every piece that is missing here, ``unreachable``
    why the last dial of a parent failed."""

    def __init__(self, name: str, routes: Routes, timeouts: Timeouts, window: int, commands: list[Command]) -> None:
        self.wanted: dict[bytes, WantedPiece] = {}
        self.duplicate_bytes = 0
        self.unreachable: dict[str, str] = {}
        self.alert_until = 0.0
        self._name = name
        self._timeouts = timeouts
        self._commands = commands
        self._control = Lane("control", routes.control)
        self._stripes = [Lane(f"stripe {index}", route) for index, route in enumerate(routes.stripes)]
        self._lanes = [self._control, *self._stripes]
        self._links: dict[str, ParentLink] = {}
        self._suspect_until: dict[str, float] = {}
        self._lag_checked_at = 0.0
        self._liveness = LivenessAllowance(window, timeouts)
        self._backup: str | None = None
        self._paused_at: float | None = None
        self._log = VersionLog(log, name)

    @property
    def control(self) -> str:
        """The parent that announces versions and takes acknowledgements."""
        return self._control.current

    @property
    def connected_to_control(self) -> bool:
        link = self._links.get(self.control)
        return link is not None and link.up

    @property
    def backup(self) -> str | None:
        """A connected parent that takes acknowledgements too while ``control`` is silent."""
        link = self._links.get(self._backup) if self._backup is not None else None
        return self._backup if link is not None and link.up else None

    def start(self, now: float) -> None:
        self._open_link(self.control, now)

    # --- requesting -------------------------------------------------------------------------------------

    def want(self, root: bytes, pieces: Mapping[bytes, int], *, striped: bool, now: float) -> None:
        """Requests pieces, digest to size, unless they are requested already."""
        by_lane: dict[int, list[bytes]] = {}
        for digest, size in pieces.items():
            if digest not in self.wanted:
                index = 1 + digest[0] % len(self._stripes) if striped and self._stripes else 0
                self.wanted[digest] = WantedPiece(root, size, self._lanes[index])
                by_lane.setdefault(index, []).append(digest)
        for index, digests in by_lane.items():
            lane = self._lanes[index]
            if lane.resting_until is None:
                self._request(lane, lane.current, digests, now)
            else:
                lane.deferred.update(dict.fromkeys(digests))

    def cancel(self, digests: Iterable[bytes]) -> None:
        """These pieces are no longer needed."""
        by_peer: dict[str, list[bytes]] = {}
        for digest in digests:
            wanted = self.wanted.pop(digest, None)
            if wanted is not None:
                wanted.lane.deferred.pop(digest, None)
                for peer, supplier in wanted.lane.suppliers.items():
                    if digest in supplier.requested:
                        del supplier.requested[digest]
                        by_peer.setdefault(peer, []).append(digest)
        for peer, cancelled in by_peer.items():
            self._send_cancel(peer, cancelled)

    def received(self, peer: str, digest: bytes, size: int, now: float) -> bool:
        """A piece arrived. Returns whether it was still wanted."""
        self._liveness.received(size)
        wanted = self.wanted.pop(digest, None)
        if wanted is None:
            self.duplicate_bytes += size
            return False
        wanted.lane.deferred.pop(digest, None)
        for name, supplier in wanted.lane.suppliers.items():
            if name == peer:
                supplier.received += size
                supplier.progressed_at = now
            if supplier.requested.pop(digest, b"") is None and name != peer:
                self._send_cancel(name, [digest])
        return True

    def _request(self, lane: Lane, peer: str, digests: Iterable[bytes], now: float) -> None:
        requested = dict.fromkeys(digests)
        supplier = lane.suppliers.get(peer)
        if supplier is None or not supplier.requested:
            supplier = lane.suppliers[peer] = Supplier(now, now)
        supplier.requested.update(requested)
        if self._open_link(peer, now).up:
            self._send_wants(peer, requested)

    def _send_wants(self, peer: str, digests: Iterable[bytes]) -> None:
        by_root: dict[bytes, list[bytes]] = {}
        for digest in digests:
            by_root.setdefault(self.wanted[digest].root, []).append(digest)
        for root, wanted in by_root.items():
            self._log(root, "requested", peer, pieces=len(wanted))
            for start in range(0, len(wanted), _MAX_WANTS):
                part = tuple(wanted[start : start + _MAX_WANTS])
                self._commands.append(Send(PeerLink(peer, up=True), Want(root, part)))

    def _send_cancel(self, peer: str, digests: list[bytes]) -> None:
        link = self._links.get(peer)
        if link is not None and link.up:
            self._commands.append(Send(PeerLink(peer, up=True), Cancel(tuple(digests))))

    # --- links ------------------------------------------------------------------------------------------

    def _open_link(self, peer: str, now: float) -> ParentLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = ParentLink(now)
            self._commands.append(Connect(peer))
        return link

    def connected(self, peer: str, now: float) -> None:
        link = self._links.get(peer)
        if link is None:  # given up meanwhile
            self._commands.append(Disconnect(PeerLink(peer, up=True)))
            return
        link.up, link.heard_at = True, now
        self.unreachable.pop(peer, None)
        for lane in self._lanes:
            supplier = lane.suppliers.get(peer)
            if supplier is not None and supplier.requested:
                supplier.since = supplier.progressed_at = now
                self._send_wants(peer, supplier.requested)

    def heard(self, peer: str, now: float, *, starved: bool = False) -> None:
        """Any message came from a parent."""
        link = self._links.get(peer)
        if link is not None:
            link.heard_at, link.starved = now, starved

    def lost(self, peer: str, now: float, reason: str = "") -> None:
        """``reason``: why a dial failed; empty if a connection ended."""
        if reason:
            self.unreachable[peer] = reason
        if peer == self._backup:
            self._backup = None
        if self._links.pop(peer, None) is not None:
            self._suspect_until[peer] = now + self._timeouts.suspect_timeout
            for lane in self._lanes:
                if peer in lane.suppliers or lane.current == peer:
                    self._replace(lane, peer, now)

    def restarted(self, peers: Container[str], now: float) -> None:
        """Hosts that had ended are back. An idle lane returns to the first of ``peers`` before its present parent."""
        for lane in self._lanes:
            better = [position for position in range(lane.position) if lane.route[position] in peers]
            if not better or not lane.idle:
                continue
            before, lane.position = lane.current, better[0]
            self._log_parent(lane, before, "the earlier parent is back")
            self._suspect_until.pop(lane.current, None)
            if lane is self._control:
                self._open_link(lane.current, now)
                unused = not any(before in other.suppliers for other in self._lanes)
                if unused and self._links.pop(before, None) is not None:  # it would keep announcing versions
                    self._commands.append(Disconnect(PeerLink(before, up=True)))

    def _replace(self, lane: Lane, peer: str, now: float) -> None:
        """Stops requesting from ``peer`` on this lane and requests what it owed from the next parents of the route."""
        supplier = lane.suppliers.pop(peer, None)
        if lane.current == peer:
            self._advance(lane, now)
        owed = list(supplier.requested) if supplier is not None else []
        if owed:
            self._log_replaced(lane, peer, owed)
            self._send_cancel(peer, owed)
        if lane.resting_until is not None:
            lane.deferred.update(dict.fromkeys(owed))
        else:
            self._request_replacements(lane, owed, now)
            if lane is self._control:
                self._open_link(lane.current, now)

    def _request_replacements(self, lane: Lane, owed: list[bytes], now: float) -> None:
        """Requests what a parent owed. The replacements have children of their own, so on a stripe no single one gets
        all of it. The last few pieces are requested from each, since one of them may be dead as well. The gateway is
        used only when it is the current parent."""
        peers = [lane.current]
        if lane is not self._control:
            peers += [peer for peer in self._others(lane, now) if peer != GATEWAY]
        peers = peers[: min(_REPLACEMENTS, len(owed))]
        for turn, peer in enumerate(peers):
            share = owed[turn :: len(peers)] if len(owed) > _FEW else owed[turn:] + owed[:turn]
            self._request(lane, peer, share, now)

    def _others(self, lane: Lane, now: float) -> list[str]:
        """The parents after the current one that are not suspect."""
        others = lane.route[lane.position + 1 :]
        return [peer for peer in others if self._suspect_until.get(peer, 0.0) <= now]

    def _advance(self, lane: Lane, now: float) -> None:
        """To the next parent on the route that is not suspect; past the end, the lane rests."""
        before = lane.current
        while lane.position + 1 < len(lane.route):
            lane.position += 1
            if self._suspect_until.get(lane.current, 0.0) <= now:
                self._log_parent(lane, before, "lost or silent")
                return
        lane.position = 0
        lane.resting_until = now + self._timeouts.retry_delay

    # --- time -------------------------------------------------------------------------------------------

    def pause(self, now: float) -> None:
        """Nothing is read from parents until ``resume``: no parent is judged by that time."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is None:
            return
        paused, self._paused_at = now - self._paused_at, None
        for link in self._links.values():
            link.heard_at = min(now, link.heard_at + paused)
        for lane in self._lanes:
            for supplier in lane.suppliers.values():
                supplier.since = min(now, supplier.since + paused)
                supplier.progressed_at = min(now, supplier.progressed_at + paused)
        self._liveness.paused(paused, now)
        self.alert_until += paused

    def tick(self, now: float) -> None:
        if self._paused_at is not None:
            return
        timeouts = self._timeouts
        busy = sum([1 for lane in self._lanes for supplier in lane.suppliers.values() if supplier.requested])
        allowance = self._liveness.tick(now, busy)
        for peer, link in list(self._links.items()):
            alert = peer == self.control and now < self.alert_until
            if (
                now - link.heard_at
                > (timeouts.alert_silence_timeout if alert else timeouts.silence_timeout) + allowance
            ):
                self._commands.append(Disconnect(PeerLink(peer, up=True)))
                self.lost(peer, now)
        for lane in self._lanes:
            if lane.resting_until is not None and now >= lane.resting_until:
                self._restart(lane, now)
            for peer, supplier in list(lane.suppliers.items()):
                self._check_stall(lane, peer, supplier, now, allowance)
        if now - self._lag_checked_at >= timeouts.lag_timeout:
            self._lag_checked_at = now
            self._check_lag(now, allowance)
        self._choose_backup(now, allowance)

    def _choose_backup(self, now: float, allowance: float) -> None:
        """It takes long to be sure that a parent is dead, and a duplicate acknowledgement does no harm."""
        link = self._links.get(self.control)
        silent = link is not None and now - link.heard_at > self._timeouts.backup_timeout + allowance
        if not silent or now >= self.alert_until:
            self._backup = None
        elif self._backup is None:
            self._backup = next(iter(self._others(self._control, now)), None)
            if self._backup is not None:
                self._open_link(self._backup, now)

    def _restart(self, lane: Lane, now: float) -> None:
        """Starts the route again from its first parent."""
        lane.resting_until = None
        deferred, lane.deferred = lane.deferred, {}
        if deferred:
            self._request(lane, lane.current, deferred, now)
        if lane is self._control:
            self._open_link(lane.current, now)

    def _check_stall(self, lane: Lane, peer: str, supplier: Supplier, now: float, allowance: float) -> None:
        timeouts, link = self._timeouts, self._links[peer]
        stall = timeouts.starved_timeout if link.starved else timeouts.stall_timeout
        silence = timeouts.stripe_silence_timeout if link.up else timeouts.connect_timeout
        silent = lane is not self._control and now - max(link.heard_at, supplier.since) > silence + allowance
        if not supplier.requested or not (silent or now - supplier.progressed_at > stall + allowance):
            return
        if silent:
            self._suspect_until[peer] = now + timeouts.suspect_timeout
        if lane is self._control:
            # Only one parent may announce versions to this host, and from now on that is the next one.
            self._commands.append(Disconnect(PeerLink(peer, up=True)))
            self.lost(peer, now)
        else:
            self._replace(lane, peer, now)

    def _check_lag(self, now: float, allowance: float) -> None:
        """Splits what the slowest parent owes if it would be done long after the others."""
        remaining = {
            (index, peer): self._remaining_seconds(supplier, now)
            for index, lane in enumerate(self._lanes)
            for peer, supplier in lane.suppliers.items()
            if supplier.requested
        }
        if not remaining:
            return
        slowest = max(remaining, key=lambda key: remaining[key])
        index, peer = slowest
        others = [seconds for key, seconds in remaining.items() if key != slowest]
        if remaining[slowest] > 2 * max(others, default=0.0) + self._timeouts.lag_timeout + allowance:
            self._split(self._lanes[index], peer, now)

    def _remaining_seconds(self, supplier: Supplier, now: float) -> float:
        owed = sum([self.wanted[digest].size for digest in supplier.requested])
        speed = supplier.received / max(now - supplier.since, 1e-9)
        return owed / speed if speed else now - supplier.since

    def _split(self, lane: Lane, peer: str, now: float) -> None:
        unused = [other for other in self._others(lane, now) if other not in lane.suppliers]
        supplier = lane.suppliers[peer]
        half = list(supplier.requested)[(len(supplier.requested) + 1) // 2 :]
        if unused and half:
            for digest in half:
                del supplier.requested[digest]
            self._log_replaced(lane, peer, half)
            self._send_cancel(peer, half)
            self._request(lane, unused[0], half, now)

    # --- checks and logs --------------------------------------------------------------------------------

    def _log_parent(self, lane: Lane, before: str, reason: str) -> None:
        if self._log.enabled:
            names = self._name, lane.name, node_name(before), node_name(lane.current), reason
            log.debug("node=%s changed parent lane=%s from=%s to=%s: %s", *names)

    def _log_replaced(self, lane: Lane, peer: str, owed: Iterable[bytes]) -> None:
        if self._log.enabled:
            for root, count in Counter(self.wanted[digest].root for digest in owed).items():
                self._log(root, "replacing", peer, lane=lane.name, pieces=count)

    def validate_state(self, missing: Iterable[bytes]) -> None:
        """Raises AssertionError unless exactly the ``missing`` pieces are wanted, each is requested from a parent or
        deferred by a resting lane, and there is a link to every parent that owes something and to the control
        parent."""
        assert self.wanted.keys() == set(missing), "wanted pieces differ from missing ones"
        requested: set[bytes] = set()
        for lane in self._lanes:
            lane.validate_state()
            for peer, supplier in lane.suppliers.items():
                assert not supplier.requested or peer in self._links, f"no link to {peer!r}"
                requested |= supplier.requested.keys()
            requested |= lane.deferred.keys()
        assert requested == self.wanted.keys(), "a wanted piece is not requested, or a requested one is not wanted"
        assert self._control.resting_until is not None or self.control in self._links, "no link to the control parent"
        assert self._backup is None or self._backup in self._control.route

"""Whom a relay asks for what: its lanes, and what becomes of them when a parent dies, stalls or is slow.

A lane is a route (see ``plan``) and what is asked along it: one for control, one for each stripe. On each lane
pieces are asked of one parent, as long as it delivers. A parent that is lost, silent, or delivers nothing is left for
the next on the route; of one that is much slower than the other lanes, the second half of what it still owes is asked
of the next as well.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from .commands import Command, Connect, Disconnect, Link, Send
from .frames import Unwant, Want
from .grace import Grace
from .plan import GATEWAY, Routes
from .timing import Timing

__all__ = ["Upstream"]

_WANTS_IN_A_MESSAGE = 8192
_SPREAD = 3
_FEW = 4


@dataclass(slots=True)
class _Source:
    """A parent that is asked on one lane. ``since`` and ``received``: its speed."""

    since: float
    progress: float
    asked: dict[bytes, None] = field(default_factory=dict)
    received: int = 0


@dataclass(slots=True)
class _Link:
    heard: float
    up: bool = False
    starved: bool = False


class _Lane:
    def __init__(self, route: tuple[str, ...]) -> None:
        self.route = route
        self.position = 0
        self.sources: dict[str, _Source] = {}
        self.resting: float | None = None
        self.owed: dict[bytes, None] = {}

    @property
    def current(self) -> str:
        return self.route[self.position]


@dataclass(frozen=True, slots=True)
class _Wanted:
    root: bytes
    size: int
    lane: _Lane


class Upstream:
    """Appends what is to be done to ``commands``. ``wanted`` holds every piece asked for and not yet here,
    ``unreachable`` why there was no connection to a parent when one was last tried."""

    def __init__(self, routes: Routes, timing: Timing, window: int, commands: list[Command]) -> None:
        self.wanted: dict[bytes, _Wanted] = {}
        self.wasted = 0
        self.unreachable: dict[str, str] = {}
        self.alert_until = 0.0
        self._timing = timing
        self._commands = commands
        self._control = _Lane(routes.control)
        self._stripes = [_Lane(route) for route in routes.stripes]
        self._lanes = [self._control, *self._stripes]
        self._links: dict[str, _Link] = {}
        self._suspects: dict[str, float] = {}
        self._compared_at = 0.0
        self._grace = Grace(window, timing)
        self._second: str | None = None
        self._paused_at: float | None = None

    @property
    def control(self) -> str:
        """The parent that announces versions and takes acknowledgements."""
        return self._control.current

    @property
    def connected_to_control(self) -> bool:
        link = self._links.get(self.control)
        return link is not None and link.up

    @property
    def second(self) -> str | None:
        """Who takes acknowledgements as well, while ``control`` is in doubt; None while it is not, or no other is
        connected."""
        link = self._links.get(self._second) if self._second is not None else None
        return self._second if link is not None and link.up else None

    def start(self, now: float) -> None:
        self._link(self.control, now)

    # --- asking -----------------------------------------------------------------------------------------

    def want(self, root: bytes, pieces: Mapping[bytes, int], *, striped: bool, now: float) -> None:
        by_lane: dict[int, list[bytes]] = {}
        for digest, size in pieces.items():
            if digest not in self.wanted:
                index = 1 + digest[0] % len(self._stripes) if striped and self._stripes else 0
                self.wanted[digest] = _Wanted(root, size, self._lanes[index])
                by_lane.setdefault(index, []).append(digest)
        for index, digests in by_lane.items():
            lane = self._lanes[index]
            if lane.resting is None:
                self._ask(lane, lane.current, digests, now)
            else:
                lane.owed.update(dict.fromkeys(digests))

    def unwant(self, digests: Iterable[bytes]) -> None:
        told: dict[str, list[bytes]] = {}
        for digest in digests:
            wanted = self.wanted.pop(digest, None)
            if wanted is not None:
                wanted.lane.owed.pop(digest, None)
                for peer, source in wanted.lane.sources.items():
                    if digest in source.asked:
                        del source.asked[digest]
                        told.setdefault(peer, []).append(digest)
        for peer, gone in told.items():
            self._send_unwant(peer, gone)

    def got(self, peer: str, digest: bytes, size: int, now: float) -> bool:
        """A piece came. Whether it was still wanted."""
        self._grace.came(size)
        wanted = self.wanted.pop(digest, None)
        if wanted is None:
            self.wasted += size
            return False
        wanted.lane.owed.pop(digest, None)
        for name, source in wanted.lane.sources.items():
            if name == peer:
                source.received += size
                source.progress = now
            if source.asked.pop(digest, b"") is None and name != peer:
                self._send_unwant(name, [digest])
        return True

    def _ask(self, lane: _Lane, peer: str, digests: Iterable[bytes], now: float) -> None:
        asked = dict.fromkeys(digests)
        source = lane.sources.get(peer)
        if source is None or not source.asked:
            source = lane.sources[peer] = _Source(now, now)
        source.asked.update(asked)
        if self._link(peer, now).up:
            self._send_wants(peer, asked)

    def _send_wants(self, peer: str, digests: Iterable[bytes]) -> None:
        by_root: dict[bytes, list[bytes]] = {}
        for digest in digests:
            by_root.setdefault(self.wanted[digest].root, []).append(digest)
        for root, wanted in by_root.items():
            for start in range(0, len(wanted), _WANTS_IN_A_MESSAGE):
                part = tuple(wanted[start : start + _WANTS_IN_A_MESSAGE])
                self._commands.append(Send(Link(peer, up=True), Want(root, part)))

    def _send_unwant(self, peer: str, digests: list[bytes]) -> None:
        link = self._links.get(peer)
        if link is not None and link.up:
            self._commands.append(Send(Link(peer, up=True), Unwant(tuple(digests))))

    # --- links ------------------------------------------------------------------------------------------

    def _link(self, peer: str, now: float) -> _Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(now)
            self._commands.append(Connect(peer))
        return link

    def connected(self, peer: str, now: float) -> None:
        link = self._links.get(peer)
        if link is None:  # given up on meanwhile
            self._commands.append(Disconnect(Link(peer, up=True)))
            return
        link.up, link.heard = True, now
        self.unreachable.pop(peer, None)
        for lane in self._lanes:
            source = lane.sources.get(peer)
            if source is not None and source.asked:
                source.since = source.progress = now
                self._send_wants(peer, source.asked)

    def heard(self, peer: str, now: float, *, starved: bool = False) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.heard, link.starved = now, starved

    def lost(self, peer: str, now: float, reason: str = "") -> None:
        """``reason``: why there was no connection at all."""
        if reason:
            self.unreachable[peer] = reason
        if peer == self._second:
            self._second = None
        if self._links.pop(peer, None) is not None:
            self._suspects[peer] = now + self._timing.suspicion
            for lane in self._lanes:
                if peer in lane.sources or lane.current == peer:
                    self._leave(lane, peer, now)

    def moved(self, peers: Container[str], now: float) -> None:
        """Lanes that wait for nothing now go back to the first of ``peers`` that comes before the present parent."""
        for lane in self._lanes:
            better = [position for position in range(lane.position) if lane.route[position] in peers]
            if not better or lane.resting is not None or any(source.asked for source in lane.sources.values()):
                continue
            before, lane.position = lane.current, better[0]
            self._suspects.pop(lane.current, None)
            if lane is self._control:
                self._link(lane.current, now)
                unused = not any(before in other.sources for other in self._lanes)
                if unused and self._links.pop(before, None) is not None:  # else it would go on announcing versions
                    self._commands.append(Disconnect(Link(before, up=True)))

    def _leave(self, lane: _Lane, peer: str, now: float) -> None:
        """Stops asking ``peer`` on this lane and asks the next on the route for what it owed."""
        source = lane.sources.pop(peer, None)
        if lane.current == peer:
            self._advance(lane, now)
        owed = source.asked if source is not None else {}
        if owed:
            self._send_unwant(peer, list(owed))
        if lane.resting is not None:
            lane.owed.update(owed)
        else:
            self._ask_several(lane, list(owed), now)
            if lane is self._control:
                self._link(lane.current, now)

    def _ask_several(self, lane: _Lane, owed: list[bytes], now: float) -> None:
        """Asks for what a parent owed. Those who are asked now have children of their own: on a stripe no one of them
        has all of it to deliver on top. The last few pieces are asked of each, for one of them may be dead as well. The
        gateway is asked when it is its turn alone."""
        peers = [lane.current]
        if lane is not self._control:
            others = lane.route[lane.position + 1 :]
            peers += [peer for peer in others if peer != GATEWAY and self._suspects.get(peer, 0.0) <= now]
        peers = peers[: min(_SPREAD, len(owed))]
        for turn, peer in enumerate(peers):
            self._ask(lane, peer, owed[turn :: len(peers)] if len(owed) > _FEW else owed[turn:] + owed[:turn], now)

    def _advance(self, lane: _Lane, now: float) -> None:
        """To the next parent on the route that is not suspected; past the end, the lane rests."""
        while lane.position + 1 < len(lane.route):
            lane.position += 1
            if self._suspects.get(lane.current, 0.0) <= now:
                return
        lane.position = 0
        lane.resting = now + self._timing.retry

    # --- time -------------------------------------------------------------------------------------------

    def pause(self, now: float) -> None:
        """Nothing that parents send is read until ``resume``: no parent is judged by that time."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is None:
            return
        missed, self._paused_at = now - self._paused_at, None
        for link in self._links.values():
            link.heard = min(now, link.heard + missed)
        for lane in self._lanes:
            for source in lane.sources.values():
                source.since = min(now, source.since + missed)
                source.progress = min(now, source.progress + missed)
        self._grace.missed(missed, now)
        self.alert_until += missed

    def tick(self, now: float) -> None:
        if self._paused_at is not None:
            return
        timing = self._timing
        busy = sum([1 for lane in self._lanes for source in lane.sources.values() if source.asked])
        grace = self._grace.tick(now, busy)
        for peer, link in list(self._links.items()):
            alert = peer == self.control and now < self.alert_until
            if now - link.heard > (timing.alert if alert else timing.silence) + grace:
                self._commands.append(Disconnect(Link(peer, up=True)))
                self.lost(peer, now)
        for lane in self._lanes:
            if lane.resting is not None and now >= lane.resting:
                self._resume(lane, now)
            for peer, source in list(lane.sources.items()):
                self._check_stall(lane, peer, source, now, grace)
        if now - self._compared_at >= timing.lag:
            self._compared_at = now
            self._check_lag(now, grace)
        self._check_doubt(now, grace)

    def _check_doubt(self, now: float, grace: float) -> None:
        """That a parent is dead takes long to be sure of, and to have said twice that a host is ready does no harm."""
        link = self._links.get(self.control)
        if link is None or now >= self.alert_until or now - link.heard <= self._timing.doubt + grace:
            self._second = None
        elif self._second is None:
            others = self._control.route[self._control.position + 1 :]
            self._second = next((peer for peer in others if self._suspects.get(peer, 0.0) <= now), None)
            if self._second is not None:
                self._link(self._second, now)

    def _resume(self, lane: _Lane, now: float) -> None:
        lane.resting = None
        owed, lane.owed = lane.owed, {}
        if owed:
            self._ask(lane, lane.current, owed, now)
        if lane is self._control:
            self._link(lane.current, now)

    def _check_stall(self, lane: _Lane, peer: str, source: _Source, now: float, grace: float) -> None:
        link = self._links[peer]
        allowed = self._timing.patience if link.starved else self._timing.stall
        limit = self._timing.hush if link.up else self._timing.dial
        hushed = now - max(link.heard, source.since) > limit + grace and lane is not self._control
        if not source.asked or not (hushed or now - source.progress > allowed + grace):
            return
        if hushed:
            self._suspects[peer] = now + self._timing.suspicion
        if lane is self._control:
            # It would go on announcing versions to us: one parent announces, and it is the next one now.
            self._commands.append(Disconnect(Link(peer, up=True)))
            self.lost(peer, now)
        else:
            self._leave(lane, peer, now)

    def _check_lag(self, now: float, grace: float) -> None:
        """Splits the lane that would be done last, if it would be so by far."""
        remaining = {
            (index, peer): self._remaining(source, now)
            for index, lane in enumerate(self._lanes)
            for peer, source in lane.sources.items()
            if source.asked
        }
        if not remaining:
            return
        slowest = max(remaining, key=lambda key: remaining[key])
        index, peer = slowest
        others = [time for key, time in remaining.items() if key != slowest]
        if remaining[slowest] > 2 * max(others, default=0.0) + self._timing.lag + grace:
            self._split(self._lanes[index], peer, now)

    def _remaining(self, source: _Source, now: float) -> float:
        owed = sum([self.wanted[digest].size for digest in source.asked])
        speed = source.received / max(now - source.since, 1e-9)
        return owed / speed if speed else now - source.since

    def _split(self, lane: _Lane, peer: str, now: float) -> None:
        spare = [
            other
            for other in lane.route[lane.position + 1 :]
            if other not in lane.sources and self._suspects.get(other, 0.0) <= now
        ]
        source = lane.sources[peer]
        half = list(source.asked)[(len(source.asked) + 1) // 2 :]
        if spare and half:
            for digest in half:
                del source.asked[digest]
            self._send_unwant(peer, half)
            self._ask(lane, spare[0], half, now)

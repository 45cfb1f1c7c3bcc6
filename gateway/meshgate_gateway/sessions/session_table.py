"""The table of sessions and their totals: decisions only, no processes and no sockets.

The caller reports what happened and when, and carries out the returned decisions. The first connection starts a
session. The session outlives its connections by the lease and ends exactly once. Its end reason is kept for another
lease, for clients that return late. A session belongs to the identity that started it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from meshgate_gateway.control import CALL_BOUNDS, SYNC_BOUNDS, EngineCounts, Outcome, Samples

MAX_ENDED_LEASE = 1800.0
"""The longest lease, in seconds, of a session whose connection ended while its client was still heard from. A driver
that lives connects again within seconds, unless the network in between is down, so this driver has probably ended. A
laptop that sleeps or has lost its network falls silent first, and its session has the whole lease. So has a session
with an earlier connection that was cut at the same age: a load balancer that cuts by age, as GCE's does after 30 s, may
also do so when the laptop has just fallen asleep."""
SILENT_AFTER = 20.0
"""Seconds; clients ping every 15."""
CUTS_REMEMBERED = 4
"""Per session. Few: of many cuts at random ages, one would be at about the age at which the driver is killed."""
Kind: TypeAlias = Literal["died", "ended", "expired", "unknown"]
MAX_GONE = 256


@dataclass(frozen=True, slots=True)
class Start:
    """A new session: start an engine for it and hand the connection over."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A live session: hand the connection to its engine."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A session that has ended, and why. ``kind``: its engine died, it ended in order, its lease expired, or this
    gateway does not know it. ``name``: of a detached session, else ""."""

    kind: Kind
    reason: str
    output: str = ""
    at: float = 0.0
    owner: str = ""
    name: str = ""

    @property
    def is_looked_for(self) -> bool:
        """Whether someone may look for it: it was detached, or did not end in order."""
        return bool(self.name) or self.kind != "ended"


@dataclass(frozen=True, slots=True)
class Reject:
    """No session for this caller now; with ``forbidden``, never."""

    reason: str
    forbidden: bool = False


Admission: TypeAlias = Start | HandOver | Gone | Reject


@dataclass(frozen=True, slots=True)
class Statistics:
    """The current number of sessions."""

    sessions: int
    connected: int
    gone: int


@dataclass(slots=True)
class _Live:
    owner: str
    disconnected_at: float | None
    lease: float
    connected_at: float = math.nan  # also nan, whose age equals no other, during a connection of an earlier server
    cut_ages: deque[float] = field(default_factory=lambda: deque(maxlen=CUTS_REMEMBERED))
    meshes: set[str] = field(default_factory=set)
    name: str = ""  # once it is detached
    ending: Gone | None = None
    stopped_meshes: bool = False


class Sessions:
    """The table of sessions. Times are seconds on any one monotonic clock."""

    def __init__(self, *, lease: float, limit: int, now: float) -> None:
        self._lease, self._limit = lease, limit
        self._live: dict[str, _Live] = {}
        self._gone: dict[str, Gone] = {}
        self._dirty: set[str] = set()
        self._rejecting: str | None = None
        self._idle_since: float | None = now

    def admit(self, session: str, owner: str, *, resume: bool, now: float) -> Admission:
        """What to do with a connection for ``session``; ``resume``: the client was connected to it before.

        - the table no longer admits: rejected
        - live, owned by another identity: rejected as forbidden
        - live: handed over, or gone if it is ending
        - ended: gone, with the reason
        - unknown, to be resumed: gone, since its state is lost
        - unknown, table full: rejected
        - unknown: started
        """
        if self._rejecting is not None:
            return Reject(self._rejecting)
        if live := self._live.get(session):
            if live.owner != owner:
                return Reject("the session belongs to another identity", forbidden=True)
            return live.ending or HandOver()
        return self._gone.get(session) or self._start(session, owner, resume, now)

    def _start(self, session: str, owner: str, resume: bool, now: float) -> Admission:
        if resume:
            return Gone(
                "unknown",
                "this gateway does not know the session: the gateway was restarted, or the session ended long ago",
            )
        if len(self._live) >= self._limit:
            return Reject(
                f"the gateway is at its limit of {self._limit} sessions (--max-sessions): end one or retry later"
            )
        self._live[session] = _Live(owner, disconnected_at=now, lease=self._lease)
        self._idle_since = None
        return Start()

    def restore(self, session: str, owner: str, meshes: frozenset[str], name: str = "") -> None:
        """A live session of an earlier server. It cannot expire until ``connected`` or ``disconnected`` is called."""
        self._live[session] = _Live(owner, disconnected_at=None, lease=self._lease, meshes=set(meshes), name=name)
        self._idle_since = None

    def restore_gone(self, session: str, gone: Gone) -> None:
        """A session that ended under an earlier server."""
        self._gone[session] = gone

    @property
    def gone(self) -> Mapping[str, Gone]:
        """The sessions that have ended and are remembered."""
        return self._gone

    def named(self, session: str, name: str) -> None:
        """The session is detached, under this name."""
        self._live[session].name = name

    def name_of(self, session: str) -> str:
        """The name of a detached session; empty if it is not detached, or over."""
        live = self._live.get(session)
        return live.name if live is not None else ""

    def connected(self, session: str, now: float) -> None:
        live = self._live[session]
        live.disconnected_at, live.connected_at = None, now

    def disconnected(self, session: str, now: float, *, silence: float) -> float:
        """The connection ended, after ``silence`` seconds without data. Returns for how long the session is kept."""
        live = self._live[session]
        age = now - live.connected_at
        live.connected_at, live.disconnected_at = math.nan, now
        live.lease = self._lease
        if silence <= SILENT_AFTER:
            if not any(abs(age - cut) <= max(2.0, 0.1 * cut) for cut in live.cut_ages):
                live.lease = min(self._lease, MAX_ENDED_LEASE)
            live.cut_ages.append(age)  # read when the next connection ends: by then the client has come back
        return live.lease

    def owned_by(self, owner: str) -> list[str]:
        """The live sessions of an identity, oldest first."""
        return [session for session, live in self._live.items() if live.owner == owner]

    def ended_of(self, owner: str, now: float) -> Iterator[tuple[str, Gone, float]]:
        """The remembered sessions of an identity that someone may look for, each with the seconds since its end, the
        oldest first: those that were detached, and those that did not end in order."""
        for session, gone in self._gone.items():
            if gone.owner == owner and gone.is_looked_for:
                yield session, gone, max(0.0, now - gone.at)

    def is_connected(self, session: str) -> bool:
        live = self._live.get(session)
        return live is not None and live.disconnected_at is None

    def add_mesh(self, session: str, mesh: str) -> None:
        """Records that the session has received the hosts of ``mesh``."""
        self._live[session].meshes.add(mesh)

    def meshes_of(self, session: str) -> frozenset[str]:
        """The meshes whose hosts the session has received."""
        live = self._live.get(session)
        return frozenset(live.meshes) if live is not None else frozenset()

    def owner_of(self, session: str) -> str:
        """The identity that started the session; empty if the session is over."""
        live = self._live.get(session)
        return live.owner if live is not None else ""

    def ending(self, session: str, reason: str, kind: Kind = "ended") -> None:
        """The session is ending. The first reason is kept."""
        live = self._live[session]
        live.ending = live.ending or Gone(kind, reason)

    def ended(self, session: str, reason: str) -> None:
        """The engine has stopped the session's meshes and exits next."""
        self.ending(session, reason)
        self._live[session].stopped_meshes = True

    def exited(self, session: str, reason: str, output: str, now: float) -> Gone:
        """The engine process has exited. Returns how the session ended."""
        live = self._live.pop(session)
        if not live.stopped_meshes:
            self._dirty |= live.meshes
        gone = live.ending or Gone("died", f"the session's engine {reason}", output)
        gone = Gone(gone.kind, gone.reason, output if gone.kind == "died" else "", now, live.owner, live.name)
        self._gone[session] = gone
        if len(self._gone) > MAX_GONE:  # those in order first: a look at the job, such as by `top`, is one
            in_order = (name for name, each in self._gone.items() if not each.is_looked_for and name != session)
            del self._gone[next(in_order, next(iter(self._gone)))]
        if not self._live:
            self._idle_since = now
        return gone

    def expire(self, now: float) -> dict[str, str]:
        """The sessions that the caller must end because their lease has expired, with the reason. Forgets the end
        reasons of long ago."""
        self._gone = {session: gone for session, gone in self._gone.items() if gone.at + self._lease > now}
        expired = {
            session: f"no client was connected for its lease of {live.lease:g} s"
            for session, live in self._live.items()
            if self._expires_at(live) <= now
        }
        for session, reason in expired.items():
            self.ending(session, reason, "expired")
        return expired

    def next_expiry(self) -> float | None:
        """When to call ``expire`` next; None if nothing can expire."""
        times = [self._expires_at(live) for live in self._live.values()]
        times += [gone.at + self._lease for gone in self._gone.values()]
        return min((time for time in times if time != float("inf")), default=None)

    def stop_admitting(self, reason: str) -> list[str]:
        """Rejects all connections from now on. Returns the live sessions."""
        self._rejecting = reason
        return list(self._live)

    def meshes_to_reap(self) -> frozenset[str]:
        """Meshes that no session uses and on which a session left processes running."""
        return frozenset(self._dirty.difference(*(live.meshes for live in self._live.values())))

    def reaped(self, meshes: frozenset[str]) -> None:
        self._dirty -= meshes

    @property
    def idle_since(self) -> float | None:
        """Since when there has been no session; None while there is one."""
        return self._idle_since

    def statistics(self) -> Statistics:
        connected = sum(live.disconnected_at is None for live in self._live.values())
        return Statistics(sessions=len(self._live), connected=connected, gone=len(self._gone))

    def validate_state(self) -> None:
        """Asserts the invariants. Tests call it after every step."""
        assert not self._live.keys() & self._gone.keys()
        assert (self._idle_since is None) == bool(self._live)
        assert len(self._live) <= self._limit
        assert len(self._gone) <= MAX_GONE
        assert all(live.ending for live in self._live.values() if live.stopped_meshes)

    def _expires_at(self, live: _Live) -> float:
        if live.disconnected_at is None or live.ending is not None:
            return float("inf")
        return live.disconnected_at + live.lease


@dataclass(slots=True)
class Durations:
    """A histogram. ``buckets`` has one count more than ``bounds``, which are in seconds."""

    bounds: tuple[float, ...]
    buckets: list[int] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def add(self, samples: Samples) -> None:
        for index, count in enumerate(samples.buckets[: len(self.buckets)]):
            self.buckets[index] += count
        self.seconds += samples.seconds


@dataclass(slots=True)
class Totals:
    """``reconnections`` are further connections of a session; ``ended`` counts sessions by how they ended."""

    started: int = 0
    reconnections: int = 0
    ended: Counter[Kind] = field(default_factory=Counter)
    calls: Counter[Outcome] = field(default_factory=Counter)
    call_times: Durations = field(default_factory=lambda: Durations(CALL_BOUNDS))
    casts: int = 0
    sync_times: Durations = field(default_factory=lambda: Durations(SYNC_BOUNDS))
    bytes_received: int = 0
    bytes_sent: int = 0
    lines: int = 0

    def add(self, counts: EngineCounts) -> None:
        """Adds what an engine has counted since its last message."""
        self.calls.update(counts.calls)
        self.call_times.add(counts.call_times)
        self.casts += counts.casts
        self.sync_times.add(counts.sync_times)
        self.bytes_received += counts.bytes_received
        self.bytes_sent += counts.bytes_sent
        self.lines += counts.lines

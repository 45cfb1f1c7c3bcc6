"""Which sessions there are and what becomes of them: decisions only, no process and no socket.

Whoever calls says what happened and when, and carries out what is returned. A session is begun by its first
connection, outlives its connections by the lease, and ends once; the reason is kept for as long again, so that a
client that comes back late is told it. A session belongs to the identity that began it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Admission", "Begin", "Gone", "HandOver", "Refuse", "Sessions", "Statistics"]

Kind: TypeAlias = Literal["died", "ended", "expired", "unknown"]
MAX_GONE = 256


@dataclass(frozen=True, slots=True)
class Begin:
    """A new session: give it an engine and hand the connection over."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A session that lives: hand the connection to its engine."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A session that ended: tell why. ``kind``: its engine died, it ended in order, its lease ran out, or
    nothing is known of it."""

    kind: Kind
    reason: str
    output: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """No session for this one now. ``forbidden``: never."""

    reason: str
    forbidden: bool = False


Admission: TypeAlias = Begin | HandOver | Gone | Refuse


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of now."""

    sessions: int
    connected: int
    gone: int


@dataclass(slots=True)
class _Live:
    owner: str
    disconnected_at: float | None
    meshes: set[str] = field(default_factory=set)
    ending: Gone | None = None
    said_goodbye: bool = False


class Sessions:
    """The table of sessions. Times are seconds on one clock of the caller's choice."""

    def __init__(self, *, lease: float, limit: int, now: float) -> None:
        self._lease, self._limit = lease, limit
        self._live: dict[str, _Live] = {}
        self._gone: dict[str, Gone] = {}
        self._soiled: set[str] = set()
        self._refusing: str | None = None
        self._idle_since: float | None = now

    def admit(self, session: str, owner: str, *, resume: bool, now: float) -> Admission:
        """What to do with a connection for ``session``; ``resume``: the client has been connected to it before.

        - refusing: refused, whoever it is
        - live, another's: forbidden
        - live: handed over, or gone when it is ending
        - ended here: gone, with the reason
        - unknown, to be resumed: gone, as it cannot be what it was
        - unknown, no room: refused
        - unknown: begun
        """
        if self._refusing is not None:
            return Refuse(self._refusing)
        if live := self._live.get(session):
            if live.owner != owner:
                return Refuse("the session belongs to another identity", forbidden=True)
            return live.ending or HandOver()
        return self._gone.get(session) or self._begin(session, owner, resume, now)

    def _begin(self, session: str, owner: str, resume: bool, now: float) -> Admission:
        if resume:
            return Gone("unknown", "this gateway does not know the session: it was restarted, or long ago")
        if len(self._live) >= self._limit:
            return Refuse(f"there are {self._limit} sessions, as many as --max-sessions allows")
        self._live[session] = _Live(owner, disconnected_at=now)
        self._idle_since = None
        return Begin()

    def connected(self, session: str) -> None:
        self._live[session].disconnected_at = None

    def disconnected(self, session: str, now: float) -> None:
        self._live[session].disconnected_at = now

    def uses(self, session: str, mesh: str) -> None:
        """The session has learnt the hosts of ``mesh``."""
        self._live[session].meshes.add(mesh)

    def meshes_of(self, session: str) -> frozenset[str]:
        """The meshes whose hosts the session has learnt."""
        live = self._live.get(session)
        return frozenset(live.meshes) if live is not None else frozenset()

    def ending(self, session: str, reason: str, kind: Kind = "ended") -> None:
        """The session is being ended, or says itself that it is over. The first reason counts."""
        live = self._live[session]
        live.ending = live.ending or Gone(kind, reason)

    def said_goodbye(self, session: str, reason: str) -> None:
        """The engine has stopped the session's meshes and exits."""
        self.ending(session, reason)
        self._live[session].said_goodbye = True

    def exited(self, session: str, reason: str, output: str, now: float) -> Gone:
        """The engine's process is gone. Returns what the session leaves."""
        live = self._live.pop(session)
        if not live.said_goodbye:
            self._soiled |= live.meshes
        gone = live.ending or Gone("died", f"the session's engine {reason}", output)
        gone = Gone(gone.kind, gone.reason, gone.output, now)
        self._gone[session] = gone
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        if not self._live:
            self._idle_since = now
        return gone

    def expire(self, now: float) -> list[str]:
        """Sessions whose lease has run out and that are to be ended now; forgets what is too old to tell."""
        self._gone = {session: gone for session, gone in self._gone.items() if gone.at + self._lease > now}
        expired = [session for session, live in self._live.items() if self._expires_at(live) <= now]
        for session in expired:
            self.ending(session, f"nobody was connected for the lease of {self._lease:g} s", "expired")
        return expired

    def next_expiry(self) -> float | None:
        """When to call ``expire`` next, None while nothing can expire."""
        times = [self._expires_at(live) for live in self._live.values()]
        times += [gone.at + self._lease for gone in self._gone.values()]
        return min((time for time in times if time != float("inf")), default=None)

    def refuse(self, reason: str) -> list[str]:
        """From now on nobody is let in. Returns the sessions that live."""
        self._refusing = reason
        return list(self._live)

    def meshes_to_reap(self) -> frozenset[str]:
        """Meshes on which a session left without stopping its processes, and that no session uses now."""
        return frozenset(self._soiled.difference(*(live.meshes for live in self._live.values())))

    def reaped(self, meshes: frozenset[str]) -> None:
        self._soiled -= meshes

    @property
    def idle_since(self) -> float | None:
        """Since when there is no session, None while there is one."""
        return self._idle_since

    def statistics(self) -> Statistics:
        connected = sum(live.disconnected_at is None for live in self._live.values())
        return Statistics(sessions=len(self._live), connected=connected, gone=len(self._gone))

    def describe(self) -> Mapping[str, str]:
        """Each session's state in a word, for people."""
        return {
            session: "ending" if live.ending else "connected" if live.disconnected_at is None else "disconnected"
            for session, live in self._live.items()
        }

    def validate_state(self) -> None:
        """Asserts what always holds. For tests, after every step."""
        assert not self._live.keys() & self._gone.keys()
        assert (self._idle_since is None) == bool(self._live)
        assert len(self._live) <= self._limit
        assert len(self._gone) <= MAX_GONE
        assert all(live.ending for live in self._live.values() if live.said_goodbye)

    def _expires_at(self, live: _Live) -> float:
        if live.disconnected_at is None or live.ending is not None:
            return float("inf")
        return live.disconnected_at + self._lease

"""Which client holds a session: one at a time, and one that was replaced never again.

Takeovers are ordered by the handshakes of the clients, not by their first messages: a message may be delayed and arrive
after its sender was killed and another client has taken over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal
from urllib.parse import unquote

from websockets.datastructures import Headers

MAX_NAME = 256
MAX_REPLACED = 4096
MAX_CLAIMS = 1024


@dataclass(frozen=True, slots=True)
class Applicant:
    """A client that connects. ``takes_over``: it wants to replace the holder."""

    identity: str
    name: str
    takes_over: bool

    @classmethod
    def of(cls, headers: Headers) -> Applicant:
        return cls(
            identity=headers.get("Meshgate-Holder", "")[:64],
            name=unquote(headers.get("Meshgate-Holder-Name", ""))[:MAX_NAME],
            takes_over=headers.get("Meshgate-Attach") == "1",
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a client may not connect. ``kind`` is for the client's code."""

    kind: Literal["taken_over", "not_detached"]
    reason: str


Decision = Literal["resume", "take over"]


@dataclass(slots=True)
class Holders:
    """The holder of one session, and those that it had."""

    identity: str | None = None
    name: str = ""
    since: float = field(default_factory=time.time)  # seconds since 1970
    started: float = field(default_factory=time.time)  # when the first client connected
    takeovers: int = 0
    previous: str = ""
    _replaced: dict[str, None] = field(default_factory=dict)  # oldest first
    _claims: dict[str, None] = field(default_factory=dict)  # of clients that want to take over; oldest first

    def claim(self, applicant: Applicant, *, detached: bool) -> Refusal | None:
        """Notes the claim of a client that connects, at its handshake. Returns why it may not connect, if it may not.

        A client keeps its place if it connects again.
        """
        decision = self.check(applicant, detached=detached)
        if isinstance(decision, Refusal):
            return decision
        if decision == "take over":
            self._claims.setdefault(applicant.identity)
            if len(self._claims) > MAX_CLAIMS:
                self._void(next(iter(self._claims)))
        return None

    def decide(self, applicant: Applicant, *, detached: bool) -> Decision | Refusal:
        """Whether the client may connect, and as whom. If so, it becomes the holder; the first client always does.

        A client that takes over voids every claim that is older than its own.
        """
        decision = self.check(applicant, detached=detached)
        if self.identity is None:
            self._set(applicant)
            self.started = self.since
        elif decision == "take over":
            self._replace(self.identity, applicant)
        return decision

    def check(self, applicant: Applicant, *, detached: bool) -> Decision | Refusal:
        """What ``decide`` would decide."""
        if self.identity is None or applicant.identity == self.identity:
            return "resume"
        if applicant.identity in self._replaced or not applicant.takes_over:
            when = time.strftime("%H:%M:%S UTC", time.gmtime(self.since))
            by = f" ({self.name})" if self.name else ""
            return Refusal(
                "taken_over",
                f"another process{by} has taken over this session at {when}. Its calls and meshes go on there; to take "
                "it back, call job.attach()",
            )
        if not detached:
            return Refusal(
                "not_detached",
                f"the session is not detached, so only its own driver ({self.name or 'unknown'}) may use it: pass "
                "detached=True to its job, or call job.detach() there",
            )
        return "take over"

    def _replace(self, holder: str, applicant: Applicant) -> None:
        older = takewhile(lambda identity: identity != applicant.identity, list(self._claims))
        for identity in (holder, *older):
            self._void(identity)
        self._claims.pop(applicant.identity, None)
        self.takeovers += 1
        self.previous = self.name
        self._set(applicant)

    def _void(self, identity: str) -> None:
        """The client never gets the session again."""
        self._claims.pop(identity, None)
        self._replaced[identity] = None
        if len(self._replaced) > MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]

    def _set(self, applicant: Applicant) -> None:
        self.identity, self.name, self.since = applicant.identity, applicant.name, time.time()

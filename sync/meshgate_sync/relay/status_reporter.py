"""What a relay reports towards the gateway: acknowledgements and unreachable parents, its own and those from below.

At the gateway itself they are reported to the engine.

Imports nothing but the standard library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .commands import Command, PeerLink, ReportStatus, ReportUnreachable, Send
from .frames import Ack, Unreachable
from .upstream import Upstream
from .version_state import VersionLog

log = logging.getLogger(__name__)
_MAX_EARLY = 64


@dataclass(slots=True)
class _Tally:
    """Of one version. ``unreported``: the hosts whose latest state the parent does not know."""

    ready: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unreported: dict[str, None] = field(default_factory=dict)

    def take_ack(self, root: bytes) -> Ack:
        names, self.unreported = list(self.unreported), {}
        ready = tuple(name for name in names if name in self.ready)
        return Ack(root, ready, tuple((name, self.failed[name]) for name in names if name in self.failed))


class AckBuffer:
    """``deadline``: when to report; at once, unless there was a report within the last ``gather_timeout`` seconds."""

    def __init__(self, gather_timeout: float) -> None:
        self.deadline: float | None = None
        self._gather_timeout = gather_timeout
        self._reported_at = float("-inf")
        self._tallies: dict[bytes, _Tally] = {}
        self._early: dict[bytes, list[Ack]] = {}

    def open(self, root: bytes, now: float) -> None:
        """A version was announced. Acknowledgements that arrived before it count."""
        self._tallies[root] = _Tally()
        for ack in self._early.pop(root, ()):
            self.add(root, ack.ready, dict(ack.failed), now)

    def close(self, root: bytes) -> None:
        self._tallies.pop(root, None)

    def failed(self, root: bytes) -> Mapping[str, str]:
        """The hosts that cannot get the version, and why."""
        return self._tallies[root].failed

    def add(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        tally = self._tallies.get(root)
        if tally is None:
            self._keep_early(Ack(root, tuple(ready), tuple(failed.items())))
            return
        for name in ready:
            tally.failed.pop(name, None)
            tally.ready[name] = tally.unreported[name] = None
        for name, reason in failed.items():
            tally.ready.pop(name, None)
            tally.failed[name] = reason
            tally.unreported[name] = None
        if self.deadline is None and tally.unreported:
            self.deadline = max(now, self._reported_at + self._gather_timeout)

    def _keep_early(self, ack: Ack) -> None:
        self._early.setdefault(ack.root, []).append(ack)
        if len(self._early) > _MAX_EARLY:  # of versions that were withdrawn meanwhile
            del self._early[next(iter(self._early))]

    def take_unreported(self, now: float) -> list[Ack]:
        """What the parent does not know yet; it counts as reported."""
        self.deadline = None
        acks = [tally.take_ack(root) for root, tally in self._tallies.items() if tally.unreported]
        if acks:
            self._reported_at = now
        return acks

    def take_all(self, now: float) -> list[Ack]:
        """Every acknowledgement, for a new parent."""
        for tally in self._tallies.values():
            tally.unreported = {**tally.ready, **dict.fromkeys(tally.failed)}
        return self.take_unreported(now)

    def validate_state(self, roots: Iterable[bytes]) -> None:
        """Raises AssertionError unless the announced versions are ``roots`` and each host is ready or failed."""
        assert self._tallies.keys() == set(roots)
        assert not self._early.keys() & self._tallies.keys()
        assert len(self._early) <= _MAX_EARLY
        for tally in self._tallies.values():
            assert not tally.ready.keys() & tally.failed.keys()
            assert tally.unreported.keys() <= tally.ready.keys() | tally.failed.keys()


class StatusReporter:
    """Appends reports to ``commands``. ``upstream``: None at the gateway."""

    def __init__(self, name: str, upstream: Upstream | None, gather_timeout: float, commands: list[Command]) -> None:
        self._upstream = upstream
        self._commands = commands
        self._acks = AckBuffer(gather_timeout)
        self._unreachable: dict[str, str] = {}
        self._log = VersionLog(log, name)

    @property
    def deadline(self) -> float | None:
        """When to call ``report_if_due``, if there is anything to report."""
        return self._acks.deadline

    # --- acknowledgements -------------------------------------------------------------------------------

    def open(self, root: bytes, now: float) -> None:
        """A version was announced."""
        self._acks.open(root, now)
        self.report_if_due(now)

    def close(self, root: bytes) -> None:
        self._acks.close(root)

    def failed(self, root: bytes) -> Mapping[str, str]:
        """The hosts that cannot get an announced version, and why."""
        return self._acks.failed(root)

    def add(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        """These hosts are ready for a version, or cannot get it."""
        self._acks.add(root, ready, failed, now)
        self.report_if_due(now)

    def report_if_due(self, now: float) -> None:
        up = self._upstream
        if self.deadline is None or now < self.deadline:
            return
        if up is None:
            for ack in self._acks.take_unreported(now):
                self._log(ack.root, "acknowledged", ready=len(ack.ready), failed=len(ack.failed))
                self._commands.append(ReportStatus(ack.root, ack.ready, ack.failed))
        elif up.connected_to_control:
            acks = self._acks.take_unreported(now)
            self._send(up.control, acks)
            if up.backup is not None:
                self._send(up.backup, acks)
        else:
            self._acks.deadline = None  # reported when the next parent is greeted

    def report_all(self, peer: str, now: float) -> None:
        """Sends every acknowledgement to a parent that is new or becomes the backup."""
        self._send(peer, self._acks.take_all(now))

    def _send(self, peer: str, acks: Iterable[Ack]) -> None:
        for ack in acks:
            self._log(ack.root, "acknowledged", peer, ready=len(ack.ready), failed=len(ack.failed))
            self._commands.append(Send(PeerLink(peer, up=True), ack))

    # --- unreachable parents ----------------------------------------------------------------------------

    def add_unreachable(self, hosts: Iterable[tuple[str, str]]) -> None:
        """Passes on what changed: (host, what it cannot reach and why), or (host, "") if it can again."""
        changed = {name: reason for name, reason in hosts if self._unreachable.get(name, "") != reason}
        self._unreachable.update(changed)
        if not changed:
            return
        if self._upstream is None:
            self._commands.append(ReportUnreachable(tuple(changed.items())))
        elif self._upstream.connected_to_control:
            self._send_unreachable(self._upstream.control, changed)

    def report_unreachable(self, peer: str) -> None:
        """Sends all of it to a new parent."""
        if self._unreachable:
            self._send_unreachable(peer, self._unreachable)

    def _send_unreachable(self, peer: str, hosts: Mapping[str, str]) -> None:
        self._commands.append(Send(PeerLink(peer, up=True), Unreachable(tuple(hosts.items()))))

    def validate_state(self, roots: Iterable[bytes]) -> None:
        """Raises AssertionError unless acknowledgements are kept for exactly the versions ``roots``."""
        self._acks.validate_state(roots)

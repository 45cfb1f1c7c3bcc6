"""Which hosts below a relay are ready for which version: gathered on the way up, so that thousands are few messages.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .frames import Ack

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

"""Who is ready for which version, below one relay: gathered on the way up, so that thousands are few messages.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .frames import Ack

__all__ = ["Acks"]

_EARLY = 64


@dataclass(slots=True)
class _Tally:
    """Of one version; ``untold`` are the hosts of which the parent does not know the newest."""

    ready: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    untold: dict[str, None] = field(default_factory=dict)

    def ack(self, root: bytes, names: Iterable[str]) -> Ack:
        told = list(names)
        ready = tuple(name for name in told if name in self.ready)
        return Ack(root, ready, tuple((name, self.failed[name]) for name in told if name in self.failed))


class Acks:
    """What is to be told is told at once, unless something was told within the last ``gather`` seconds; then at
    ``deadline``."""

    def __init__(self, gather: float) -> None:
        self.deadline: float | None = None
        self._gather = gather
        self._told_at = float("-inf")
        self._tallies: dict[bytes, _Tally] = {}
        self._early: dict[bytes, list[Ack]] = {}

    def open(self, root: bytes, now: float) -> None:
        """A version was announced; what was heard of it before counts."""
        self._tallies[root] = _Tally()
        for ack in self._early.pop(root, ()):
            self.note(root, ack.ready, dict(ack.failed), now)

    def close(self, root: bytes) -> None:
        self._tallies.pop(root, None)

    def failed(self, root: bytes) -> Mapping[str, str]:
        return self._tallies[root].failed

    def note(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        tally = self._tallies.get(root)
        if tally is None:
            self._keep_early(Ack(root, tuple(ready), tuple(failed.items())))
            return
        for name in ready:
            tally.failed.pop(name, None)
            tally.ready[name] = tally.untold[name] = None
        for name, reason in failed.items():
            tally.ready.pop(name, None)
            tally.failed[name] = reason
            tally.untold[name] = None
        if self.deadline is None and tally.untold:
            self.deadline = max(now, self._told_at + self._gather)

    def _keep_early(self, ack: Ack) -> None:
        self._early.setdefault(ack.root, []).append(ack)
        if len(self._early) > _EARLY:  # of versions withdrawn meanwhile
            del self._early[next(iter(self._early))]

    def untold(self, now: float) -> list[Ack]:
        """What the parent does not know yet; it is taken to be told now."""
        self.deadline = None
        acks = [tally.ack(root, tally.untold) for root, tally in self._tallies.items() if tally.untold]
        for tally in self._tallies.values():
            tally.untold = {}
        if acks:
            self._told_at = now
        return acks

    def everything(self, now: float) -> list[Ack]:
        """All there is to tell, for a parent that is new."""
        for tally in self._tallies.values():
            tally.untold = {**tally.ready, **dict.fromkeys(tally.failed)}
        return self.untold(now)

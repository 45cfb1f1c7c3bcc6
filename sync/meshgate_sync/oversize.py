"""Refuses an unreasonable tree and names what makes it so."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from .errors import TreeTooLarge

__all__ = ["Limits", "Sizes"]

_LARGEST = 10
_DEPTH = 3
_MOST_OF = 0.8
_GIVE_UP = 4


@dataclass(frozen=True, slots=True)
class Limits:
    bytes: int = 1_000_000_000
    files: int = 200_000


class Sizes:
    """Adds up a tree while it is walked.

    Raises TreeTooLarge from ``check``, or from ``add`` once walking the rest would only cost time.
    """

    def __init__(self, root: str, limits: Limits) -> None:
        self.bytes = 0
        self.files = 0
        self._root = root
        self._limits = limits
        self._entries: list[tuple[bytes, int, int]] = []

    def add(self, path: bytes, size: int, files: int) -> None:
        self.bytes += size
        self.files += files
        self._entries.append((path, size, files))
        if self.files > _GIVE_UP * self._limits.files:
            self.check()

    def check(self) -> None:
        limits = self._limits
        if self.bytes > limits.bytes:
            reason = f"{self.bytes / 1e6:,.0f} MB, the limit is {limits.bytes / 1e6:,.0f} MB"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=True))
        if self.files > limits.files:
            reason = f"{self.files:,} files, the limit is {limits.files:,}"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=False))

    def _largest(self, *, by_size: bool) -> list[tuple[str, int, int]]:
        """The largest directories near the top and files anywhere, without those that are large only because of one
        entry already in the list."""
        totals: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        for path, size, files in self._entries:
            names = path.split(b"/")
            ends = {*range(1, min(len(names), _DEPTH + 1)), len(names)}
            for end in ends:
                total = totals[b"/".join(names[:end])]
                total[0] += size
                total[1] += files
        weight = 0 if by_size else 1
        heaviest: dict[bytes, int] = defaultdict(int)  # what the heaviest entry below a directory weighs
        for path, total in totals.items():
            above = path.rpartition(b"/")[0]
            while above:
                heaviest[above] = max(heaviest[above], total[weight])
                above = above.rpartition(b"/")[0]
        telling = [path for path in totals if heaviest[path] < _MOST_OF * totals[path][weight]]
        chosen = sorted(telling, key=lambda path: (-totals[path][weight], path))[:_LARGEST]
        return [(os.fsdecode(path), totals[path][0], totals[path][1]) for path in chosen]

"""Rejects a tree that is too large to be code, and lists its largest entries."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..errors import TreeTooLarge, readable

_LARGEST = 10
_DEPTH = 3
_DOMINANT_SHARE = 0.8
_GIVE_UP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    bytes: int = 1_000_000_000
    files: int = 200_000


class Sizes:
    """The size of a tree, added up while it is walked.

    ``check`` raises TreeTooLarge; so does ``add`` once the tree is so large that walking the rest is a waste of time.
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
        if self.files > _GIVE_UP_FACTOR * self._limits.files:
            self.check()

    def check(self) -> None:
        limits = self._limits
        if self.bytes > limits.bytes:
            reason = f"it has {self.bytes / 1e6:,.0f} MB, the limit is {limits.bytes / 1e6:,.0f} MB"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=True))
        if self.files > limits.files:
            reason = f"it has {self.files:,} files, the limit is {limits.files:,}"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=False))

    def _largest(self, *, by_size: bool) -> list[tuple[str, int, int]]:
        """The largest directories near the top and files anywhere, except directories that are large only because of
        one entry in the list."""
        totals: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        for path, size, files in self._entries:
            names = path.split(b"/")
            ends = {*range(1, min(len(names), _DEPTH + 1)), len(names)}
            for end in ends:
                total = totals[b"/".join(names[:end])]
                total[0] += size
                total[1] += files
        unit = 0 if by_size else 1
        largest_below: dict[bytes, int] = defaultdict(int)  # size of the largest entry below a directory
        for path, total in totals.items():
            above = path.rpartition(b"/")[0]
            while above:
                largest_below[above] = max(largest_below[above], total[unit])
                above = above.rpartition(b"/")[0]
        candidates = [path for path in totals if largest_below[path] < _DOMINANT_SHARE * totals[path][unit]]
        chosen = sorted(candidates, key=lambda path: (-totals[path][unit], path))[:_LARGEST]
        return [(readable(path), totals[path][0], totals[path][1]) for path in chosen]

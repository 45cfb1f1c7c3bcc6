"""What the laptop is asked for: of each version so many bytes at a time, so that what comes of them has room here.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Questions"]


@dataclass(slots=True)
class _Version:
    """Pieces not asked for yet, and those asked for that have not come, by digest and size."""

    waiting: dict[bytes, int]
    open: dict[bytes, int] = field(default_factory=dict)


class Questions:
    """At most about ``limit`` bytes of a version are open at once. Versions do not wait for each other: the
    pieces of one may never come, when files have changed since it was scanned."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._versions: dict[bytes, _Version] = {}

    def add(self, root: bytes, pieces: Mapping[bytes, int]) -> None:
        """These are to be asked for, in this order, in place of whatever was for this version."""
        self._versions[root] = _Version(dict(pieces))

    def came(self, digest: bytes) -> None:
        for version in self._versions.values():
            version.open.pop(digest, None)
            version.waiting.pop(digest, None)

    def forget(self, root: bytes) -> None:
        self._versions.pop(root, None)

    def due(self) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """What to ask for now, by version; it is taken to be asked. A version has its turn when half of what was open
        has come, so that questions are few."""
        asked = []
        for root, version in list(self._versions.items()):
            size = sum(version.open.values())
            if size > self._limit // 2:
                continue
            digests = []
            while version.waiting and size < self._limit:
                digest = next(iter(version.waiting))
                version.open[digest] = version.waiting.pop(digest)
                size += version.open[digest]
                digests.append(digest)
            if digests:
                asked.append((root, tuple(digests)))
            elif not version.open:
                del self._versions[root]
        return asked

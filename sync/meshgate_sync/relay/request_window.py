"""Which pieces to request from the client: a window of bytes for each version, so that what arrives finds room here.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Version:
    """Pieces not requested yet, and those requested that have not arrived, digest to size."""

    waiting: dict[bytes, int]
    requested: dict[bytes, int] = field(default_factory=dict)


class RequestWindow:
    """At most about ``limit`` bytes of a version are requested at once. Versions do not wait for each other: the
    pieces of one may never arrive, if files changed after it was scanned."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._versions: dict[bytes, _Version] = {}

    def add(self, root: bytes, pieces: Mapping[bytes, int]) -> None:
        """The pieces to request for a version, in this order; replaces earlier ones of the same version."""
        self._versions[root] = _Version(dict(pieces))

    def arrived(self, digest: bytes) -> None:
        for version in self._versions.values():
            version.requested.pop(digest, None)
            version.waiting.pop(digest, None)

    def forget(self, root: bytes) -> None:
        self._versions.pop(root, None)

    def take(self) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """What to request now, by version; it counts as requested. A version takes more once half of its window has
        arrived, so that requests are few."""
        taken = []
        for root, version in list(self._versions.items()):
            size = sum(version.requested.values())
            if size > self._limit // 2:
                continue
            digests = []
            while version.waiting and size < self._limit:
                digest = next(iter(version.waiting))
                version.requested[digest] = version.waiting.pop(digest)
                size += version.requested[digest]
                digests.append(digest)
            if digests:
                taken.append((root, tuple(digests)))
            elif not version.requested:
                del self._versions[root]
        return taken

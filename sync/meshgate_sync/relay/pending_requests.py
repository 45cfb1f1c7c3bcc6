"""Requests of children that cannot be answered yet.

A child that learned of a version elsewhere may request pieces before the version is announced here, or while the store
is still preparing it.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Requests:
    """``pieces``: (child, digests). ``full_delta``: children."""

    pieces: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    full_delta: list[str] = field(default_factory=list)


class PendingRequests:
    """By version. ``take`` returns what is pending once it can be answered, ``discard`` drops it."""

    def __init__(self) -> None:
        self._by_root: dict[bytes, Requests] = {}

    def add_pieces(self, root: bytes, child: str, digests: tuple[bytes, ...]) -> None:
        self._by_root.setdefault(root, Requests()).pieces.append((child, digests))

    def add_full_delta(self, root: bytes, child: str) -> None:
        self._by_root.setdefault(root, Requests()).full_delta.append(child)

    def take(self, root: bytes) -> Requests:
        return self._by_root.pop(root, Requests())

    def discard(self, root: bytes) -> None:
        self._by_root.pop(root, None)

    def validate_state(self, answerable: Iterable[bytes]) -> None:
        """Raises AssertionError if requests for versions that are ``answerable`` are pending."""
        late = self._by_root.keys() & set(answerable)
        assert not late, f"requests are pending for {len(late)} versions that can be answered"

"""The steps of a relay that touch the disk, each a plain function of its command, for the store's thread.

What goes wrong is a value here: the relay decides what to make of it. A full disk is first relieved of everything
that is not in use.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .commands import Finish, Load
from .delta import Delta, decode, encode, whole
from .digest import piece_digest
from .errors import BaseUnknown, ObjectsDamaged, StoreFull, SyncError
from .fetch import Fetch
from .frames import Offer
from .store import Store
from .upkeep import Policy, collect

__all__ = ["Begun", "Disk", "Loaded", "Made"]

_PRESSED = Policy(newest=1, age=0.0, grace=0.0)
_COLLECT_EVERY = 600

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Begun:
    """What the store lacks of a version; or that it does not know the version's base; or why it cannot begin."""

    missing: Mapping[bytes, int] = field(default_factory=dict)
    baseless: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """The version is ready; or why it cannot be; or it is to be begun again, for files of it were damaged."""

    failure: str | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """Pieces read, digests left for want of room, digests that are not there."""

    read: list[tuple[bytes, bytes]]
    unread: tuple[bytes, ...]
    lost: tuple[bytes, ...]


class Disk:
    """Carries out commands on ``store``. For one thread."""

    def __init__(self, store: Store, owner: str) -> None:
        self.store = store
        self._owner = owner
        self._looked_after = 0
        self._damaged: bytes | None = None

    def begin(self, offer: Offer) -> Begun:
        try:
            delta = decode(offer.delta)
            fetch = self._relieved(lambda: self._begin(delta, offer.inline))
        except BaseUnknown:
            return Begun(baseless=True)
        except SyncError as problem:
            return Begun(failure=str(problem))
        return Begun(dict(fetch.missing))

    def _begin(self, delta: Delta, inline: tuple[tuple[bytes, bytes], ...]) -> Fetch:
        fetch = self.store.begin(delta)
        for digest, data in inline:
            if digest in fetch.missing and piece_digest(data) == digest:
                self.store.add(digest, data)
        return fetch

    def add(self, pieces: list[tuple[bytes, bytes]]) -> str | None:
        """Why the pieces could not be kept, or None."""
        try:
            for digest, data in pieces:
                self._relieved(lambda digest=digest, data=data: self.store.add(digest, data))  # type: ignore[misc]
        except SyncError as problem:
            return str(problem)
        return None

    def finish(self, command: Finish) -> Made:
        replaces = command.replaces if any(command.replaces) else None
        try:
            self._relieved(
                lambda: self.store.finish(command.root, base=command.base, owner=self._owner, replaces=replaces)
            )
        except ObjectsDamaged:
            return Made(damaged=True)
        except SyncError as problem:
            return Made(str(problem))
        return Made()

    def hold(self, root: bytes) -> str | None:
        """Why it cannot be noted that processes are about to be started from a version, or None."""
        try:
            self._relieved(lambda: self.store.hold(root, self._owner))
        except SyncError as problem:
            return str(problem)
        return None

    def load(self, command: Load) -> Loaded:
        read: list[tuple[bytes, bytes]] = []
        lost: list[bytes] = []
        size = 0
        for digest in command.digests:
            if size >= command.limit:
                break
            data = self.store.read(digest)
            if data is None:
                lost.append(digest)
            else:
                read.append((digest, data))
                size += len(data)
        return Loaded(read, command.digests[len(read) + len(lost) :], tuple(lost))

    def describe(self, root: bytes) -> bytes | None:
        tree = self.store.tree(root)
        return encode(whole(tree)) if tree is not None else None

    def look_after(self, newest: bytes, *, reserve: bool) -> None:
        """Between versions: lays in a spare of the newest if processes have been or will be started from it, now and
        then collects. Whatever fails here is tried again."""
        self._looked_after += 1
        try:
            if newest != self._damaged and (reserve or self.store.snapshots.opened(newest)):
                self.store.prepare_spare(newest)
            if self._looked_after % _COLLECT_EVERY == 0:
                collect(self.store)
        except ObjectsDamaged:
            self._damaged = newest  # there is no spare of it to be had; the next version will have its files fetched
        except SyncError:
            return

    def _relieved(self, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except StoreFull:
            collect(self.store, _PRESSED)
            return step()

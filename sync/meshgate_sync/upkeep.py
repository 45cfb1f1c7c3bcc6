"""Collects what no one needs any more: old snapshots, and the objects that nothing is made of.

Kept are the versions in use, those pinned by a driver or about to be used, and the newest few; beyond that a version
goes when it is old or when the store is over its size, oldest first.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .objects import distinct
from .store import Store, translated
from .tree import files

__all__ = ["Collected", "Policy", "collect"]


@dataclass(frozen=True, slots=True)
class Policy:
    """``newest`` versions are kept whatever their age; others go after ``age`` seconds, or when objects take more
    than ``bytes``, as many as it takes. An object that nothing names is left for ``grace`` seconds after a version had
    a use for it: one may be on its way in another process."""

    newest: int = 4
    age: float = 24 * 3600
    bytes: int = 20_000_000_000
    grace: float = 600


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed; ``bytes``, those of large files that were never completed among them."""

    versions: int
    objects: int
    bytes: int


def collect(store: Store, policy: Policy | None = None, *, now: float | None = None) -> Collected:
    """Removes what ``policy`` lets go and no one will complete, and returns what that was. Raises StoreError."""
    policy = policy or Policy()
    now = time.time() if now is None else now
    with translated(store.home):
        store.records.refresh()
        removed = _remove_versions(store, policy, now)
        count, size = _sweep(store, removed, now, policy.grace)
        # Last, for it may take room to write those anew that were recorded against them; the newest of them first,
        # so that none of those is one that goes as well.
        for root in reversed(removed):
            store.records.remove(root)
        size += store.drop_partials(now - policy.grace)
    return Collected(len(removed), count, size)


def _remove_versions(store: Store, policy: Policy, now: float) -> list[bytes]:
    """Removes the snapshots of the versions that are to go, oldest first; returns which those are."""
    stamps = dict(_ages(store))
    by_age = sorted(stamps, key=lambda root: stamps[root])
    naming = Counter(file for tree in store.trees() for file in distinct(files(tree)))
    excess = sum([file.size for file in naming]) - policy.bytes
    removed = []
    for root in by_age[: max(0, len(by_age) - policy.newest)]:
        too_old = now - stamps[root] > policy.age
        if store.brings(root) or not (too_old or excess > 0):
            continue
        if not store.snapshots.remove(root, pinned=False):
            continue
        store.snapshots.remove_spare(root)
        store.forget_complete(root)
        removed.append(root)
        for file in distinct(files(store.records.trees[root])):
            naming[file] -= 1
            if not naming[file]:
                excess -= file.size
    return removed


def _ages(store: Store) -> Iterator[tuple[bytes, float]]:
    """Each version with the time of its record."""
    directory = os.path.join(store.home, "versions")
    for root in store.records.trees:
        with contextlib.suppress(FileNotFoundError):
            yield root, os.stat(os.path.join(directory, root.hex())).st_mtime


def _sweep(store: Store, going: Collection[bytes], now: float, grace: float) -> tuple[int, int]:
    """Removes the objects that no version on record or on its way is made of, those ``going`` aside."""
    staying = (tree for tree in store.trees() if tree.digest not in going)
    named = {file.key for tree in staying for file in distinct(files(tree))}
    count = size = 0
    for path, key in store.objects.paths():
        if key in named:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            # Not by its change time: that is renewed whenever a snapshot that links it is removed.
            if now - status.st_atime >= grace:
                os.unlink(path)
                store.objects.lost(path)
                count, size = count + 1, size + status.st_size
    return count, size

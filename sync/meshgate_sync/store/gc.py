"""Garbage collection: removes old versions, their snapshots, and objects that no version has.

Versions in use, pinned or held by a session, and the newest few are kept. Others are removed when they are old, or,
from the oldest on, while the store is over its size limit.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..tree.tree import files
from .objects import distinct_objects
from .snapshots import HELD_SECONDS
from .store import Store, store_errors


@dataclass(frozen=True, slots=True)
class Policy:
    """``keep_newest`` versions are kept whatever their age. Others are removed after ``max_age`` seconds, or when
    objects take more than ``max_bytes``. An object that no version has is kept for ``grace_period`` seconds after its
    last use: another process may be fetching a version that has it."""

    keep_newest: int = 4
    max_age: float = 24 * 3600
    max_bytes: int = 20_000_000_000
    grace_period: float = 600


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed. ``bytes`` includes unfinished files."""

    versions: int
    objects: int
    bytes: int


def collect(store: Store, policy: Policy | None = None, *, now: float | None = None) -> Collected:
    """Removes what ``policy`` does not keep. Raises StoreError."""
    policy = policy or Policy()
    now = time.time() if now is None else now
    with store_errors(store.home):
        store.records.refresh()
        removed = _remove_versions(store, policy, now)
        count, size = _sweep(store, removed, now, policy.grace_period)
        # Last, because recording their deltas in full may take space. Newest first, so that none of these is removed
        # too.
        for root in reversed(removed):
            store.records.remove(root)
        size += store.remove_partials(now - policy.grace_period)
    return Collected(len(removed), count, size)


def stale_snapshots(store: Store, *, now: float | None = None) -> list[bytes]:
    """Recorded versions whose snapshots can be removed: all but the newest, ten minutes after they were recorded.
    ``Snapshots.remove`` keeps those that are in use or needed by a session."""
    now = time.time() if now is None else now
    stamps = {root: stamp for root, stamp in _ages(store) if store.snapshots.ready(root)}
    by_age = sorted(stamps, key=lambda root: stamps[root])
    return [root for root in by_age[: max(0, len(by_age) - Policy().keep_newest)] if now - stamps[root] > HELD_SECONDS]


def _remove_versions(store: Store, policy: Policy, now: float) -> list[bytes]:
    """Removes the snapshots of the versions to collect, oldest first; returns these versions."""
    stamps = dict(_ages(store))
    by_age = sorted(stamps, key=lambda root: stamps[root])
    naming = Counter(file for tree in store.trees() for file in distinct_objects(files(tree)))
    excess = sum([file.size for file in naming]) - policy.max_bytes
    removed = []
    for root in by_age[: max(0, len(by_age) - policy.keep_newest)]:
        too_old = now - stamps[root] > policy.max_age
        if store.is_fetching(root) or not (too_old or excess > 0):
            continue
        if not store.snapshots.remove(root, pinned=False):
            continue
        store.snapshots.remove_spares(root)
        store.mark_incomplete(root)
        removed.append(root)
        for file in distinct_objects(files(store.records.trees[root])):
            naming[file] -= 1
            if not naming[file]:
                excess -= file.size
    return removed


def _ages(store: Store) -> Iterator[tuple[bytes, float]]:
    """Each version with the time at which it was recorded."""
    directory = os.path.join(store.home, "versions")
    for root in store.records.trees:
        with contextlib.suppress(FileNotFoundError):
            yield root, os.stat(os.path.join(directory, root.hex())).st_mtime


def _sweep(store: Store, going: Collection[bytes], now: float, grace: float) -> tuple[int, int]:
    """Removes the objects that no version has, recorded or being fetched, except those in ``going``."""
    staying = (tree for tree in store.trees() if tree.digest not in going)
    named = {file.key for tree in staying for file in distinct_objects(files(tree))}
    count = size = 0
    for path, key in store.objects.paths():
        if key in named:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            # Not the change time, which is updated whenever a link is removed.
            if now - status.st_atime >= grace:
                os.unlink(path)
                store.objects.lost(path)
                count, size = count + 1, size + status.st_size
    return count, size

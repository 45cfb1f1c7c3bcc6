"""Collects what no one needs any more: old snapshots, and the objects that nothing is made of.

Kept are the versions in use, those pinned by a driver, and the newest few; beyond that a version goes when it is old or
when the store is over its size, oldest first.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .objects import distinct
from .store import Store
from .tree import files

__all__ = ["Collected", "Policy", "collect"]


@dataclass(frozen=True, slots=True)
class Policy:
    """``newest`` versions are kept whatever their age; others go after ``age`` seconds, or when objects take more
    than ``bytes``. An object that nothing names is left for ``grace`` seconds: a version may be on its way."""

    newest: int = 4
    age: float = 24 * 3600
    bytes: int = 20_000_000_000
    grace: float = 600


@dataclass(frozen=True, slots=True)
class Collected:
    versions: int
    objects: int
    bytes: int


def collect(store: Store, policy: Policy | None = None, *, now: float | None = None) -> Collected:
    """Removes what ``policy`` lets go, and returns what that was."""
    policy = policy or Policy()
    now = time.time() if now is None else now
    store.records.refresh()
    pinned = set(store.snapshots.pins().values())
    stamps = dict(_ages(store))
    by_age = sorted(stamps, key=lambda root: stamps[root])
    removed = objects = size = 0
    for position, root in enumerate(by_age):
        newest = len(by_age) - position <= policy.newest
        too_old = now - stamps[root] > policy.age
        if root in pinned or newest or not (too_old or _object_bytes(store) > policy.bytes):
            continue
        if store.snapshots.remove(root):
            store.snapshots.remove_spare(root)
            store.records.remove(root)
            store.forget_complete(root)
            removed += 1
            if not too_old:
                count, freed = _sweep(store, now, policy.grace)
                objects, size = objects + count, size + freed
    count, freed = _sweep(store, now, policy.grace)
    return Collected(removed, objects + count, size + freed)


def _ages(store: Store) -> Iterator[tuple[bytes, float]]:
    """Each version with the time of its record."""
    directory = os.path.join(store.home, "versions")
    for root in store.records.trees:
        with contextlib.suppress(FileNotFoundError):
            yield root, os.stat(os.path.join(directory, root.hex())).st_mtime


def _sweep(store: Store, now: float, grace: float) -> tuple[int, int]:
    """Removes the objects that no version on record or on its way is made of."""
    named = {file.key for tree in store.trees() for file in distinct(files(tree))}
    count = size = 0
    for path, key in _objects(store):
        if key in named:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            if now - status.st_ctime > grace:
                os.unlink(path)
                store.objects.lost(path)
                count, size = count + 1, size + status.st_size
    return count, size


def _object_bytes(store: Store) -> int:
    total = 0
    for path, _ in _objects(store):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(path).st_size
    return total


def _objects(store: Store) -> Iterator[tuple[str, str]]:
    top = os.path.join(store.home, "objects")
    for prefix in os.listdir(top):
        for name in os.listdir(os.path.join(top, prefix)):
            yield os.path.join(top, prefix, name), prefix + name

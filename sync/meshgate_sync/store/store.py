"""The store of one host, or of the gateway: its versions, their pieces and their snapshots.

A process may be killed at any moment: the store opens again and ``verify`` finds nothing wrong. Files and directories
are built elsewhere and renamed into place, and a version is recorded before its snapshot appears. After a reboot a
store starts over, because the disk may lack what was written last. Several processes may share a store; each instance
belongs to one thread.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import BaseUnknown, ObjectsDamaged, StoreError, StoreFull
from ..tree.delta import Delta, PutFile, Splice, patch
from ..tree.tree import Directory, File, files, lookup, short
from .home import is_unlocked, locked
from .objects import Fetch, Objects, distinct_objects
from .place import disk_of, used_up
from .records import Records
from .snapshots import Snapshots, copy

_DIRECTORIES = ("objects", "versions", "snapshots", "opened", "checks", "spares", "pins", "held", "work")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Problem:
    """Found by ``verify``: ``what`` is wrong with ``path``, of version ``root`` (hex)."""

    path: str
    what: str
    root: str


class Store:
    """Opens the store below ``home``, or creates it.

    ``snapshots=False``: the gateway's, which passes versions on but runs no processes from them. ``boot`` identifies
    the current boot of the machine.
    """

    def __init__(self, home: str, *, snapshots: bool = True, boot: str | None = None) -> None:
        self.home = home
        self._makes_snapshots = snapshots
        self._complete: set[bytes] = set()
        self._fetches: dict[bytes, Fetch] = {}
        with store_errors(home):
            for name in _DIRECTORIES:
                os.makedirs(os.path.join(home, name), exist_ok=True)
            self._work = os.path.join(home, "work", f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
            self.objects = Objects(os.path.join(home, "objects"), self._work)
            with locked(home):
                os.mkdir(self._work)
                self._held = _lock(self._work)
                leftovers = self._adopt_leftovers()
                self.records = Records(os.path.join(home, "versions"), self._work)
                self.snapshots = Snapshots(home, self._work, self.objects, self.records)
                leftovers += self._start_over_after_reboot(boot or _boot_id())
            for left in leftovers:
                shutil.rmtree(left, ignore_errors=True)
            self._remove_unrecorded()
            self.snapshots.remove_unchecked()

    def ready(self, root: bytes) -> bool:
        """Whether version ``root`` is complete here: processes can be started from it, or other hosts can have it."""
        return self.snapshots.ready(root) if self._makes_snapshots else root in self._complete

    def prepare(self, delta: Delta) -> Fetch:
        """Starts to fetch the version that ``delta`` leads to; ``Fetch.missing`` has the pieces that are not here.

        Raises BaseUnknown, DeltaMismatch, StoreError.
        """
        base = self.tree(delta.base)
        tree = self.tree(delta.root)
        if tree is None:
            if base is None:
                raise BaseUnknown(delta.base)
            tree = patch(base, delta)
        needed: Iterable[File] = files(tree)
        if delta.root in self._complete:
            needed = ()
        elif delta.base in self._complete:
            needed = _files_put_by(delta, tree)
        try:
            with store_errors(self.home):
                absent = [file for file in distinct_objects(needed) if not self.objects.use(file)]
                _require_space(self.home, sum(map(self.objects.unwritten, absent)))
                fetch = self._fetches[delta.root] = Fetch(self.objects, tree, absent)
        finally:
            self._close_assemblies()
        return fetch

    def tree(self, root: bytes) -> Directory | None:
        """A version that is recorded or being fetched."""
        fetch = self._fetches.get(root)
        return fetch.tree if fetch is not None else self.records.tree(root)

    def is_fetching(self, root: bytes) -> bool:
        """Whether a version is being fetched."""
        return root in self._fetches

    def is_fetched(self, root: bytes) -> bool:
        """Whether a version that is being fetched lacks no piece, so that ``finish`` can be called."""
        return root in self._fetches and self._fetches[root].complete

    def trees(self) -> list[Directory]:
        """All versions whose objects are kept."""
        return [*self.records.trees.values(), *(fetch.tree for fetch in self._fetches.values())]

    def add(self, digest: bytes, data: bytes) -> None:
        """Stores a piece, whose digest the caller has verified, for every version that lacks it."""
        with store_errors(self.home, self._missing_bytes):
            for fetch in self._fetches.values():
                fetch.add(digest, data)

    def _missing_bytes(self) -> int:
        return sum(sum(fetch.missing.values()) for fetch in self._fetches.values())

    def read(self, digest: bytes) -> bytes | None:
        """A piece, verified; None if it is not here or is corrupt. In that case ``prepare`` looks at all files of a
        version again."""
        data = self.objects.read(digest)
        if data is None:
            self._complete.clear()
        return data

    def abandon(self, root: bytes) -> None:
        """Stops fetching version ``root``. Its pieces stay until they are collected."""
        self._fetches.pop(root, None)
        self.snapshots.abandon_check(root)
        self._close_assemblies()

    def _close_assemblies(self) -> None:
        self.objects.close_assemblies(but={key for fetch in self._fetches.values() for key in fetch.assembling})

    def mark_incomplete(self, root: bytes) -> None:
        """The version's objects may be collected: ``prepare`` looks at all of them again."""
        self._complete.discard(root)

    def finish(self, root: bytes, *, base: bytes, owner: str = "", replaces: bytes | None = None) -> str:
        """Makes the snapshot of a version whose fetch is complete, and returns its path. Follow with ``check``.

        ``base``: the version to record it as a delta of. ``owner`` no longer needs the version it had before.
        ``replaces``: a version that this owner has started no process from and never will, so that its snapshot may
        become this one. Raises StoreError; after ObjectsDamaged, ``prepare`` the version again.
        """
        fetch = self._fetches[root]
        assert fetch.complete
        try:
            with store_errors(self.home):
                self.records.add(fetch.tree, base)
                ready = self.snapshots.pin_if_ready(owner, root)
                if self._makes_snapshots and not (ready and self.snapshots.intact(fetch.tree)):
                    self.snapshots.make(fetch.tree, owner, replaces)
        except StoreError:
            self._complete.clear()
            raise
        del self._fetches[root]
        self._complete.add(root)
        return self.snapshots.path(root)

    def hold(self, root: bytes, owner: str) -> None:
        """See ``Snapshots.hold``. Raises StoreError, also if the snapshot was removed after ``finish``."""
        with store_errors(self.home):
            self.snapshots.hold(owner, root)
        if root in self._complete and root not in self._fetches and not self.ready(root):
            raise StoreError(f"version {short(root)} has been removed from {self.home}; sync again")

    def copy_version(self, root: bytes, path: str) -> None:
        """Writes version ``root`` as a new directory ``path`` of its own: whatever is written there, the store stays as
        it is. Raises BaseUnknown if the version is not recorded here, and StoreError if it is not complete."""
        self.records.refresh()
        tree = self.records.tree(root)
        if tree is None:
            raise BaseUnknown(root)
        with store_errors(self.home):
            copy(self.objects, tree, os.fsencode(path))

    def check(self, root: bytes) -> None:
        """Checks the files of a version after ``finish``, if processes may have modified them, and lets processes run
        from it. Raises StoreError; after ObjectsDamaged, ``prepare`` the version again."""
        tree = self.records.tree(root)
        if tree is None or not self._makes_snapshots:
            return
        try:
            with store_errors(self.home):
                self.snapshots.check(tree)
        except StoreError as error:
            self._complete.clear()
            if not isinstance(error, ObjectsDamaged):
                self.snapshots.abandon_check(root)
            raise

    def prepare_spare(self, root: bytes) -> Iterator[None] | None:
        """See ``Snapshots.prepare_spare``. The steps raise StoreError."""
        steps = self.snapshots.prepare_spare(root) if self._makes_snapshots else None
        return self._translated(steps) if steps is not None else None

    def remove_snapshot(self, root: bytes) -> Iterator[None] | None:
        """See ``Snapshots.remove_in_steps``. The steps raise StoreError."""
        steps = self.snapshots.remove_in_steps(root)
        return self._translated(steps) if steps is not None else None

    def _translated(self, steps: Iterator[None]) -> Iterator[None]:
        with store_errors(self.home):
            yield from steps

    def remove_partials(self, before: float) -> int:
        """Removes unfinished files, of this process or one that has ended, that no version being fetched needs and that
        were not written to after ``before``. Returns how many bytes were freed."""
        with store_errors(self.home):
            with locked(self.home):
                leftovers = self._adopt_leftovers()
            for left in leftovers:
                shutil.rmtree(left, ignore_errors=True)
            return self.objects.remove_partials(before)

    def verify(self) -> list[Problem]:
        """Reads everything. Removes corrupt objects, so that they are fetched again, and the snapshots with them,
        except those in use."""
        problems: list[Problem] = []
        with store_errors(self.home):
            for root, tree in list(self.records.trees.items()):
                if root in self._complete or self.snapshots.ready(root):
                    problems += self._verify_version(root, tree)
        return problems

    def _verify_version(self, root: bytes, tree: Directory) -> list[Problem]:
        bad = [
            file for file in distinct_objects(files(tree)) if not (self.objects.use(file) and self.objects.verify(file))
        ]
        for file in bad:
            self.objects.discard(file)
        if bad:
            self._complete.discard(root)
            self.snapshots.remove(root)
        return [Problem(self.objects.path(file), "content does not match its digest", root.hex()) for file in bad]

    def close(self) -> None:
        """Keeps the pieces of unfinished files for the next process."""
        self.objects.close_assemblies()
        self.snapshots.close()
        os.close(self._held)

    # --- opening ----------------------------------------------------------------------------------------

    def _start_over_after_reboot(self, boot: str) -> list[str]:
        """Starts over after a reboot; returns the directories to remove. The boot is noted last: if this is
        interrupted, the next process does it."""
        path = os.path.join(self.home, "boot")
        with contextlib.suppress(FileNotFoundError), open(path) as noted:
            if noted.read() == boot:
                return []
        left = [self.objects.move_all_to_trash(), *self.snapshots.move_all_to_trash()]
        temporary = os.path.join(self._work, "boot")
        with open(temporary, "w") as out:
            out.write(boot)
        os.rename(temporary, path)
        return left

    def _adopt_leftovers(self) -> list[str]:
        """Adopts the unfinished files of processes that have ended; returns their directories, to be removed."""
        left_behind = []
        parent = os.path.dirname(self._work)
        for name in os.listdir(parent):
            left = os.path.join(parent, name)
            if left != self._work and is_unlocked(os.path.join(left, "held")):
                for entry in os.listdir(left):
                    adopted = os.path.join(self._work, entry)
                    if entry.startswith("partial-") and not os.path.lexists(adopted):  # one may be being assembled
                        os.rename(os.path.join(left, entry), adopted)
                os.rename(left, os.path.join(self._work, f"left-{name}"))
                left_behind.append(os.path.join(self._work, f"left-{name}"))
        return left_behind

    def _remove_unrecorded(self) -> None:
        """Removes snapshots without a record. Other processes record a version before they make its snapshot."""
        for root in self.snapshots.roots():
            if self.records.tree(root) is None:
                self.snapshots.remove(root)
        for root in self.snapshots.spares():
            if self.records.tree(root) is None:
                self.snapshots.remove_spares(root)


def _files_put_by(delta: Delta, tree: Directory) -> Iterable[File]:
    for operation in delta.operations:
        if isinstance(operation, PutFile):
            yield operation.file
        elif isinstance(operation, Splice):
            spliced = lookup(tree, operation.path)
            assert isinstance(spliced, File)
            yield spliced


def _boot_id() -> str:
    try:
        with open(_BOOT_ID) as current:
            return current.read().strip()
    except OSError:
        return "unknown"


def _lock(directory: str) -> int:
    """Locks ``directory`` as that of a running process."""
    handle = os.open(os.path.join(directory, "held"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _require_space(home: str, need: int) -> None:
    """Raises StoreFull before a disk is filled to the last byte, at the cost of all other programs that write there."""
    disk = disk_of(home)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and need > free:  # some file systems, such as ramfs, do not know their size
        raise StoreFull(home, free, need)


@contextlib.contextmanager
def store_errors(home: str, need: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Raises OSErrors below ``home`` as StoreError. ``need()``: the bytes that were still to be written."""
    try:
        yield
    except OSError as error:
        what = used_up(error, home)
        if not what:
            raise StoreError(f"the store {home} cannot be written: {error}") from error
        disk = disk_of(home)
        raise StoreFull(home, disk.f_bavail * disk.f_frsize, need(), what) from error

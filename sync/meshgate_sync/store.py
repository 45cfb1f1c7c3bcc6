"""The store of one host (or of the gateway): versions held, pieces read and written, snapshots switched atomically.

Whatever moment it is killed at, a store opens again and ``verify`` finds nothing wrong: everything is made aside and
gets its name by a rename, and a version is on record before its snapshot appears. A store whose machine went down
is distrusted: objects are set aside until they have been hashed, and snapshots are made anew. Several processes may
share a store; each instance belongs to one thread.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .delta import Delta, PutFile, Splice, patch
from .errors import BaseUnknown, StoreError, StoreFull
from .fetch import Fetch
from .home import locked, unlocked
from .objects import Objects, distinct
from .records import Records
from .snapshots import Snapshots
from .tree import Directory, File, files, lookup

__all__ = ["Problem", "Store", "translated"]

_DIRECTORIES = ("objects", "versions", "snapshots", "opened", "spares", "pins", "held", "work")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something ``verify`` found: ``what`` is wrong with ``path``, in version ``root`` (hex)."""

    path: str
    what: str
    root: str


class Store:
    """Opens the store below ``home``, making it if there is none.

    ``snapshots=False`` is the gateway's: it hands versions on but runs nothing from them. ``boot`` names the
    machine's current run.
    """

    def __init__(self, home: str, *, snapshots: bool = True, boot: str | None = None) -> None:
        self.home = home
        self._materialise = snapshots
        self._complete: set[bytes] = set()
        self._fetches: dict[bytes, Fetch] = {}
        with translated(home):
            for name in _DIRECTORIES:
                os.makedirs(os.path.join(home, name), exist_ok=True)
            self._work = os.path.join(home, "work", f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
            self.objects = Objects(os.path.join(home, "objects"), os.path.join(home, "unread"), self._work)
            with locked(home):
                os.mkdir(self._work)
                self._held = _hold(self._work)
                leftovers = self._adopt_leftovers()
                self.records = Records(os.path.join(home, "versions"), self._work)
                self.snapshots = Snapshots(home, self._work, self.objects, self.records)
                leftovers += self._follow_boot(boot or _boot_id())
            for left in leftovers:
                shutil.rmtree(left, ignore_errors=True)
            self._drop_unrecorded()

    def ready(self, root: bytes) -> bool:
        """Whether version ``root`` is complete here: processes can be started from it, or it can be handed on."""
        return self.snapshots.ready(root) if self._materialise else root in self._complete

    def begin(self, delta: Delta) -> Fetch:
        """Starts to bring together the version that ``delta`` leads to; what it lacks is in ``Fetch.missing``.

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
            needed = _put_by(delta, tree)
        try:
            with translated(self.home):
                fetch = self._fetches[delta.root] = Fetch(self.objects, tree, needed)
        finally:
            self._close_assemblies()
        return fetch

    def tree(self, root: bytes) -> Directory | None:
        """A version on record, or one that is on its way."""
        fetch = self._fetches.get(root)
        return fetch.tree if fetch is not None else self.records.tree(root)

    def brings(self, root: bytes) -> bool:
        """Whether a version is on its way."""
        return root in self._fetches

    def trees(self) -> list[Directory]:
        """All versions that objects are kept for."""
        return [*self.records.trees.values(), *(fetch.tree for fetch in self._fetches.values())]

    def add(self, digest: bytes, data: bytes) -> None:
        """Takes in a piece, whose digest the caller has checked, for every version that lacks it."""
        with translated(self.home):
            for fetch in self._fetches.values():
                fetch.add(digest, data)

    def read(self, digest: bytes) -> bytes | None:
        """A piece, verified. None when it is not held or was found corrupt; then the versions here are looked
        through again when they are next begun."""
        data = self.objects.read(digest)
        if data is None:
            self._complete.clear()
        return data

    def forget(self, root: bytes) -> None:
        """Gives up bringing version ``root`` together; its pieces stay until collected."""
        self._fetches.pop(root, None)
        self._close_assemblies()

    def _close_assemblies(self) -> None:
        self.objects.close_assemblies(but={key for fetch in self._fetches.values() for key in fetch.assembling})

    def forget_complete(self, root: bytes) -> None:
        """The version's objects may be collected: begin it from nothing next time."""
        self._complete.discard(root)

    def finish(self, root: bytes, *, base: bytes, owner: str = "", replaces: bytes | None = None) -> str:
        """Makes the snapshot of a version whose fetch is complete, and returns its path.

        ``base``: a version to record it against. ``owner`` no longer needs the version that it had before.
        ``replaces``: a version that this owner has started no process from and never will; its snapshot may be
        turned into this one. Raises StoreError; then this may be tried again, or the version begun again; the latter
        alone helps after ObjectsDamaged.
        """
        fetch = self._fetches[root]
        assert fetch.complete
        try:
            with translated(self.home):
                self.records.add(fetch.tree, base)
                ready = self.snapshots.pin_ready(owner, root)
                if self._materialise and not (ready and self.snapshots.intact(fetch.tree)):
                    self.snapshots.make(fetch.tree, owner, replaces)
        except StoreError:
            self._complete.clear()
            raise
        del self._fetches[root]
        self._complete.add(root)
        return self.snapshots.path(root)

    def hold(self, root: bytes, owner: str) -> None:
        """See ``Snapshots.hold``. Raises StoreError."""
        with translated(self.home):
            self.snapshots.hold(owner, root)

    def prepare_spare(self, root: bytes) -> bool:
        """See ``Snapshots.prepare_spare``. Raises StoreError; ObjectsDamaged until the version is begun again."""
        with translated(self.home):
            return self.snapshots.prepare_spare(root)

    def drop_partials(self, before: float) -> int:
        """Removes what was assembled of files that no version on its way is made of, by this process or by one that
        is gone, unless it was written to later than at ``before``; returns how many bytes that was."""
        with translated(self.home):
            with locked(self.home):
                leftovers = self._adopt_leftovers()
            for left in leftovers:
                shutil.rmtree(left, ignore_errors=True)
            return self.objects.drop_partials(before)

    def verify(self) -> list[Problem]:
        """Reads everything. What is wrong is removed, so that it is fetched again, and so are the snapshots that
        hold it, save those in use."""
        problems: list[Problem] = []
        with translated(self.home):
            for root, tree in list(self.records.trees.items()):
                if root in self._complete or self.snapshots.ready(root):
                    problems += self._verify_version(root, tree)
        return problems

    def _verify_version(self, root: bytes, tree: Directory) -> list[Problem]:
        bad = [file for file in distinct(files(tree)) if not (self.objects.holds(file) and self.objects.hashes(file))]
        for file in bad:
            self.objects.discard(file)
        if bad:
            self._complete.discard(root)
            self.snapshots.remove(root)
        return [Problem(self.objects.path(file), "not what its name says", root.hex()) for file in bad]

    def close(self) -> None:
        """Leaves the pieces of unfinished files where the next process finds them."""
        self.objects.close_assemblies()
        os.close(self._held)

    # --- opening ----------------------------------------------------------------------------------------

    def _follow_boot(self, boot: str) -> list[str]:
        """Sets aside all that was there when the machine went down; returns what is to be removed of it.

        That it was done is noted last, so that whatever moment this is cut short at, the next process does it.
        """
        path = os.path.join(self.home, "boot")
        with contextlib.suppress(FileNotFoundError), open(path) as noted:
            if noted.read() == boot:
                return []
        self.objects.distrust()
        left = self.snapshots.take_all_away()
        temporary = os.path.join(self._work, "boot")
        with open(temporary, "w") as out:
            out.write(boot)
        os.rename(temporary, path)
        return left

    def _adopt_leftovers(self) -> list[str]:
        """Takes over the pieces that processes now gone had assembled; returns what else they left, to be removed."""
        left_behind = []
        parent = os.path.dirname(self._work)
        for name in os.listdir(parent):
            left = os.path.join(parent, name)
            if left != self._work and unlocked(os.path.join(left, "held")):
                for entry in os.listdir(left):
                    if entry.startswith("partial-"):
                        os.rename(os.path.join(left, entry), os.path.join(self._work, entry))
                os.rename(left, os.path.join(self._work, f"left-{name}"))
                left_behind.append(os.path.join(self._work, f"left-{name}"))
        return left_behind

    def _drop_unrecorded(self) -> None:
        """Removes snapshots of which there is no record: those that other processes make are on record before."""
        for root in self.snapshots.roots():
            if self.records.tree(root) is None:
                self.snapshots.remove(root)
        for root in self.snapshots.spares():
            if self.records.tree(root) is None:
                self.snapshots.remove_spare(root)


def _put_by(delta: Delta, tree: Directory) -> Iterable[File]:
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


def _hold(directory: str) -> int:
    """Marks ``directory`` as that of a living process."""
    handle = os.open(os.path.join(directory, "held"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


@contextlib.contextmanager
def translated(home: str) -> Iterator[None]:
    """What the disk refuses below ``home`` becomes a StoreError."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(home) from problem
        raise StoreError(f"the store {home} cannot be written: {problem}") from problem

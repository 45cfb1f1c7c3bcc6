"""Versions as directories, real ones all the way down, each complete before it has its name.

A snapshot consists of hard links to objects. Linking 10,000 files takes a tenth of a second, so a version is made from
a directory that holds another one, by changing what differs: the snapshot that it replaces, if no process was ever
started from that, or a spare. Spares are made between saves. A directory that a process has opened is never used for
another version: what the process adds, removes or replaces in it stays there.

A process that runs as root can modify a file through its hard link, and spares share the file. Once a process was
started on the host, every new snapshot is therefore checked after its version has been acknowledged. Processes wait for
the check, which replaces modified files.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator

from ..errors import ObjectsDamaged
from ..tree.delta import Remove, diff
from ..tree.tree import Directory, File, lookup
from .home import check_path, is_unlocked, locked, snapshot_path
from .objects import Objects, modified_at
from .records import Records

SPARES = 2
"""Directories kept ready to become the next versions: two, so that saves in quick succession find one."""

HELD_SECONDS = 600
_EARLIER = "earlier"
"""Stands for removed snapshots that processes were started from: other snapshots may share files that they modified."""
_NO_LINK = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP)


# Makes directories of hard links to objects, and updates them.
#
# Directories are real, never symbolic links: ``Path(__file__).resolve().parent.parent`` and ``open("../x")`` find what
# they find on the laptop.
#
# A process that runs as root can write through a hard link, and the change shows in every directory that has the file.
# ``damaged_files`` finds such files by their size and time, ``repair`` replaces them.


def populate(objects: Objects, tree: Directory, path: bytes) -> Iterator[None]:
    """Creates the directory ``path`` with the content of ``tree``, and yields after each directory. Links objects as
    they are: follow with ``repair`` before a process sees the result. Raises ObjectsDamaged if an object is missing."""
    os.mkdir(path, 0o755)
    for name, node in tree.entries.items():
        entry = path + b"/" + name
        if isinstance(node, Directory):
            yield from populate(objects, node, entry)
        elif isinstance(node, File):
            _put(objects, node, entry)
        else:
            os.symlink(node.target, entry)
    yield


def copy(objects: Objects, tree: Directory, path: bytes) -> None:
    """Creates the directory ``path`` with copies of the files of ``tree``, which may be modified. Raises ObjectsDamaged
    if an object is missing or was written to."""
    os.mkdir(path, 0o755)
    for name, node in tree.entries.items():
        entry = path + b"/" + name
        if isinstance(node, Directory):
            copy(objects, node, entry)
        elif isinstance(node, File):
            if node.pieces and not objects.is_unchanged(node):
                raise ObjectsDamaged(objects.path(node))
            handle = os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if node.executable else 0o644)
            with open(handle, "wb") as target:
                if node.pieces:
                    with open(objects.path(node), "rb") as source:
                        shutil.copyfileobj(source, target)
        else:
            os.symlink(node.target, entry)


def update(objects: Objects, path: bytes, old: Directory, new: Directory) -> None:
    """Updates the directory ``path`` from ``old`` to ``new``. Raises ObjectsDamaged."""
    directories = {path}
    for operation in diff(old, new).operations:
        entry = path + b"/" + operation.path
        if isinstance(operation, Remove):
            _remove(entry)
            continue
        node = lookup(new, operation.path)
        if isinstance(node, Directory):
            os.makedirs(entry, 0o755)
            continue
        above = os.path.dirname(entry)
        if above not in directories:  # no later operation removes it
            os.makedirs(above, 0o755, exist_ok=True)
            directories.add(above)
        _remove(entry)
        if isinstance(node, File):
            _put(objects, node, entry)
        elif node is not None:
            os.symlink(node.target, entry)


def repair(objects: Objects, path: bytes, tree: Directory) -> None:
    """Replaces every file below ``path`` that is not as in ``tree``. Raises ObjectsDamaged if the object of such a file
    is damaged too; ``Store.prepare`` then finds all of them."""
    for file, entry in damaged_files(objects, path, tree):
        if file.pieces and not objects.is_unchanged(file):
            raise ObjectsDamaged(objects.path(file))
        _remove(entry)
        _put(objects, file, entry)


def damaged_files(objects: Objects, path: bytes, tree: Directory) -> Iterator[tuple[File, bytes]]:
    """The files of ``tree`` that are missing below ``path`` or were written to, each with its path."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name, node in tree.entries.items():
            if isinstance(node, File) and not objects.is_unchanged(node, name, directory=handle):
                yield node, path + b"/" + name
    finally:
        os.close(handle)
    for name, node in tree.entries.items():
        if isinstance(node, Directory):
            yield from damaged_files(objects, path + b"/" + name, node)


def remove_tree(path: str) -> Iterator[None]:
    """Removes the directory ``path`` with all below it, as far as possible, and yields after each directory."""
    for directory, below, names in os.walk(path, topdown=False, onerror=None):
        for name in (*names, *below):
            entry = os.path.join(directory, name)
            try:
                os.unlink(entry)
            except OSError:
                shutil.rmtree(entry, ignore_errors=True)
        yield
    shutil.rmtree(path, ignore_errors=True)


def _remove(entry: bytes) -> None:
    try:
        os.unlink(entry)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # unlinking a directory is EPERM on macOS
        shutil.rmtree(entry)


def _put(objects: Objects, file: File, entry: bytes) -> None:
    if file.pieces:
        path = objects.path(file)
        try:
            _link(path, entry)
            return
        except FileNotFoundError:
            raise ObjectsDamaged(path) from None
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        shutil.copyfile(path, entry)
    else:
        os.close(os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.chmod(entry, 0o555 if file.executable else 0o444)
    time = modified_at(file)
    os.utime(entry, (time, time))


def _link(path: str, entry: bytes) -> None:
    try:
        os.link(path, entry)
    except FileNotFoundError:
        # Another process has just replaced the object with its own.
        os.link(path, entry)


class Snapshots:
    """The snapshots, spares and pins below ``home``. Other processes may have the same home open."""

    def __init__(self, home: str, work: str, objects: Objects, records: Records) -> None:
        self._home = home
        self._work = work
        self._objects = objects
        self._records = records
        self._checks: dict[bytes, int] = {}

    def pin_if_ready(self, owner: str, root: bytes) -> bool:
        """As ``ready``. Pins the version for ``owner``, so that a snapshot that is ready stays."""
        with locked(self._home):
            if owner:
                self.pin(owner, root)
            return self.ready(root)

    def ready(self, root: bytes) -> bool:
        return os.path.isdir(self.path(root))

    def roots(self) -> list[bytes]:
        return [bytes.fromhex(name) for name in os.listdir(os.path.join(self._home, "snapshots"))]

    def path(self, root: bytes) -> str:
        return snapshot_path(self._home, root.hex())

    def opened(self, root: bytes) -> bool:
        """Whether a process was ever started from this snapshot."""
        return os.path.lexists(self._mark(root))

    def in_use(self, root: bytes) -> bool:
        return not is_unlocked(self._mark(root))

    def processes_ran(self) -> bool:
        """Whether a process was ever started from any snapshot: it may have modified files through hard links."""
        with os.scandir(os.path.join(self._home, "opened")) as marks:
            return next(marks, None) is not None

    def intact(self, tree: Directory) -> bool:
        """Whether the snapshot exists as it was made, or is in use. One that was written to and is not in use is
        removed."""
        if not self.ready(tree.digest):
            return False
        if not self.processes_ran() or self.unchecked(tree.digest):
            return True
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if next(damaged_files(self._objects, os.fsencode(self.path(tree.digest)), tree), None) is None:
                return True
        return not self.remove(tree.digest)

    def make(self, tree: Directory, owner: str, replaces: bytes | None) -> None:
        """Makes the snapshot. If it may have files that a process modified, processes wait for ``check``."""
        building = os.path.join(self._work, "building")
        shutil.rmtree(building, ignore_errors=True)
        old = self._take_donor(owner, replaces, building)
        path = os.fsencode(building)
        if old is None:
            for _ in populate(self._objects, tree, path):
                pass
        else:
            update(self._objects, path, old, tree)
        if old is None or self.processes_ran():
            self._close_for_check(tree.digest)
        with locked(self._home):
            try:
                os.rename(building, self.path(tree.digest))
            except OSError:
                if not self.ready(tree.digest):  # else another process has made it meanwhile
                    raise
        shutil.rmtree(building, ignore_errors=True)

    # --- checks -----------------------------------------------------------------------------------------

    def unchecked(self, root: bytes) -> bool:
        """Whether processes still wait for the files of this snapshot to be checked."""
        return os.path.lexists(check_path(self._home, root.hex()))

    def check(self, tree: Directory) -> None:
        """Replaces modified files of a new snapshot, and lets processes open it. Raises ObjectsDamaged; processes then
        wait until the version has been prepared and checked again, or until ``abandon_check``.

        While another store checks the snapshot, processes may open it if no file needs to be replaced: that store may
        end before it has checked."""
        root, path = tree.digest, os.fsencode(self.path(tree.digest))
        if self.unchecked(root):
            self._close_for_check(root)
        if root in self._checks:
            repair(self._objects, path, tree)
        elif not self.unchecked(root) or any(damaged_files(self._objects, path, tree)):
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(check_path(self._home, root.hex()))
        self.abandon_check(root)

    def abandon_check(self, root: bytes) -> None:
        """Ends the wait of processes for this snapshot: they fail instead."""
        handle = self._checks.pop(root, -1)
        if handle >= 0:
            os.close(handle)

    def close(self) -> None:
        for root in list(self._checks):
            self.abandon_check(root)

    def _close_for_check(self, root: bytes) -> None:
        """Makes processes wait before they open this snapshot, unless another store is checking it."""
        if root in self._checks:
            return
        handle = os.open(check_path(self._home, root.hex()), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return
        self._checks[root] = handle

    def remove_unchecked(self) -> None:
        """Removes the snapshots whose store ended before it checked them."""
        for name in os.listdir(os.path.join(self._home, "checks")):
            if is_unlocked(os.path.join(self._home, "checks", name)):
                self.remove(bytes.fromhex(name))

    def _take_donor(self, owner: str, replaces: bytes | None, building: str) -> Directory | None:
        """Moves a directory that no process has opened to ``building``; returns its content."""
        with locked(self._home):
            if replaces and self._is_unused(replaces, owner) and (old := self._records.tree(replaces)) is not None:
                os.rename(self.path(replaces), building)
                return old
            for name in self._spares():
                if (spare := self._records.tree(_root_of(name))) is not None:
                    os.rename(self._spare(name), building)
                    return spare
        return None

    def _is_unused(self, root: bytes, owner: str) -> bool:
        return (
            self.ready(root)
            and not self.unchecked(root)
            and not self.opened(root)
            and root not in self._held()
            and all(other == owner or pinned != root for other, pinned in self.pins().items())
        )

    def remove(self, root: bytes, *, pinned: bool = True) -> bool:
        """Removes a snapshot unless it is in use or, with ``pinned`` False, a session has asked for it or is about to
        start processes from it. Returns whether it is gone."""
        steps = self.remove_in_steps(root, pinned=pinned)
        if steps is None:
            return False
        for _ in steps:
            pass
        return True

    def remove_in_steps(self, root: bytes, *, pinned: bool = False) -> Iterator[None] | None:
        """As ``remove``, but returns steps that free the space; None if the snapshot is needed."""
        with locked(self._home):
            needed = not pinned and (root in self.pins().values() or root in self._held())
            trash = None if needed else self._move_to_trash(root)
        return remove_tree(trash) if trash is not None else None

    def _move_to_trash(self, root: bytes) -> str | None:
        """Under the store's lock: moves the snapshot to a directory to delete; None if it is in use."""
        if self.in_use(root):
            return None
        trash = os.path.join(self._work, f"trash-{root.hex()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path(root), trash)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(check_path(self._home, root.hex()))
        self.abandon_check(root)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._mark(root), os.path.join(self._home, "opened", _EARLIER))
        return trash

    def move_all_to_trash(self) -> list[str]:
        """Under the store's lock: moves all snapshots and spares that are not in use to directories to delete."""
        trash = [taken for root in self.roots() if (taken := self._move_to_trash(root)) is not None]
        return trash + [self._move_spare_to_trash(name) for name in self._spares()]

    # --- spares -----------------------------------------------------------------------------------------

    def spares(self) -> list[bytes]:
        """The version of each spare."""
        return [_root_of(name) for name in self._spares()]

    def prepare_spare(self, root: bytes) -> Iterator[None] | None:
        """The steps that add a spare of version ``root``, or update one of another version; None if there are enough,
        or the version is not recorded."""
        tree = self._records.tree(root)
        if tree is None:
            return None
        names = self._spares()
        if behind := [name for name in names if _root_of(name) != root]:
            return self._update_spare(behind[0], tree)
        return self._add_spare(tree) if len(names) < SPARES else None

    def _add_spare(self, tree: Directory) -> Iterator[None]:
        aside = os.path.join(self._work, "spare")
        shutil.rmtree(aside, ignore_errors=True)
        yield from populate(self._objects, tree, os.fsencode(aside))
        self._put_spare(aside, tree.digest)

    def _update_spare(self, name: str, tree: Directory) -> Iterator[None]:
        aside = os.path.join(self._work, "spare")
        shutil.rmtree(aside, ignore_errors=True)
        old = self._records.tree(_root_of(name))
        with locked(self._home), contextlib.suppress(FileNotFoundError):
            os.rename(self._spare(name), aside)
        if old is not None and os.path.isdir(aside):
            update(self._objects, os.fsencode(aside), old, tree)
            self._put_spare(aside, tree.digest)
        else:
            yield from remove_tree(aside)

    def _put_spare(self, aside: str, root: bytes) -> None:
        """Makes a complete directory a spare, unless other processes have made enough."""
        with locked(self._home):
            there = self._spares()  # a rename would replace a spare that is empty
            for name in (f"{number}-{root.hex()}" for number in range(SPARES)):
                if name not in there:
                    os.rename(aside, self._spare(name))
                    return
        shutil.rmtree(aside, ignore_errors=True)

    def remove_spares(self, root: bytes | None = None) -> None:
        """Removes all spares, or those of version ``root``."""
        with locked(self._home):
            trash = [self._move_spare_to_trash(name) for name in self._spares() if root in (None, _root_of(name))]
        for taken in trash:
            shutil.rmtree(taken, ignore_errors=True)

    def _move_spare_to_trash(self, name: str) -> str:
        trash = os.path.join(self._work, f"spare-{name}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._spare(name), trash)
        return trash

    def _spares(self) -> list[str]:
        return os.listdir(os.path.join(self._home, "spares"))

    # --- pins -------------------------------------------------------------------------------------------

    def pins(self) -> dict[str, bytes]:
        """The version that each owner requested last."""
        pins = {}
        directory = os.path.join(self._home, "pins")
        for owner in os.listdir(directory):
            with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, owner)) as pin:
                pins[owner] = bytes.fromhex(pin.read())
        return pins

    def hold(self, owner: str, root: bytes) -> None:
        """``owner`` is about to start processes from a version: its snapshot stays for ten minutes from the last call,
        whatever ``owner`` requests next. By then the processes have opened it."""
        with locked(self._home):
            path = os.path.join(self._home, "held", f"{root.hex()}-{owner}")
            with open(path, "w"):
                os.utime(path)

    def _held(self) -> set[bytes]:
        """The versions that processes are about to be started from. Removes expired notes."""
        held = set()
        directory = os.path.join(self._home, "held")
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime < HELD_SECONDS:
                    held.add(bytes.fromhex(name.partition("-")[0]))
                else:
                    os.unlink(path)
        return held

    def pin(self, owner: str, root: bytes) -> None:
        temporary = os.path.join(self._work, "pin")
        with open(temporary, "w") as pin:
            pin.write(root.hex())
        os.rename(temporary, os.path.join(self._home, "pins", owner))

    def release(self, owner: str) -> None:
        """Removes the pin and the holds of ``owner``."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._home, "pins", owner))
        directory = os.path.join(self._home, "held")
        for name in os.listdir(directory):
            if name.partition("-")[2] == owner:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))

    def _spare(self, name: str) -> str:
        return os.path.join(self._home, "spares", name)

    def _mark(self, root: bytes) -> str:
        return os.path.join(self._home, "opened", root.hex())


def _root_of(spare: str) -> bytes:
    return bytes.fromhex(spare.partition("-")[2])

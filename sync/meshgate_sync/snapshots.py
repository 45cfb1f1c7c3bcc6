"""Versions as directories, real ones all the way down, each complete before it has its name.

A snapshot is made of hard links to objects. Linking 10,000 files takes a tenth of a second, so a version is rather
made out of a *donor* by changing what differs: either the snapshot it replaces, when no process was ever started
from that, or a spare copy laid in beforehand, off the path between saving and running. A snapshot that a process
has opened is never touched again until it is removed.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time

from .home import locked, snapshot_path, unlocked
from .links import alter, holds, mend, populate
from .objects import Objects
from .records import Records
from .tree import Directory

__all__ = ["Snapshots"]

_HELD_SECONDS = 600
_EARLIER = "earlier"
"""Stands for all snapshots that processes were started from and that are gone: their files live on in others."""


class Snapshots:
    """The snapshots, spares and pins below ``home``. Other processes may have the same home open."""

    def __init__(self, home: str, work: str, objects: Objects, records: Records) -> None:
        self._home = home
        self._work = work
        self._objects = objects
        self._records = records

    def pin_ready(self, owner: str, root: bytes) -> bool:
        """As ``ready``; from now on the version is the one that ``owner`` asked for last, and what is ready stays."""
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
        return not unlocked(self._mark(root))

    def exposed(self) -> bool:
        """Whether a process was ever started from any snapshot: as root it may have written through hard links."""
        with os.scandir(os.path.join(self._home, "opened")) as marks:
            return next(marks, None) is not None

    def intact(self, tree: Directory) -> bool:
        """Whether the snapshot is there as it was made, or in use; one that was written to and is not in use goes."""
        if not self.ready(tree.digest):
            return False
        if not self.exposed() or holds(self._objects, os.fsencode(self.path(tree.digest)), tree):
            return True
        return not self.remove(tree.digest)

    def make(self, tree: Directory, owner: str, replaces: bytes | None) -> None:
        building = os.path.join(self._work, "building")
        shutil.rmtree(building, ignore_errors=True)
        old = self._take_donor(owner, replaces, building)
        path = os.fsencode(building)
        if old is None:
            populate(self._objects, tree, path)
        else:
            alter(self._objects, path, old, tree)
            if self.exposed():
                mend(self._objects, path, tree)
        with locked(self._home), contextlib.suppress(OSError):
            # Another process may have made it meanwhile; then ours is not needed.
            os.rename(building, self.path(tree.digest))
        shutil.rmtree(building, ignore_errors=True)

    def _take_donor(self, owner: str, replaces: bytes | None, building: str) -> Directory | None:
        """Moves a directory that may be changed to ``building``, and tells what it holds."""
        with locked(self._home):
            if replaces and self._is_unused(replaces, owner) and (old := self._records.tree(replaces)) is not None:
                os.rename(self.path(replaces), building)
                return old
            for root in self.spares():
                spare = self._records.tree(root)
                if spare is not None:
                    os.rename(self._spare(root), building)
                    return spare
        return None

    def _is_unused(self, root: bytes, owner: str) -> bool:
        return (
            self.ready(root)
            and not self.opened(root)
            and root not in self._held()
            and all(other == owner or pinned != root for other, pinned in self.pins().items())
        )

    def remove(self, root: bytes, *, pinned: bool = True) -> bool:
        """Removes a snapshot unless it is in use or, with ``pinned`` False, someone has asked for it or is about to
        start processes from it; tells whether it is gone."""
        with locked(self._home):
            needed = not pinned and (root in self.pins().values() or root in self._held())
            trash = None if needed else self._take_away(root)
        if trash is None:
            return False
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def _take_away(self, root: bytes) -> str | None:
        """Under the store's lock: where the snapshot is now, to be removed from; None when it is in use."""
        if self.in_use(root):
            return None
        trash = os.path.join(self._work, f"trash-{root.hex()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path(root), trash)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._mark(root), os.path.join(self._home, "opened", _EARLIER))
        return trash

    def take_all_away(self) -> list[str]:
        """Under the store's lock: all snapshots and spares that are not in use are gone; returns what is to be
        removed of them."""
        trash = [taken for root in self.roots() if (taken := self._take_away(root)) is not None]
        return trash + [self._take_spare_away(root) for root in self.spares()]

    # --- spares -----------------------------------------------------------------------------------------

    def spares(self) -> list[bytes]:
        return [bytes.fromhex(name) for name in os.listdir(os.path.join(self._home, "spares"))]

    def prepare_spare(self, root: bytes) -> bool:
        """Lays in a copy of version ``root`` in place of any other; tells whether there was anything to do."""
        tree = self._records.tree(root)
        if tree is None or os.path.lexists(self._spare(root)):
            return False
        aside = os.path.join(self._work, "spare")
        shutil.rmtree(aside, ignore_errors=True)
        populate(self._objects, tree, os.fsencode(aside))
        for other in self.spares():
            self.remove_spare(other)
        with locked(self._home), contextlib.suppress(OSError):
            os.rename(aside, self._spare(root))
        return True

    def remove_spare(self, root: bytes) -> None:
        with locked(self._home):
            trash = self._take_spare_away(root)
        shutil.rmtree(trash, ignore_errors=True)

    def _take_spare_away(self, root: bytes) -> str:
        trash = os.path.join(self._work, f"spare-{root.hex()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._spare(root), trash)
        return trash

    # --- pins -------------------------------------------------------------------------------------------

    def pins(self) -> dict[str, bytes]:
        """The version each owner has asked for last."""
        pins = {}
        directory = os.path.join(self._home, "pins")
        for owner in os.listdir(directory):
            with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, owner)) as pin:
                pins[owner] = bytes.fromhex(pin.read())
        return pins

    def hold(self, owner: str, root: bytes) -> None:
        """``owner`` is about to start processes from a version: until they have taken hold of it themselves, for which
        they have ten minutes from the last call, its snapshot stays, whatever ``owner`` asks for next."""
        with locked(self._home):
            path = os.path.join(self._home, "held", f"{root.hex()}-{owner}")
            with open(path, "w"):
                os.utime(path)

    def _held(self) -> set[bytes]:
        """The versions that processes are about to be started from; notes on others go."""
        held = set()
        directory = os.path.join(self._home, "held")
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime < _HELD_SECONDS:
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
        """``owner`` asks for nothing any more and starts no more processes."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._home, "pins", owner))
        directory = os.path.join(self._home, "held")
        for name in os.listdir(directory):
            if name.partition("-")[2] == owner:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))

    def _spare(self, root: bytes) -> str:
        return os.path.join(self._home, "spares", root.hex())

    def _mark(self, root: bytes) -> str:
        return os.path.join(self._home, "opened", root.hex())

"""Where a host keeps its versions, and how one process takes hold of one.

::

    <home>/objects/ab/<digest>[x]   files by content
    <home>/unread/ab/<digest>[x]    the same from before the machine went down, until they have been read
    <home>/versions/<root>          how each version is made of others
    <home>/snapshots/<root>/        each version as a directory
    <home>/opened/<root>            locked (shared) by the processes that run from that snapshot
    <home>/spares/<root>/           a copy of a snapshot, to be turned into the next one
    <home>/pins/<owner>             the version that each driver has asked for last
    <home>/held/<root>-<owner>      processes of that driver are about to be started from that version
    <home>/work/<process>/          what is under construction, by one process

A version in use is one whose file under ``opened`` is locked; the kernel drops the lock with the process, however it
ends. A snapshot that has such a file, locked or not, may hold what a process left in it and is never made into another.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence

from .errors import VersionUnavailable
from .place import default_home

__all__ = [
    "OpenVersion",
    "activate",
    "active_paths",
    "default_home",
    "enter",
    "locked",
    "open_version",
    "snapshot_path",
    "unlocked",
]


def snapshot_path(home: str, root: str) -> str:
    return os.path.join(home, "snapshots", root)


@contextlib.contextmanager
def locked(home: str, *, shared: bool = False) -> Iterator[None]:
    """Holds the store's lock: exclusive around every change of what snapshots there are, a rename or two long."""
    handle = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def unlocked(path: str) -> bool:
    """Whether no process holds a lock on the file ``path``."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


class OpenVersion:
    """A hold on a snapshot: until ``close`` or the end of the process, whole and unchanged by the store."""

    def __init__(self, path: str, handle: int) -> None:
        self.path = path
        self._handle = handle

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> OpenVersion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_version(home: str, root: str) -> OpenVersion:
    """Takes hold of version ``root`` (64 hex digits). Raises VersionUnavailable when there is no such snapshot."""
    path = snapshot_path(home, root)
    if not os.path.isdir(home):
        raise VersionUnavailable(root, home, "nothing was ever synced to this host")
    with locked(home, shared=True):
        if not os.path.isdir(path):
            raise VersionUnavailable(root, home, "it was never completed here, or has been collected; sync again")
        handle = os.open(os.path.join(home, "opened", root), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
    return OpenVersion(path, handle)


_active: list[OpenVersion] = []


def activate(home: str, root: str, paths: Sequence[str] = ("",)) -> str:
    """Makes this process run from version ``root``, as ``enter`` does, and returns the snapshot's directory. Raises
    VersionUnavailable."""
    version = open_version(home, root)
    enter(version, paths)
    return version.path


def enter(version: OpenVersion, paths: Sequence[str] = ("",)) -> None:
    """Makes this process import from ``version``, which stays held until it ends.

    ``paths``, relative to the snapshot, come first on ``sys.path``, in place of those of a version entered
    earlier. That version stays held, for modules of it may still be loaded.
    """
    earlier = active_paths()
    sys.path[:] = [
        *(os.path.join(version.path, path) if path not in ("", ".") else version.path for path in paths),
        *(entry for entry in sys.path if not _within(entry, earlier)),
    ]
    _active.append(version)


def active_paths() -> list[str]:
    """The snapshots that this process has entered, the newest last."""
    return [held.path for held in _active]


def _within(entry: str, directories: Sequence[str]) -> bool:
    return any(entry == directory or entry.startswith(directory + os.sep) for directory in directories)

"""The layout of a store on disk, and how a process opens a version.

::

    <home>/objects/ab/<digest>[x]   files by content
    <home>/versions/<root>          each version, as a delta of another one
    <home>/snapshots/<root>/        each version as a directory
    <home>/opened/<root>            locked (shared) by the processes that run from that snapshot
    <home>/checks/<root>            locked by the store that has yet to check the files of that snapshot
    <home>/spares/<n>-<root>/       a directory that will become the snapshot of a later version
    <home>/pins/<owner>             the version that each session requested last
    <home>/held/<root>-<owner>      that session is about to start processes from that version
    <home>/work/<process>/          what one process is building

A version is in use while its file under ``opened`` is locked; the kernel releases the lock when the process ends. A
snapshot that has such a file, locked or not, may contain files that a process wrote, and is not used for other
versions.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence

from ..errors import VersionUnavailable
from .place import default_home

__all__ = [
    "OpenVersion",
    "activate",
    "active_paths",
    "check_path",
    "default_home",
    "enter",
    "leave",
    "locked",
    "open_version",
    "snapshot_path",
    "is_unlocked",
]


CHECK_TIMEOUT = 60.0  # seconds, within which damaged files may have to be fetched again
_CHECK_POLL = 0.002


def snapshot_path(home: str, root: str) -> str:
    return os.path.join(home, "snapshots", root)


def check_path(home: str, root: str) -> str:
    return os.path.join(home, "checks", root)


@contextlib.contextmanager
def locked(home: str, *, shared: bool = False) -> Iterator[None]:
    """Holds the store's lock. Snapshots and spares appear and disappear only under the exclusive lock, by renames."""
    handle = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_unlocked(path: str) -> bool:
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
    """An open snapshot. The store does not change or remove it until ``close``, or until the process ends."""

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
    """Opens the snapshot of version ``root`` (64 hex digits), once its files have been checked. Raises
    VersionUnavailable if there is no such snapshot, or its check failed."""
    path = snapshot_path(home, root)
    if not os.path.isdir(home):
        raise VersionUnavailable(root, home, "nothing has been synced to this host")
    with locked(home, shared=True):
        if not os.path.isdir(path):
            raise VersionUnavailable(root, home, "it was not completed here, or has been removed since; sync again")
        handle = os.open(os.path.join(home, "opened", root), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
    version = OpenVersion(path, handle)
    try:
        _wait_checked(home, root)
    except BaseException:
        version.close()
        raise
    return version


def _wait_checked(home: str, root: str) -> None:
    path = check_path(home, root)
    deadline = time.monotonic() + CHECK_TIMEOUT
    while os.path.lexists(path):
        if is_unlocked(path) and os.path.lexists(path):
            raise VersionUnavailable(root, home, "the check of its files was interrupted; sync again")
        if time.monotonic() > deadline:
            raise VersionUnavailable(root, home, f"its files were not checked within {CHECK_TIMEOUT:.0f} s")
        time.sleep(_CHECK_POLL)


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


def leave(version: OpenVersion) -> None:
    """Forgets ``version``, entered for a reload that has failed and been undone: no module of it is loaded. The caller
    restores ``sys.path``."""
    _active.remove(version)
    version.close()


def active_paths() -> list[str]:
    """The snapshots that this process has entered, the newest last."""
    return [held.path for held in _active]


def _within(entry: str, directories: Sequence[str]) -> bool:
    return any(entry == directory or entry.startswith(directory + os.sep) for directory in directories)

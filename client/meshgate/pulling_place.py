"""A directory of this machine that others name files in, and that nothing they say leads out of.

Every name is walked from the directory's own descriptor, a part at a time and through no link, so that a link which
is here, or which was made before, is never on the way to what is written. A new link may go up only at its
beginning, and no further than it lies deep; from there it goes down by names, which lead outside through no link that
was made by the same rule, whatever order they are made in and whatever takes the place of what they lead through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

__all__ = ["LeavesPlace", "Place"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC


class LeavesPlace(Exception):
    """A name would lead out of the place, or goes through a link that is here."""


class Place:
    """The directory ``path``, which is made where it is missing. Names are relative to it, with ``/`` between parts.

    Methods raise LeavesPlace, and OSError with the whole path as its ``filename``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, exist_ok=True)
        self._handle = os.open(path, _DIRECTORY)

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def full(self, name: str) -> str:
        """The path of ``name``, for messages to people."""
        return os.path.join(self.path, name)

    def stat(self, name: str) -> os.stat_result | None:
        """Of what lies there itself, links included; None where nothing does."""
        with self._parent(name) as (handle, last):
            try:
                return os.stat(last, dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def make_directory(self, name: str) -> None:
        """Makes a directory, or leaves the one that is there."""
        with self._parent(name) as (handle, last):
            try:
                os.mkdir(last, dir_fd=handle)
            except FileExistsError:
                os.close(self._enter(handle, last, name))

    def make_link(self, name: str, target: str) -> bool:
        """Makes a link, in place of one that is there; False, and none made, where it might lead out of the place."""
        if not _goes_down(target, depth=name.count("/")):
            return False
        with self._parent(name) as (handle, last):
            # What the links here that somebody else made lead to is known to the file system alone.
            end = os.path.realpath(os.path.join(os.path.dirname(self.full(name)), target))
            if not _is_within(end, os.path.realpath(self.path)):
                return False
            found = self.stat(name)
            if found is not None and stat.S_ISLNK(found.st_mode):
                os.unlink(last, dir_fd=handle)
            os.symlink(target, last, dir_fd=handle)
        return True

    def create(self, name: str) -> int:
        """A new empty file for writing, in place of the file or link that is there."""
        with self._parent(name) as (handle, last):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=handle)
            return os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=handle)

    def open(self, name: str, *, write: bool = False) -> int:
        """A file that is there, for reading or for writing. Raises FileNotFoundError where there is no plain file."""
        with self._parent(name) as (handle, last):
            found = os.stat(last, dir_fd=handle, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "no plain file", self.full(name))
            return os.open(last, (os.O_WRONLY if write else os.O_RDONLY) | _FILE, dir_fd=handle)

    def replace(self, old: str, new: str) -> None:
        """Renames ``old`` to ``new``, which lies beside it."""
        with self._parent(new) as (handle, last):
            os.replace(old.rpartition("/")[2], last, src_dir_fd=handle, dst_dir_fd=handle)

    def unlink(self, name: str) -> None:
        with self._parent(name) as (handle, last):
            os.unlink(last, dir_fd=handle)

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """The directory in which ``name`` lies, open, and the last part of ``name``."""
        *before, last = parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise LeavesPlace(f"{name!r} would be written outside of {self.path}")
        handle = os.dup(self._handle)
        try:
            for part in before:
                inner = self._enter(handle, part, name)
                os.close(handle)
                handle = inner
            yield handle, last
        except OSError as error:
            if error.filename is None or not os.path.isabs(str(error.filename)):
                error.filename = self.full(name)
            raise
        finally:
            os.close(handle)

    def _enter(self, handle: int, part: str, name: str) -> int:
        try:
            return os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(handle, part):
                raise LeavesPlace(
                    f"{name!r} would be written outside of {self.path}, or at least through the link {part!r} that is "
                    "here: remove it"
                ) from None
            raise


def _is_link(handle: int, part: str) -> bool:
    return stat.S_ISLNK(os.stat(part, dir_fd=handle, follow_symlinks=False).st_mode)


def _goes_down(target: str, *, depth: int) -> bool:
    """Whether a link that lies ``depth`` directories deep stays inside: up at its beginning only, and not too far."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and "\0" not in target and ups <= depth and ".." not in parts[ups:]


def _is_within(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip(os.sep) + os.sep)

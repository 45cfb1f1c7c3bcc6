"""A local directory in which hosts name files, and which none of their names can escape.

Every name is resolved from the directory's own descriptor, one component at a time and through no symlink, so no link,
whether it was here before or was just pulled, is ever on the path of a write. A pulled link may go up only at its
beginning, and no further than its own depth. After that it only goes down, so
links made by this rule never lead outside, in whatever order they are made and replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePath(Exception):
    """A name leads out of the destination or through a symlink."""


class Destination:
    """The directory ``path``, created if missing. Names are relative to it, with ``/`` between components.

    Methods raise UnsafePath, and OSError with the full path as its ``filename``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, exist_ok=True)
        self._handle = os.open(path, _DIRECTORY)

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Destination:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def full_path(self, name: str) -> str:
        """The path of ``name``, for messages."""
        return os.path.join(self.path, name)

    def stat(self, name: str) -> os.stat_result | None:
        """The status of ``name``, not of a link's target; None if it does not exist."""
        with self._parent(name) as (handle, last):
            try:
                return os.stat(last, dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def make_directory(self, name: str) -> None:
        """Creates a directory unless it exists."""
        with self._parent(name) as (handle, last):
            try:
                os.mkdir(last, dir_fd=handle)
            except FileExistsError:
                os.close(self._enter(handle, last, name))

    def make_link(self, name: str, target: str) -> bool:
        """Creates a symlink, replacing one of that name. Returns False, without a link, if it might lead outside."""
        if not _stays_inside(target, depth=name.count("/")):
            return False
        with self._parent(name) as (handle, last):
            # Only the file system knows where existing links of other origin lead.
            end = os.path.realpath(os.path.join(os.path.dirname(self.full_path(name)), target))
            if not _is_within(end, os.path.realpath(self.path)):
                return False
            found = self.stat(name)
            if found is not None and stat.S_ISLNK(found.st_mode):
                os.unlink(last, dir_fd=handle)
            os.symlink(target, last, dir_fd=handle)
        return True

    def create(self, name: str) -> int:
        """Opens a new empty file for writing, replacing a file or link of that name."""
        with self._parent(name) as (handle, last):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=handle)
            return os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=handle)

    def open(self, name: str, *, write: bool = False) -> int:
        """Opens an existing file. Raises FileNotFoundError if it is not a regular file."""
        with self._parent(name) as (handle, last):
            found = os.stat(last, dir_fd=handle, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", self.full_path(name))
            return os.open(last, (os.O_WRONLY if write else os.O_RDONLY) | _FILE, dir_fd=handle)

    def replace(self, old: str, new: str) -> None:
        """Renames ``old`` to ``new`` in the same directory."""
        with self._parent(new) as (handle, last):
            os.replace(old.rpartition("/")[2], last, src_dir_fd=handle, dst_dir_fd=handle)

    def unlink(self, name: str) -> None:
        with self._parent(name) as (handle, last):
            os.unlink(last, dir_fd=handle)

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that contains ``name``, and the last component of ``name``."""
        *parents, last = components = name.split("/")
        if any(component in ("", ".", "..") or "\0" in component for component in components):
            raise UnsafePath(f"{name!r} leads outside of {self.path}")
        handle = os.dup(self._handle)
        try:
            for component in parents:
                inner = self._enter(handle, component, name)
                os.close(handle)
                handle = inner
            yield handle, last
        except OSError as error:
            if error.filename is None or not os.path.isabs(str(error.filename)):
                error.filename = self.full_path(name)
            raise
        finally:
            os.close(handle)

    def _enter(self, handle: int, component: str, name: str) -> int:
        try:
            return os.open(component, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(handle, component):
                raise UnsafePath(
                    f"{name!r} leads through the symlink {component!r}, possibly outside of {self.path}; remove the "
                    "link and pull again"
                ) from None
            raise


def _is_link(handle: int, component: str) -> bool:
    return stat.S_ISLNK(os.stat(component, dir_fd=handle, follow_symlinks=False).st_mode)


def _stays_inside(target: str, *, depth: int) -> bool:
    """Whether a link at ``depth`` directories goes up only at its beginning, and at most ``depth`` levels."""
    components = [component for component in target.split("/") if component not in ("", ".")]
    ups = next((index for index, component in enumerate(components) if component != ".."), len(components))
    return not target.startswith("/") and "\0" not in target and ups <= depth and ".." not in components[ups:]


def _is_within(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip(os.sep) + os.sep)

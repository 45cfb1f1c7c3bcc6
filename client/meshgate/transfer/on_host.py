"""The actor that reads files on a host for ``job.pull``; it needs nothing but torchmonarch.

Endpoints return errors as (kind, text); the laptop turns them into messages.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Any

from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint

REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)  # of what was removed or replaced since its name was read


class FileReader(Actor, metaclass=SentAsSource):
    def __init__(self) -> None:
        self.open: tuple[str, int] = ("", -1)

    @endpoint
    def listing(self, path: str) -> tuple[str, Any]:
        """The host's name, and rows of (name relative to ``path``, kind, size, mtime in ns, mode, link target).

        For a file there is one row with an empty name. Kinds are file, directory, link and other.
        """
        self._close_file()  # a file that was deleted since it was read keeps its disk space while it is open
        host = os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
        top = os.path.realpath(os.path.expanduser(path))
        rows: list[tuple[str, str, int, int, int, str]] = []
        try:
            if not os.path.isdir(top):
                return host, [_row(top, "")]
            pending = [""]
            while pending:
                directory = pending.pop()
                for name in sorted(_names(os.path.join(top, directory), absent_ok=bool(directory))):
                    try:
                        row = _row(os.path.join(top, directory, name), os.path.join(directory, name))
                    except OSError as error:
                        if error.errno not in REPLACED:
                            raise
                        continue
                    rows.append(row)
                    if row[1] == "directory":
                        pending.append(row[0])
        except OSError as error:
            return host, _failure(error)
        return host, rows

    @endpoint
    def read(self, path: str, name: str, offset: int, length: int, size: int, mtime: int, growing: bool = False) -> Any:
        """``length`` bytes of a file; an error if its size or mtime differ from those of the listing. With ``growing``
        it may have become larger, as a log does. It is an error, too, if the file does not have the size that the
        system states: those of /proc and /sys are generated when they are read."""
        top = os.path.realpath(os.path.expanduser(path))
        file = os.path.join(top, name) if name else top
        try:
            found = os.stat(file)
            if self.open[0] != file or not os.path.samestat(os.fstat(self.open[1]), found):
                self._close_file()
                self.open = (file, os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            handle = self.open[1]
            # One more byte shows if the size is true, unless it may grow.
            data = os.pread(handle, length or int(size == 0 and not growing), offset)
            after = os.fstat(handle)
        except OSError as error:
            return _failure(error)
        changed = any(
            (each.st_size, each.st_mtime_ns) != (size, mtime) and not (growing and each.st_size > size)
            for each in (found, after)
        )
        if changed or (growing and len(data) != length):
            return "changed", file
        return data if len(data) == length else ("generated", file)

    def _close_file(self) -> None:
        handle, self.open = self.open[1], ("", -1)
        if handle >= 0:
            os.close(handle)


def _names(directory: str, *, absent_ok: bool) -> list[str]:
    """The names in a directory; none if it was removed or replaced after it was listed."""
    try:
        return os.listdir(directory)
    except OSError as error:
        if not absent_ok or error.errno not in REPLACED:
            raise
        return []


def _row(path: str, name: str) -> tuple[str, str, int, int, int, str]:
    found = os.lstat(path)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        return name, "link", 0, found.st_mtime_ns, mode, os.readlink(path)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "other")
    return name, kind, found.st_size if kind == "file" else 0, found.st_mtime_ns, mode, ""


def _failure(error: OSError) -> tuple[str, str]:
    kinds = {FileNotFoundError: "absent", NotADirectoryError: "absent", PermissionError: "forbidden"}
    text = error.strerror or str(error)
    return kinds.get(type(error), "failed"), f"{text}: {error.filename}" if error.filename else text

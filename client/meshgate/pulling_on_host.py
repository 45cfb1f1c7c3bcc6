"""What reads files on a host for ``job.pull``: an actor that needs nothing but torchmonarch.

Errors are answers, as (kind, text), for the laptop says what they mean.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import Any

from meshgate.sent_as_source import Actor, SentAsSource, endpoint

__all__ = ["FileReader"]


class FileReader(Actor, metaclass=SentAsSource):
    def __init__(self) -> None:
        self.open: tuple[str, int] = ("", -1)

    @endpoint
    def listing(self, path: str) -> tuple[str, Any]:
        """The host's name, and what lies at ``path``: rows of (name below it, kind, size, mtime in ns, mode, target).

        A file is the one row with the empty name. Kinds are file, directory, link and other.
        """
        host = os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()
        top = os.path.realpath(os.path.expanduser(path))
        rows: list[tuple[str, str, int, int, int, str]] = []
        try:
            if not os.path.isdir(top):
                return host, [_row(top, "")]
            pending = [""]
            while pending:
                below = pending.pop()
                for name in sorted(os.listdir(os.path.join(top, below))):
                    row = _row(os.path.join(top, below, name), os.path.join(below, name))
                    rows.append(row)
                    if row[1] == "directory":
                        pending.append(row[0])
        except OSError as error:
            return host, _told(error)
        return host, rows

    @endpoint
    def read(self, path: str, name: str, offset: int, length: int, size: int, mtime: int) -> Any:
        """A part of a file that had ``size`` and ``mtime`` when it was listed."""
        top = os.path.realpath(os.path.expanduser(path))
        place = os.path.join(top, name) if name else top
        try:
            if self.open[0] != place:
                if self.open[1] >= 0:
                    os.close(self.open[1])
                self.open = ("", -1)
                self.open = (place, os.open(place, os.O_RDONLY | os.O_CLOEXEC))
            handle = self.open[1]
            data = os.pread(handle, length, offset)
            found = os.stat(place)
        except OSError as error:
            return _told(error)
        if (found.st_size, found.st_mtime_ns) != (size, mtime) or len(data) != length:
            return "changed", place
        return data


def _row(path: str, name: str) -> tuple[str, str, int, int, int, str]:
    found = os.lstat(path)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        return name, "link", 0, found.st_mtime_ns, mode, os.readlink(path)
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "other")
    return name, kind, found.st_size if kind == "file" else 0, found.st_mtime_ns, mode, ""


def _told(error: OSError) -> tuple[str, str]:
    kinds = {FileNotFoundError: "absent", PermissionError: "forbidden"}
    return kinds.get(type(error), "failed"), f"{error.strerror or error}: {error.filename or ''}"

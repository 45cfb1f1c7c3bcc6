"""The results of the last scan, so that the next one reads only what changed.

A file counts as unchanged if its size, times and inode are what they were when it was read, and if its change time is
clearly before that: a file that was written in the same clock tick in which it was read may have changed afterwards
unnoticed, so it is read again. Git's index has the same rule.

The cache only saves time: one that is missing, damaged or of another format counts as empty.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

from .digest import DIGEST_SIZE, piece_digest
from .tree import Directory, File, Piece

_MAGIC = b"meshgate-stat-1\n"
_TICK_NS = 50_000_000
_COARSE_NS = 2_000_000_000

Stat = tuple[int, int, int, int, int]
"""Size, mtime and ctime in nanoseconds, inode, mode."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    stat: Stat
    read_at: int  # nanoseconds since the epoch, before the file was opened
    file: File

    def trusts(self, stat: Stat) -> bool:
        if stat != self.stat:
            return False
        latest = max(stat[1], stat[2])
        return latest + (_TICK_NS if latest % 1_000_000_000 else _COARSE_NS) < self.read_at


@dataclass(slots=True)
class DirectoryRecord:
    """One directory: its files, and the names that were ignored under the rules with the key ``rules``."""

    rules: bytes = b""
    ignored: frozenset[bytes] = frozenset()
    files: dict[bytes, FileRecord] = field(default_factory=dict)
    tree: Directory | None = None  # of the last scan; not saved


class StatCache:
    """Directories by path below the root (bytes, ``/`` between names, empty for the root itself)."""

    def __init__(self) -> None:
        self.directories: dict[bytes, DirectoryRecord] = {}

    @classmethod
    def load(cls, path: str) -> StatCache:
        cache = cls()
        with contextlib.suppress(OSError, ValueError, TypeError, EOFError):
            with open(path, "rb") as stored:
                data = stored.read()
            body = data[len(_MAGIC) + DIGEST_SIZE :]
            if data.startswith(_MAGIC) and data[len(_MAGIC) : len(_MAGIC) + DIGEST_SIZE] == piece_digest(body):
                cache.directories = _load(marshal.loads(body))
        return cache

    def save(self, path: str) -> None:
        """Atomic: a reader sees the old cache or the new one."""
        body = marshal.dumps(_dump(self.directories))
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory)
        try:
            with open(handle, "wb") as out:
                out.write(_MAGIC + piece_digest(body) + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _dump(directories: dict[bytes, DirectoryRecord]) -> list[Any]:
    return [
        (path, record.rules, list(record.ignored), [_dump_file(name, file) for name, file in record.files.items()])
        for path, record in directories.items()
    ]


def _dump_file(name: bytes, record: FileRecord) -> tuple[Any, ...]:
    pieces = [(piece.digest, piece.size) for piece in record.file.pieces]
    return name, record.stat, record.read_at, record.file.executable, pieces


def _load(stored: list[Any]) -> dict[bytes, DirectoryRecord]:
    return {
        path: DirectoryRecord(rules, frozenset(ignored), {entry[0]: _load_file(*entry) for entry in entries})
        for path, rules, ignored, entries in stored
    }


def _load_file(_name: bytes, stat: Stat, read_at: int, executable: bool, pieces: list[tuple[bytes, int]]) -> FileRecord:
    return FileRecord(stat, read_at, File(tuple([Piece(digest, size) for digest, size in pieces]), executable))

"""A file that is being pulled: ``<name>.part`` until it is complete, then renamed to ``<name>``.

``<name>.part.json`` records which file the part belongs to, its length and its digest, so that the next pull resumes
there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator

from meshgate.transfer.destination import Destination
from meshgate.transfer.host_files import Entry

CHUNK = 1 << 20
RECORD_INTERVAL = 32 << 20  # bytes between two updates of the record


class PartialFile:
    """One file being pulled. ``have`` is the number of bytes that are here."""

    @classmethod
    def open(cls, entry: Entry, destination: Destination, name: str) -> PartialFile | None:
        """None if the complete file is already here, with its size and time."""
        found = destination.stat(name)
        known = found is not None and (stat.S_ISREG(found.st_mode), found.st_size, found.st_mtime_ns)
        if known == (True, entry.size, entry.mtime):
            return None
        return cls(entry, destination, name)

    def __init__(self, entry: Entry, destination: Destination, name: str) -> None:
        self.entry = entry
        self.path = destination.full_path(name)
        self._destination, self._name = destination, name
        self._part, self._record = f"{name}.part", f"{name}.part.json"
        self._file: int = -1
        self._digest = hashlib.sha256()
        self._recorded = 0
        self.have = self._resume()

    def missing_ranges(self) -> Iterator[tuple[int, int]]:
        """The missing (offset, length) ranges; one of length 0 if no bytes are missing."""
        if self.have == self.entry.size:
            yield self.have, 0
        for offset in range(self.have, self.entry.size, CHUNK):
            yield offset, min(CHUNK, self.entry.size - offset)

    def write(self, data: bytes) -> None:
        """Appends the next bytes. After the last, the file gets its name, time and mode."""
        if self._file < 0:
            self._file = (
                self._destination.open(self._part, write=True) if self.have else self._destination.create(self._part)
            )
            os.ftruncate(self._file, self.have)
            os.lseek(self._file, self.have, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._digest.update(data)
        self.have += len(data)
        if self.have == self.entry.size:
            self._finish()
        elif self.have - self._recorded >= RECORD_INTERVAL:
            self._write_record()

    def close(self) -> None:
        """Closes an incomplete file so that the next pull can resume it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                self._write_record()

    def discard(self) -> None:
        """Deletes the part, because the file on the host has changed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.have = 0
        for name in (self._part, self._record):
            with contextlib.suppress(FileNotFoundError):
                self._destination.unlink(name)

    def _finish(self) -> None:
        os.fchmod(self._file, self.entry.mode & 0o777)
        os.utime(self._file, ns=(time.time_ns(), self.entry.mtime))
        os.close(self._file)
        self._file = -1
        self._destination.replace(self._part, self._name)
        with contextlib.suppress(FileNotFoundError):
            self._destination.unlink(self._record)

    def _write_record(self) -> None:
        self._recorded = self.have
        record = {"size": self.entry.size, "mtime": self.entry.mtime, "have": self.have}
        with os.fdopen(self._destination.create(f"{self._record}.new"), "w", encoding="utf-8") as file:
            json.dump({**record, "sha256": self._digest.hexdigest()}, file)
        self._destination.replace(f"{self._record}.new", self._record)

    def _resume(self) -> int:
        """The number of bytes of an earlier part that can be used: all that match the record's digest, or 0."""
        try:
            with os.fdopen(self._destination.open(self._record), encoding="utf-8") as file:
                record = json.load(file)
            if (record["size"], record["mtime"]) != (self.entry.size, self.entry.mtime):
                return 0
            remaining = have = int(record["have"])
            digest = hashlib.sha256()
            with os.fdopen(self._destination.open(self._part), "rb") as part:
                while remaining and (data := part.read(min(remaining, CHUNK))):
                    digest.update(data)
                    remaining -= len(data)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0
        if remaining or digest.hexdigest() != record["sha256"]:
            return 0
        self._digest = digest
        return have

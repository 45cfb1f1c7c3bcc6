"""Downloads the listed files of one host into a destination, with several reads in flight."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshgate.errors import PullFailed
from meshgate.session.futures import FutureProxy
from meshgate.transfer.destination import Destination, UnsafePath
from meshgate.transfer.host_files import CHANGED_SINCE, Entry, Source, read_error, result_of
from meshgate.transfer.partial_file import PartialFile
from meshgate.transfer.pulled import Pulled

IN_FLIGHT = 16  # reads


@dataclass(slots=True)
class Download:
    """One host's files on their way to the directory or file ``local``. ``advance`` and ``expect`` are called with
    numbers of bytes; ``stopped`` makes ``run`` raise. Files that are removed meanwhile are left out. With
    ``skip_changed``, files that change while they are read are left for the next download."""

    source: Source
    remote: str
    local: str
    advance: Callable[[int], None] = lambda count: None
    expect: Callable[[int], None] = lambda count: None
    stopped: bool = False
    skip_changed: bool = False
    travelled: int = field(default=0, init=False)
    _skipped: set[PartialFile] = field(default_factory=set, init=False)

    def run(self) -> Pulled:
        """Returns when every file is complete. Raises PullFailed."""
        entries = self.source.listing()
        if len(entries) == 1 and not entries[0].name:
            return self._file(entries[0])
        with self._open_destination(self.local) as destination:
            return self._directory(entries, destination)

    def _directory(self, entries: Sequence[Entry], destination: Destination) -> Pulled:
        left_out = [entry.name for entry in entries if entry.kind == "other"]
        files = [entry for entry in entries if entry.kind == "file"]
        with self._as_pull_failed(self.local):
            for entry in entries:
                if entry.kind == "directory":
                    destination.make_directory(entry.name)
        self._transfer(destination, [(entry, entry.name) for entry in files])
        with self._as_pull_failed(self.local):
            for entry in entries:
                if entry.kind == "link" and not destination.make_link(entry.name, entry.target):
                    left_out.append(entry.name)
        skipped = {part.entry.name for part in self._skipped}
        left_out += sorted(skipped)
        files = [entry for entry in files if entry.name not in skipped]
        return Pulled(len(files), sum(entry.size for entry in files), self.travelled, tuple(left_out))

    def _file(self, entry: Entry) -> Pulled:
        if entry.kind != "file":
            message = f"{self.remote} on {self.source.host} is neither a file nor a directory"
            raise PullFailed(message, host=self.source.host, path=self.remote)
        path = self.local
        if path.endswith(os.sep) or os.path.isdir(path):
            path = os.path.join(path, posixpath.basename(self.remote.rstrip("/")))
        parent, name = os.path.split(os.path.abspath(path))
        with self._open_destination(parent) as destination:
            self._transfer(destination, [(entry, name)])
        return Pulled(1, entry.size, self.travelled)

    def _transfer(self, destination: Destination, wanted: Sequence[tuple[Entry, str]]) -> None:
        """Keeps several reads in flight, of one file or of many, and writes their results in order."""
        with self._as_pull_failed(self.local):
            opened = [PartialFile.open(entry, destination, name) for entry, name in wanted]
        parts = [part for part in opened if part is not None]
        missing = sum(part.entry.size - part.have for part in parts)
        self.expect(missing)
        self._require_space(missing)
        reads = ((part, offset, length) for part in parts for offset, length in part.missing_ranges())
        in_flight: deque[tuple[PartialFile, int, FutureProxy[Any]]] = deque()
        try:
            for part, offset, length in reads:
                in_flight.append((part, length, self.source.read(part.entry, offset, length)))
                while len(in_flight) >= IN_FLIGHT:
                    self._write(*in_flight.popleft())
            while in_flight:
                self._write(*in_flight.popleft())
        finally:
            for part in parts:
                part.close()

    def _write(self, part: PartialFile, length: int, future: FutureProxy[Any]) -> None:
        if self.stopped:
            raise PullFailed("stopped because the pull from another host failed", path=part.path)
        data = result_of(future, self.source.host, self.remote)
        if part in self._skipped:
            return
        if isinstance(data, tuple):
            removed = data[0] == "absent" and bool(part.entry.name)  # from the directory that is pulled
            if removed or data[0] == "changed" or self.skip_changed:
                part.discard()
            if removed or (self.skip_changed and data[0] in CHANGED_SINCE):
                self._skipped.add(part)
                return
            raise read_error(data, self.source.host, f"{self.remote}/{part.entry.name}".rstrip("/"))
        with self._as_pull_failed(part.path):
            part.write(data)
        self.travelled += length
        self.advance(length)

    def _require_space(self, missing: int) -> None:
        directory = os.path.abspath(self.local)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        free = shutil.disk_usage(directory).free
        if missing > free:
            raise PullFailed(
                f"not enough disk space in {directory}: the pull needs {missing / 1e6:.1f} MB, and "
                f"{free / 1e6:.1f} MB are free",
                path=directory,
            )

    def _open_destination(self, path: str) -> Destination:
        with self._as_pull_failed(path):
            return Destination(path)

    @contextlib.contextmanager
    def _as_pull_failed(self, path: str) -> Iterator[None]:
        try:
            yield
        except PullFailed:
            raise
        except UnsafePath as error:
            message = f"refusing a name listed by {self.source.host}: {error}"
            raise PullFailed(message, host=self.source.host, path=path) from error
        except OSError as error:
            target = error.filename or path
            if error.errno == errno.ENOSPC:
                message = f"no space left on the disk of {target}; free some and pull again to resume"
            else:
                message = f"cannot write {target} on this machine: {error.strerror}"
            raise PullFailed(message, path=str(target)) from error

"""Brings files and directories from workers to this machine: checkpoints, profiles.

A file appears under its name when it is whole. Until then it is ``<name>.part``, beside which ``<name>.part.json``
says of which file it is a part and what its digest was so far; what is interrupted goes on there at the next call,
and what is here already, with its size and time, is not sent again. Nothing is ever written outside the place that
was named, whatever a host answers (``pulling_place``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from meshgate.errors import PullFailed, StepFailedError, SupervisionError
from meshgate.future import FutureProxy
from meshgate.pulling_on_host import FileReader
from meshgate.pulling_place import LeavesPlace, Place
from meshgate.pulling_progress import PullProgress

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

__all__ = ["Pulled", "pull"]

CHUNK = 1 << 20
IN_FLIGHT = 16  # reads for each host
NOTED_EVERY = 32 << 20  # bytes between two notes of how far a part is
HOSTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull has brought: how many files there are now and their bytes, the bytes that had to travel, and what
    was left out because it is no file, or a link that leaves the directory."""

    files: int = 0
    size: int = 0
    travelled: int = 0
    left_out: tuple[str, ...] = ()

    def __add__(self, other: Pulled) -> Pulled:
        return Pulled(
            self.files + other.files,
            self.size + other.size,
            self.travelled + other.travelled,
            self.left_out + other.left_out,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a listing; ``name`` is below the directory asked for, empty for a file asked for by itself."""

    name: str
    kind: str
    size: int
    mtime: int
    mode: int
    target: str


class Source(Protocol):
    """One host's files."""

    host: str

    def listing(self) -> list[Entry]: ...

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]: ...


def pull(
    hosts: HostMeshProxy, remote: str, local: str | os.PathLike[str], ranks: Sequence[int] | int | None = None
) -> Pulled:
    """Brings ``remote`` from the hosts ``ranks`` (None: all) to ``local``. Raises PullFailed.

    From one host, what a directory holds goes into ``local``, and a file becomes ``local``, or goes into it where it
    is a directory or ends with ``/``. From several, each has a directory ``rank-<n>`` in ``local``.
    """
    chosen = (
        list(range(len(hosts))) if ranks is None else [ranks] if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    )
    if not chosen or any(rank not in range(len(hosts)) for rank in chosen):
        raise ValueError(f"ranks={ranks!r}: the mesh has the ranks 0 to {len(hosts) - 1}")
    if not remote:
        raise ValueError("pull(''): name a file or a directory of the hosts; '.' is their working directory")
    top = os.fspath(local)
    several = len(chosen) > 1
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_reading(hosts, rank, remote)) for rank in chosen]
        places = [os.path.join(top, f"rank-{rank}", "") if several else top for rank in chosen]
        with PullProgress(remote) as progress, ThreadPoolExecutor(min(len(chosen), HOSTS_AT_ONCE)) as pool:
            jobs = [
                Landing(source, remote, place, progress.advance, progress.expect)
                for source, place in zip(sources, places, strict=True)
            ]
            try:
                futures = [pool.submit(job.run) for job in jobs]
                result = sum((future.result() for future in futures), Pulled())
            finally:
                for job in jobs:
                    job.stopped = True
            progress.done(result)
    return result


@contextlib.contextmanager
def _reading(hosts: HostMeshProxy, rank: int, remote: str) -> Iterator[Source]:
    procs = hosts.slice(hosts=slice(rank, rank + 1)).spawn_procs(name="pull")
    try:
        yield HostFiles(procs.spawn("pull", FileReader), remote)
    finally:
        procs.stop()


class HostFiles:
    """The files of one host, read by an actor there."""

    def __init__(self, reader: Any, remote: str) -> None:
        self._reader = reader
        self._remote = remote
        self.host = ""

    def listing(self) -> list[Entry]:
        self.host, answer = _answer(self._reader.listing.call_one(self._remote), self.host, self._remote)
        if isinstance(answer, tuple):
            raise told(answer, self.host, self._remote)
        return [Entry(*row) for row in answer]

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]:
        future: FutureProxy[Any] = self._reader.read.call_one(
            self._remote, entry.name, offset, length, entry.size, entry.mtime
        )
        return future


def _answer(future: FutureProxy[Any], host: str, path: str) -> Any:
    """What the host says; PullFailed where it is lost."""
    try:
        return future.get()
    except (StepFailedError, SupervisionError) as error:
        raise PullFailed(f"{path} cannot be read: {error}", host=host, path=path) from error


def told(answer: tuple[str, str], host: str, path: str) -> PullFailed:
    """What a host's (kind, text) means to who pulls."""
    kind, text = answer
    said = {
        "absent": f"there is no {path} on {host}",
        "forbidden": f"the worker process on {host} may not read {path} ({text})",
        "changed": f"{path} on {host} changed while it was read; pull it again when it is written",
    }
    return PullFailed(said.get(kind, f"{path} on {host} cannot be read: {text}"), host=host, path=path)


@dataclass(slots=True)
class Landing:
    """One host's files on their way to ``place``."""

    source: Source
    remote: str
    place: str
    advance: Callable[[int], None] = lambda count: None
    expect: Callable[[int], None] = lambda count: None
    stopped: bool = False
    travelled: int = field(default=0, init=False)

    def run(self) -> Pulled:
        """Returns when everything is there. Raises PullFailed."""
        entries = self.source.listing()
        if len(entries) == 1 and not entries[0].name:
            return self._file(entries[0])
        with self._opened(self.place) as place:
            return self._directory(entries, place)

    def _directory(self, entries: Sequence[Entry], place: Place) -> Pulled:
        left_out = [entry.name for entry in entries if entry.kind == "other"]
        files = [entry for entry in entries if entry.kind == "file"]
        with self._translated(self.place):
            for entry in entries:
                if entry.kind == "directory":
                    place.make_directory(entry.name)
        self._bring(place, [(entry, entry.name) for entry in files])
        with self._translated(self.place):
            for entry in entries:
                if entry.kind == "link" and not place.make_link(entry.name, entry.target):
                    left_out.append(entry.name)
        return Pulled(len(files), sum(entry.size for entry in files), self.travelled, tuple(left_out))

    def _file(self, entry: Entry) -> Pulled:
        if entry.kind != "file":
            raise PullFailed(f"{self.remote} on {self.source.host} is no file", host=self.source.host, path=self.remote)
        path = self.place
        if path.endswith(os.sep) or os.path.isdir(path):
            path = os.path.join(path, posixpath.basename(self.remote.rstrip("/")))
        parent, name = os.path.split(os.path.abspath(path))
        with self._opened(parent) as place:
            self._bring(place, [(entry, name)])
        return Pulled(1, entry.size, self.travelled)

    # --- the content

    def _bring(self, place: Place, wanted: Sequence[tuple[Entry, str]]) -> None:
        """Several reads are on their way at any time, of one file or of many; they are written in their order."""
        with self._translated(self.place):
            landings = [part for part in (Part.of(entry, place, name) for entry, name in wanted) if part is not None]
        missing = sum(part.entry.size - part.have for part in landings)
        self.expect(missing)
        self._require_space(missing)
        reads = ((part, offset, length) for part in landings for offset, length in part.reads())
        flying: deque[tuple[Part, int, FutureProxy[Any]]] = deque()
        part: Part | None = None
        try:
            for part, offset, length in reads:
                flying.append((part, length, self.source.read(part.entry, offset, length)))
                while len(flying) >= IN_FLIGHT:
                    self._land(*flying.popleft())
            while flying:
                self._land(*flying.popleft())
        finally:
            for part in landings:
                part.close()

    def _land(self, part: Part, length: int, future: FutureProxy[Any]) -> None:
        if self.stopped:
            raise PullFailed("another host failed", path=part.path)
        data = _answer(future, self.source.host, self.remote)
        if isinstance(data, tuple):
            if data[0] == "changed":
                part.forget()
            raise told(data, self.source.host, f"{self.remote}/{part.entry.name}".rstrip("/"))
        with self._translated(part.path):
            part.write(data)
        self.travelled += length
        self.advance(length)

    def _require_space(self, missing: int) -> None:
        place = os.path.abspath(self.place)
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        free = shutil.disk_usage(place).free
        if missing > free:
            raise PullFailed(
                f"{missing / 1e6:.1f} MB are to be pulled and {place} has {free / 1e6:.1f} MB free", path=place
            )

    def _opened(self, path: str) -> Place:
        with self._translated(path):
            return Place(path)

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except PullFailed:
            raise
        except LeavesPlace as error:
            raise PullFailed(f"{error} ({self.source.host} lists it)", host=self.source.host, path=path) from error
        except OSError as error:
            place = error.filename or path
            if error.errno == errno.ENOSPC:
                message = f"no space left on the disk of {place}: free some and pull again, it goes on where it stopped"
            else:
                message = f"{place} cannot be written here: {error.strerror}"
            raise PullFailed(message, path=str(place)) from error


class Part:
    """A file that is on its way. ``have``: the bytes that are here."""

    @classmethod
    def of(cls, entry: Entry, place: Place, name: str) -> Part | None:
        """None where the file is here already."""
        here = place.stat(name)
        known = here is not None and (stat.S_ISREG(here.st_mode), here.st_size, here.st_mtime_ns)
        if known == (True, entry.size, entry.mtime):
            return None
        return cls(entry, place, name)

    def __init__(self, entry: Entry, place: Place, name: str) -> None:
        self.entry = entry
        self.path = place.full(name)
        self._place, self._name = place, name
        self._part, self._note = f"{name}.part", f"{name}.part.json"
        self._file: int = -1
        self._digest = hashlib.sha256()
        self._noted = 0
        self.have = self._resume()

    def reads(self) -> Iterator[tuple[int, int]]:
        """What is missing, as (offset, length); once with no length where the file is empty or all is here."""
        if self.have == self.entry.size:
            yield self.have, 0
        for offset in range(self.have, self.entry.size, CHUNK):
            yield offset, min(CHUNK, self.entry.size - offset)

    def write(self, data: bytes) -> None:
        """Adds what comes next; with the last of it the file is whole and gets its name, time and mode."""
        if self._file < 0:
            self._file = self._place.open(self._part, write=True) if self.have else self._place.create(self._part)
            os.ftruncate(self._file, self.have)
            os.lseek(self._file, self.have, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._digest.update(data)
        self.have += len(data)
        if self.have == self.entry.size:
            self._finish()
        elif self.have - self._noted >= NOTED_EVERY:
            self._write_note()

    def close(self) -> None:
        """Leaves a part that can be gone on with, or nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                self._write_note()

    def forget(self) -> None:
        """The file over there is another now."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.have = 0
        for name in (self._part, self._note):
            with contextlib.suppress(FileNotFoundError):
                self._place.unlink(name)

    def _finish(self) -> None:
        os.fchmod(self._file, self.entry.mode & 0o777)
        os.utime(self._file, ns=(time.time_ns(), self.entry.mtime))
        os.close(self._file)
        self._file = -1
        self._place.replace(self._part, self._name)
        with contextlib.suppress(FileNotFoundError):
            self._place.unlink(self._note)

    def _write_note(self) -> None:
        self._noted = self.have
        note = {"size": self.entry.size, "mtime": self.entry.mtime, "have": self.have}
        with os.fdopen(self._place.create(f"{self._note}.new"), "w", encoding="utf-8") as file:
            json.dump({**note, "sha256": self._digest.hexdigest()}, file)
        self._place.replace(f"{self._note}.new", self._note)

    def _resume(self) -> int:
        """How much of the part that is here can be used: all that its note vouches for, or nothing."""
        try:
            with os.fdopen(self._place.open(self._note), encoding="utf-8") as file:
                note = json.load(file)
            if (note["size"], note["mtime"]) != (self.entry.size, self.entry.mtime):
                return 0
            left = have = int(note["have"])
            digest = hashlib.sha256()
            with os.fdopen(self._place.open(self._part), "rb") as part:
                while left and (data := part.read(min(left, CHUNK))):
                    digest.update(data)
                    left -= len(data)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0
        if left or digest.hexdigest() != note["sha256"]:
            return 0
        self._digest = digest
        return have

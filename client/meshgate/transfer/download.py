"""Downloads the files of one host into a destination, with several reads in flight.

A file is ``.<name>.meshgate-part`` until it is complete, then it is renamed to ``<name>``.
``.<name>.meshgate-part.json`` records which file the part belongs to, its length and its digest, so that the next pull
resumes there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import posixpath
import queue
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshgate.errors import PullFailed, StepFailedError, SupervisionError
from meshgate.session.futures import FutureProxy

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC
IN_FLIGHT = 16  # reads
CHANGED_SINCE = frozenset({"absent", "changed"})
"""The kinds of failures of a file that was replaced, shortened or removed since it was listed."""
IN_THE_WAY = frozenset({errno.EEXIST, errno.ENOTDIR})  # where a directory or a link is to be
CHUNK = 1 << 20
RECORD_INTERVAL = 32 << 20  # bytes between two updates of the record
NAME_LIMIT = 255  # bytes, of file systems
CONCURRENT_HOSTS = 8
STOP_TIMEOUT = 5.0  # seconds in which a stopped download ends, unless a disk or the connection holds its thread up

T = TypeVar("T")


class StopSignal:
    """Stops downloads, also those that wait for a host. ``reason`` is empty until then.

    ``set`` takes no lock, so that a signal handler may call it at any point of its thread.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._wakers: list[queue.SimpleQueue[None]] = []

    def set(self, reason: str) -> None:
        """The first ``reason`` counts."""
        self.reason = self.reason or reason
        for wake in tuple(self._wakers):
            wake.put(None)

    def check(self, host: str, path: str) -> None:
        """Raises PullFailed if it is set."""
        if self.reason:
            raise PullFailed(self.reason, host=host, path=path)

    def wait(self, timeout: float | None = None, *, future: FutureProxy[Any] | None = None) -> bool:
        """Waits until it is set, ``future`` is settled, or ``timeout`` seconds have passed. Returns whether it is
        set."""
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakers.append(wake)
        try:
            if future is not None:
                future.when_settled(lambda: wake.put(None))
            if not self.reason:  # if it is set from now on, ``wake`` is among those that are woken
                with contextlib.suppress(queue.Empty):
                    wake.get(timeout=timeout)
        finally:
            self._wakers.remove(wake)
        return bool(self.reason)


def in_threads(tasks: Iterable[Callable[[], T]]) -> list[Future[T]]:
    """Runs ``tasks``, up to ``CONCURRENT_HOSTS`` at a time; returns at once. The threads are daemons, because the
    program waits at its exit for those of an executor, before any function that could stop what they wait for."""
    runs: list[tuple[Callable[[], T], Future[T]]] = [(task, Future()) for task in tasks]
    left = deque(runs)

    def work() -> None:
        while True:
            try:
                task, outcome = left.popleft()
            except IndexError:
                return
            try:
                outcome.set_result(task())
            except BaseException as error:  # noqa: BLE001 - raised by result()
                outcome.set_exception(error)

    for _ in range(min(len(runs), CONCURRENT_HOSTS)):
        threading.Thread(target=work, name="meshgate-download", daemon=True).start()
    return [outcome for _, outcome in runs]


class UnsafePath(Exception):
    """A name leads out of the destination or through a symlink."""


class Destination:
    """The directory ``path``, created if missing. Hosts name the files in it, relative to it and with ``/`` between
    components, and none of their names can escape it.

    Every name is resolved from the directory's own descriptor, one component at a time and through no symlink, so no
    link, whether it was here before or was just pulled, is ever on the path of a write. A pulled link may go up only at
    its beginning, and no further than its own depth. After that it only goes down, so links made by this rule never
    lead outside, in whatever order they are made and replaced.

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

    def open_or_create(self, name: str) -> int:
        """Opens a file for writing, or creates it, replacing a link of that name."""
        with self._parent(name) as (handle, last):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(last, dir_fd=handle, follow_symlinks=False).st_mode):
                    os.unlink(last, dir_fd=handle)
            return os.open(last, os.O_WRONLY | os.O_CREAT | _FILE, 0o600, dir_fd=handle)

    def open(self, name: str) -> int:
        """Opens an existing file. Raises FileNotFoundError if it is not a regular file."""
        with self._parent(name) as (handle, last):
            found = os.stat(last, dir_fd=handle, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", self.full_path(name))
            return os.open(last, os.O_RDONLY | _FILE, dir_fd=handle)

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


def part_name(name: str) -> str:
    """The name of ``name`` while it is incomplete, beside it. No file that a user has is called that: its file is
    replaced and deleted without a question."""
    parent, slash, last = name.rpartition("/")
    if len(os.fsencode(f".{last}.meshgate-part.json.new")) > NAME_LIMIT:
        last = hashlib.sha256(os.fsencode(last)).hexdigest()
    return f"{parent}{slash}.{last}.meshgate-part"


class PartialFile:
    """One file being pulled. ``have`` is the number of bytes that are here. From the first byte on, the part is locked:
    other pulls to the same place, which would overwrite it, fail. Methods raise PullFailed."""

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
        self._part = part_name(name)
        self._record = f"{self._part}.json"
        self._file: int = -1
        self._digest = hashlib.sha256()
        self._recorded = 0
        self._resumed: tuple[int, ...] | None = None  # the state of the part when its bytes were counted
        self.have = self._resume()

    def missing_ranges(self) -> Iterator[tuple[int, int]]:
        """The missing (offset, length) ranges; one of length 0 if no bytes are missing."""
        if self.have == self.entry.size:
            yield self.have, 0
        for offset in range(self.have, self.entry.size, CHUNK):
            yield offset, min(CHUNK, self.entry.size - offset)

    def write(self, data: bytes) -> None:
        """Appends the next bytes. After the last, the file gets its name, time and mode."""
        self._open()
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
            with contextlib.suppress(OSError):
                self._write_record()
            self._unlock()

    def discard(self) -> None:
        """Deletes the part, because the file on the host has changed, unless it is another pull's."""
        with contextlib.suppress(PullFailed):
            self._open()
            self.have = 0
            for name in (self._part, self._record):
                with contextlib.suppress(FileNotFoundError):
                    self._destination.unlink(name)
            self._unlock()

    def _open(self) -> None:
        """Opens and locks the part, unless it is open."""
        if self._file >= 0:
            return
        if self._resumed and self._destination.stat(self._part) is None:  # completed meanwhile
            raise self._taken()
        self._file = self._destination.open_or_create(self._part)
        held = False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks: _finish notices most of what they prevent
            pass
        if held or not self._is_in_place() or self._resumed not in (None, _state(self._file)):
            self._unlock()
            raise self._taken()
        os.ftruncate(self._file, self.have)
        os.lseek(self._file, self.have, os.SEEK_SET)

    def _is_in_place(self) -> bool:
        """Whether the open file is the part still, which another pull may have renamed or replaced."""
        found = self._destination.stat(self._part)
        return found is not None and os.path.samestat(found, os.fstat(self._file))

    def _taken(self) -> PullFailed:
        return PullFailed(f"another pull is writing {self.path}", path=self.path)

    def _unlock(self) -> None:
        file, self._file = self._file, -1
        with contextlib.suppress(OSError):  # a forked child has the file too, and would keep the lock
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)

    def _finish(self) -> None:
        os.close(os.dup(self._file))  # raises what could not be written, and keeps the lock
        os.fchmod(self._file, self.entry.mode & 0o777)
        os.utime(self._file, ns=(time.time_ns(), self.entry.mtime))
        if not self._is_in_place():
            self._unlock()
            raise self._taken()
        self._destination.replace(self._part, self._name)
        with contextlib.suppress(FileNotFoundError):
            self._destination.unlink(self._record)
        self._unlock()

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
                state = _state(part.fileno())
                while remaining and (data := part.read(min(remaining, CHUNK))):
                    digest.update(data)
                    remaining -= len(data)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0
        if remaining or digest.hexdigest() != record["sha256"]:
            return 0
        self._digest, self._resumed = digest, state
        return have


def _state(file: int) -> tuple[int, ...]:
    """Differs once the file was replaced or written to."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a listing. ``name`` is relative to the pulled directory; it is empty for a file pulled by itself."""

    name: str
    kind: str
    size: int
    mtime: int
    mode: int
    target: str


class HostFiles:
    """The files below ``remote``, read by a ``FileReader`` on the host. With ``growing``, files may grow while they are
    read, and are read up to the size that they had; a file that is rewritten and ends larger looks the same."""

    def __init__(self, reader: Any, remote: str, *, growing: bool = False) -> None:
        self._reader = reader
        self._remote = remote
        self._growing = growing
        self.host = ""

    def listing(self, stop: StopSignal) -> list[Entry]:
        self.host, rows = result_of(self._reader.listing.call_one(self._remote), self.host, self._remote, stop)
        if isinstance(rows, tuple):
            raise read_error(rows, self.host, self._remote)
        return [Entry(*row) for row in rows]

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]:
        future: FutureProxy[Any] = self._reader.read.call_one(
            self._remote, entry.name, offset, length, entry.size, entry.mtime, self._growing
        )
        return future


def result_of(future: FutureProxy[Any], host: str, path: str, stop: StopSignal) -> Any:
    """The host's result. Raises PullFailed if the host is lost, and once ``stop`` is set."""
    stop.wait(future=future)
    stop.check(host, path)
    try:
        return future.get()
    except (StepFailedError, SupervisionError) as error:
        raise PullFailed(f"cannot read {path}: {error}", host=host, path=path) from error


def read_error(failure: tuple[str, str], host: str, path: str) -> PullFailed:
    """The error for a host's (kind, text)."""
    kind, text = failure
    messages = {
        "absent": f"{path} does not exist on {host}" + ("" if os.path.isabs(path) else f" ({text})"),
        "forbidden": f"the worker process on {host} may not read {path} ({text})",
        "changed": f"{path} changed on {host} while it was being read; pull it again once it is complete",
        "generated": f"{path} on {host} does not have the size that its file system states, as files of /proc and "
        f"/sys; print it with job.exec(['cat', {path!r}]), or copy it to a file there and pull that",
    }
    message = messages.get(kind, f"cannot read {path} on {host}: {text}")
    return PullFailed(message, host=host, path=path, absent=kind == "absent")


@dataclass(slots=True)
class Download:
    """One host's files on their way to the directory or file ``local``. ``advance`` and ``expect`` are called with
    numbers of bytes; ``stop`` makes ``run`` raise. Files that are removed meanwhile are left out. With
    ``skip_changed``, files that change while they are read are left for the next download."""

    source: HostFiles
    remote: str
    local: str
    advance: Callable[[int], None] = lambda count: None
    expect: Callable[[int], None] = lambda count: None
    stop: StopSignal = field(default_factory=StopSignal)
    skip_changed: bool = False
    travelled: int = field(default=0, init=False)
    _skipped: set[PartialFile] = field(default_factory=set, init=False)

    def run(self) -> Pulled:
        """Returns when every file is complete. Raises PullFailed."""
        self.stop.check(self.source.host, self.remote)  # this download may have waited for a thread
        entries = self.source.listing(self.stop)
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
        data = result_of(future, self.source.host, self.remote, self.stop)
        if part in self._skipped:
            return
        if isinstance(data, tuple):
            removed = data[0] == "absent" and bool(part.entry.name)  # from the directory that is pulled
            if removed or data[0] == "changed" or self.skip_changed:
                with self._as_pull_failed(part.path):
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
        total, _, free = shutil.disk_usage(directory)
        if missing > free and total:  # some file systems, such as those of FUSE, do not state their size
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
                if error.errno in IN_THE_WAY:
                    message += "; remove the file that is in the way, or pull to another path"
            raise PullFailed(message, path=str(target)) from error


@dataclass(frozen=True, slots=True)
class Pulled:
    """The number and total ``size`` of the pulled files, the bytes that were transferred, and the names that were left
    out: special files, links that lead out of the directory, and files that were removed meanwhile."""

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

"""The jobs that this user runs on this machine, for the ``meshgate`` command.

One small file per job in the state directory. It contains the token of the job's gateway, so only its owner can read
it. Since a killed process cannot remove its entry, each read removes the entries whose process has ended. The directory
may be shared with other machines and containers, whose entries are left to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshgate.errors import JobError
from meshgate.jobs.saved import read_record, write_job_file
from meshgate_processes.identity import ProcessIdentity, identify_process

_APPLY_ID = re.compile(r"[0-9a-f-]{1,64}")
UNREGISTERED_LOG_AGE = 3600.0  # seconds; the job of a younger log may be about to start


@dataclass(frozen=True, kw_only=True)
class LocalEntry:
    """A running job. ``pid`` and ``started`` identify its gateway process; ``created`` is in seconds since 1970.
    ``temporary`` is the directory of its temporary files."""

    apply_id: str
    kind: str
    meshes: dict[str, int]
    url: str
    pid: int
    started: str
    directory: str
    created: float
    token: str = field(default="", repr=False)
    socket: str | None = None
    temporary: str | None = None

    def __post_init__(self) -> None:
        if not _APPLY_ID.fullmatch(self.apply_id):  # it names files
            raise ValueError(f"invalid id of a job: {self.apply_id!r}")

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)

    @property
    def place(self) -> str:
        """The machine or container on which the job runs, if that is another one; otherwise ""."""
        return self.process.machine if self.process.foreign else ""

    def require_here(self) -> None:
        """Raises JobError if the job runs on another machine or in another container."""
        refuse_foreign(self.process, self.apply_id, str(_directory() / f"{self.apply_id}.json"))


def refuse_foreign(process: ProcessIdentity, apply_id: str, file: str = "its job file") -> None:
    """Raises JobError if the job's gateway, ``process``, belongs to another machine or container: it would seem to have
    ended, and its files might be removed."""
    if process.foreign:
        raise JobError(
            f"job {apply_id[:8]} was started on {process.machine}, which is another machine or container: only "
            f"programs there can use or end it. If {process.machine} no longer exists, neither does the job: remove "
            f"{file}"
        )


def register(entry: LocalEntry) -> None:
    """Writes the entry atomically, because readers remove invalid entries. If the directory is not writable, the job
    runs without an entry."""
    with contextlib.suppress(OSError):
        write_job_file(str(_directory() / f"{entry.apply_id}.json"), json.dumps(asdict(entry)).encode())


def unregister(apply_id: str) -> None:
    """Removes the entry and the log."""
    with contextlib.suppress(OSError):
        directory = _directory()
        (directory / f"{apply_id}.json").unlink(missing_ok=True)
        (directory / f"{apply_id}.log").unlink(missing_ok=True)


def entries() -> Iterator[LocalEntry]:
    """The running jobs, oldest first, and those of other machines and containers, which may have ended. Removes the
    entries and logs of jobs that have ended on this one. Leaves out entries that cannot be read."""
    found = []
    for path in _directory().glob("*.json"):
        try:
            data = path.read_bytes()
        except OSError:  # it is gone, or the next read may succeed
            continue
        try:
            entry = read_record(LocalEntry, data)
        except ValueError:
            if _is_useless(data):
                with contextlib.suppress(OSError):
                    path.unlink()
            continue
        if entry.process.ended:
            unregister(entry.apply_id)
        else:
            found.append(entry)
    yield from sorted(found, key=lambda entry: entry.created)


@dataclass(frozen=True)
class _Process:
    """What entries of all versions have in common."""

    pid: int
    started: str


def _is_useless(data: bytes) -> bool:
    """Whether an invalid entry is of no use to any version of meshgate: another one may have a running job."""
    try:
        json.loads(data)
    except ValueError:
        return True
    try:
        process = read_record(_Process, data)
    except ValueError:
        return False
    own = identify_process(os.getpid())
    if own is None or process.started.count("/") != own.started.count("/"):  # another version identifies it otherwise
        return False
    return ProcessIdentity(process.pid, process.started).ended


def prune() -> None:
    """Removes what jobs have left whose gateways were killed."""
    with contextlib.suppress(OSError):
        list(entries())  # removes those of ended jobs; an entry that remains keeps its log, even if it cannot be read
        known = {path.stem for path in _directory().glob("*.json")}
        for log in _directory().glob("*.log"):
            if log.stem not in known and time.time() - log.stat().st_mtime > UNREGISTERED_LOG_AGE:
                log.unlink(missing_ok=True)


def log_file(apply_id: str) -> Path:
    """Creates the log file of the job's gateway. Raises OSError if that fails."""
    path = _directory() / f"{apply_id}.log"
    path.touch(mode=0o600)
    return path


def _directory() -> Path:
    """``$XDG_STATE_HOME/meshgate/jobs``, or a directory below ``/tmp`` if that is not writable; created if missing."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    candidates = (Path(base), Path(tempfile.gettempdir()) / f"meshgate-{os.getuid()}")
    for parent in candidates:
        directory = parent / "meshgate" / "jobs"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
            return directory
    raise PermissionError(
        f"cannot write job files: neither {candidates[0]} nor {candidates[1]} is writable. Set XDG_STATE_HOME to a "
        "writable directory"
    )

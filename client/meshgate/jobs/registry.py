"""The jobs that this user runs on this machine, so that ``meshgate ls`` and ``meshgate kill`` find a forgotten one.

One small file a job under the state directory, readable by its owner only; it holds no token. Nobody is trusted to
tidy up: whoever reads drops the entries whose process is gone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate.jobs.processes import ProcessName, process_name

__all__ = ["LocalEntry", "entries", "log_file", "register", "unregister"]


class LocalEntry(BaseModel):
    """A running job. ``started`` (with ``pid``) names its gateway process; ``created`` is in seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    apply_id: str = Field(pattern=r"^[0-9a-f-]{1,64}$")
    kind: str
    meshes: dict[str, int]
    url: str
    pid: int
    started: str
    directory: str
    created: float

    @property
    def process(self) -> ProcessName:
        return ProcessName(self.pid, self.started)


def register(entry: LocalEntry) -> None:
    """Writes the entry down, whole or not at all: who reads removes what is no entry. Where that is impossible the
    job runs unlisted."""
    with contextlib.suppress(OSError):
        directory = _directory()
        handle, aside = tempfile.mkstemp(prefix=f"{entry.apply_id}.", suffix=".new", dir=directory)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(entry.model_dump_json())
            os.replace(aside, directory / f"{entry.apply_id}.json")
        except BaseException:
            os.unlink(aside)
            raise


def unregister(apply_id: str) -> None:
    """Drops the entry and the log."""
    with contextlib.suppress(OSError):
        directory = _directory()
        (directory / f"{apply_id}.json").unlink(missing_ok=True)
        (directory / f"{apply_id}.log").unlink(missing_ok=True)


def entries() -> Iterator[LocalEntry]:
    """The running jobs, oldest first; what is left of ended ones is removed."""
    found = []
    for path in _directory().glob("*.json"):
        try:
            entry = LocalEntry.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            path.unlink(missing_ok=True)
            continue
        if process_name(entry.pid) == entry.process:
            found.append(entry)
        else:
            unregister(entry.apply_id)
    yield from sorted(found, key=lambda entry: entry.created)


def log_file(apply_id: str) -> Path:
    """Where the job's gateway logs. Raises OSError where no file can be made."""
    path = _directory() / f"{apply_id}.log"
    path.touch(mode=0o600)
    return path


def _directory() -> Path:
    """``$XDG_STATE_HOME/meshgate/jobs``, made where it is missing; without a usable home, one below ``/tmp``."""
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
    raise PermissionError(f"neither {candidates[0]} nor {candidates[1]} can hold files: set XDG_STATE_HOME")

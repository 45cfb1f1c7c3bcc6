"""How a job is written down: what ``dump`` and ``dumps`` write and ``job_load`` and ``job_loads`` read.

A first line that says so, then JSON. Reading it runs nothing that the file names, unlike a pickle: a kind of job is
looked up among the classes that this process has imported (meshgate's own are imported by their name), and each
class checks its part. The job's token is in there, so files are written for their owner alone, and read only when
nobody else could have read or written them. A file appears under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate.errors import JobFileError

__all__ = ["SavedJob", "locked", "read_job_file", "write_job_file"]

FIRST_LINE = b"meshgate job\n"
PICKLE = b"\x80"
SIZE_LIMIT = 1 << 20


class SavedJob(BaseModel):
    """One job. ``allocation`` is None when it was not running."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    kind: str = Field(max_length=512)  # module:qualname of the job's class
    apply_id: str | None = Field(default=None, max_length=64)
    spec: dict[str, Any]
    allocation: dict[str, Any] | None = None

    def to_bytes(self) -> bytes:
        return FIRST_LINE + self.model_dump_json().encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "this data") -> SavedJob:
        """Raises JobFileError on anything that ``to_bytes`` did not write."""
        if not data.startswith(FIRST_LINE):
            pickled = ", but a pickle, perhaps a job of Monarch's own; nothing in it was run"
            raise JobFileError(f"{where} is no job that meshgate saved{pickled if data[:1] == PICKLE else ''}")
        try:
            return cls.model_validate_json(data[len(FIRST_LINE) :])
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise JobFileError(
                f"{where} is damaged, or another version of meshgate saved it: {place}: {first['msg']}"
            ) from None


def read_job_file(path: str) -> bytes:
    """The contents of a job file, a symlink followed.

    Raises FileNotFoundError, and JobFileError when the file is not this user's own or others may read or write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise JobFileError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise JobFileError(f"{path} belongs to user {status.st_uid}, not to you: a job file holds a token")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise JobFileError(
                f"{path} may be read or written by others (mode {stat.S_IMODE(status.st_mode):o}), and a job file "
                f"holds a token: if nobody has changed it, run chmod 600 {path}"
            )
        if status.st_size > SIZE_LIMIT:
            raise JobFileError(f"{path} is no job that meshgate saved: it has {status.st_size} bytes")
        return file.read(SIZE_LIMIT)


def write_job_file(path: str, data: bytes) -> None:
    """Replaces the file at ``path``, or the one that a symlink there names; makes its directory."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Holds other processes out that want the job at ``path``: of two that start at once, the second finds the first's.

    The directory is locked, so no lock file is left. Where it cannot be (some network file systems) nobody waits.
    """
    directory = Path(os.path.realpath(path)).parent
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

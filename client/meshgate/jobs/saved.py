"""The format of a saved job, and the file that holds it.

A header line, then JSON. Unlike a pickle, loading it runs nothing that the file names: the job's class is looked up
among the job types that this process has imported (meshgate's own are imported by name), and each class validates its
part. The file contains the job's token, so it is written for its owner only, and read only if no other user could have
read or written it. Writing is atomic.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from meshgate.errors import JobFileError

__all__ = ["DEFAULT_JOB_PATH", "SavedJob", "check_writable", "locked", "read_job_file", "write_job_file"]

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
HEADER = b"meshgate job\n"
PICKLE_HEADER = b"\x80"
SIZE_LIMIT = 1 << 20


class Restorable(Protocol):
    """What loading needs of a job type, which its subclasses add to ``kinds`` when they are imported."""

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self: ...


J = TypeVar("J", bound=Restorable)


class SavedJob(BaseModel):
    """One job. ``allocation`` is None if it was not running."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    kind: str = Field(max_length=512)  # module:qualname of the job's class
    apply_id: str | None = Field(default=None, max_length=64)
    spec: dict[str, Any]
    allocation: dict[str, Any] | None = None

    def to_bytes(self) -> bytes:
        return HEADER + self.model_dump_json().encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "this data") -> SavedJob:
        """Raises JobFileError on anything that ``to_bytes`` did not write. ``source`` names the data in errors."""
        if not data.startswith(HEADER):
            pickled = " but a pickle, perhaps of one of Monarch's own jobs; it was not loaded"
            raise JobFileError(f"{source} is not a saved meshgate job{pickled if data[:1] == PICKLE_HEADER else ''}")
        try:
            return cls.model_validate_json(data[len(HEADER) :])
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise JobFileError(
                f"cannot load the job in {source}: it is damaged or was saved by another version of meshgate "
                f"({f'{field}: ' if field else ''}{first['msg']})"
            ) from None

    def restore(self, kinds: Mapping[str, type[J]], source: str) -> J:
        """The job, whose type is one of ``kinds``. Raises JobFileError."""
        module = self.kind.partition(":")[0]
        if module.startswith("meshgate."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        kind = kinds.get(self.kind)
        if kind is None:
            raise JobFileError(f"cannot load the job in {source}: its type is {self.kind}; import {module} first")
        try:
            return kind._restore(self.spec, self.allocation)
        except (ValueError, TypeError, KeyError) as error:
            raise JobFileError(
                f"cannot load the job in {source}: it is damaged or was saved by another version of meshgate ({error})"
            ) from error


def read_job_file(path: str) -> bytes:
    """The contents of a job file; follows a symlink.

    Raises FileNotFoundError, and JobFileError if the file belongs to another user or other users may access it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise JobFileError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid != os.geteuid():
            raise JobFileError(f"refusing to load the job in {path}: the file belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise JobFileError(
                f"refusing to load the job in {path}: other users may read or write it "
                f"(mode {stat.S_IMODE(status.st_mode):o}), and it holds a token. If no one else has changed it, run "
                f"chmod 600 {path}"
            )
        if status.st_size > SIZE_LIMIT:
            raise JobFileError(f"{path} is not a saved meshgate job: it has {status.st_size} bytes")
        return file.read(SIZE_LIMIT)


def write_job_file(path: str, data: bytes) -> None:
    """Replaces the file at ``path``, or the target if that is a symlink; creates its directory."""
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
    """Locks the job at ``path``: if two processes start at once, the second finds the job of the first.

    Locks the directory, so no lock file remains. Does not block on file systems without locks (some network file
    systems). Raises JobFileError if there is no directory and it cannot be created.
    """
    directory = Path(os.path.realpath(path)).parent
    with _explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_writable(path: str) -> None:
    """Raises JobFileError if a job that is about to start could not be saved at ``path``."""
    directory = Path(os.path.realpath(path)).parent
    with _explained(directory), tempfile.TemporaryFile(dir=directory):
        pass


@contextlib.contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobFileError(
            f"the job cannot be saved in {directory}: {error.strerror}. Pass another cached_path to state(), or "
            f"cached_path=None if no other process has to find the job"
        ) from error

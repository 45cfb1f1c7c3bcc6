"""The format of a saved job, the file that holds it, and how ``state()`` finds and reuses the job in it.

A header line, then JSON. Unlike a pickle, loading it runs nothing that the file names: the job's class is looked up
among the job types that this process has imported (meshgate's own are imported by name), and each class validates its
part. Only a type that the program itself defines has its attributes pickled, as Monarch pickles its jobs: a process
that has not imported it, such as the ``meshgate`` command, unpickles nothing.

The file contains the job's token, so it is written for its owner only, and read only if no other user could have
read or written it. Writing is atomic.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib
import io
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from typing_extensions import Self

from meshgate.caller import warn_caller
from meshgate.errors import ConnectionFailedError, JobCacheWarning, JobFileError, JobNotRunning, JobUnsupported

if TYPE_CHECKING:
    from pydantic import TypeAdapter

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
HEADER = b"meshgate job\n"
PICKLE_HEADER = b"\x80"
SIZE_LIMIT = 1 << 20


class Restorable(Protocol):
    """What loading needs of a job type, which its subclasses add to ``kinds`` when they are imported."""

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self: ...


R = TypeVar("R", bound=Restorable)
T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}  # by the type of record; each takes 2 ms to make


def read_record(kind: type[T], data: bytes | Mapping[str, Any]) -> T:
    """The ``kind``, a dataclass, of this JSON or these fields, each of which is validated.

    Raises pydantic's ValidationError, which is a ValueError.
    """
    adapter = _adapter_of(kind)
    record: T = adapter.validate_json(data) if isinstance(data, bytes) else adapter.validate_python(data)
    return record


def dump_record(record: Any, exclude: set[str] | None = None) -> bytes:
    """The JSON of a dataclass, without the fields in ``exclude``."""
    return _adapter_of(type(record)).dump_json(record, exclude=exclude)


def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    # pydantic takes half the time of importing a job type, and a job on this machine needs it only while its gateway
    # starts.
    from pydantic import TypeAdapter  # noqa: PLC0415

    if (known := _adapters.get(kind)) is None:
        known = _adapters[kind] = TypeAdapter(kind)
    return known


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """One job. ``allocation`` is None if it was not running; ``own`` is what ``pickle_attributes`` returned."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic cannot evaluate a ClassVar on Python 3.10

    format: Literal[1] = 1
    kind: str  # module:qualname of the job's class
    apply_id: str | None = None
    spec: dict[str, Any]
    allocation: dict[str, Any] | None = None
    own: str | None = None

    def to_bytes(self) -> bytes:
        unused = {"own"} if self.own is None else None  # earlier releases do not know it
        return HEADER + dump_record(self, unused) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "this data") -> SavedJob:
        """Raises JobFileError on anything that ``to_bytes`` did not write. ``source`` names the data in errors."""
        if not data.startswith(HEADER):
            pickled = " but a pickle, perhaps of one of Monarch's own jobs; it was not loaded"
            raise JobFileError(f"{source} is not a saved meshgate job{pickled if data[:1] == PICKLE_HEADER else ''}")
        from pydantic import ValidationError  # noqa: PLC0415 - as in read_record

        try:
            return read_record(cls, data[len(HEADER) :])
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise JobFileError(
                f"cannot load the job in {source}: it is damaged or was saved by another version of meshgate "
                f"({f'{field}: ' if field else ''}{first['msg']})"
            ) from None

    def restore(self, kinds: Mapping[str, type[R]], base: Callable[[type[R]], type[R]], source: str) -> R:
        """The job, whose type is one of ``kinds`` and is saved by ``base`` of it. Raises JobFileError."""
        module = self.kind.partition(":")[0]
        if module.startswith("meshgate."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        kind = kinds.get(self.kind)
        if kind is None:
            raise JobFileError(f"cannot load the job in {source}: its type is {self.kind}; {_advise_import(module)}")
        damaged = f"cannot load the job in {source}: it is damaged or was saved by another version of meshgate"
        plain = base(kind)
        if (self.own is None) is not (plain is kind):
            raise JobFileError(
                f"{damaged} (own: a {kind.__name__} is saved {'with' if self.own is None else 'without'} it)"
            )
        try:
            job = plain._restore(self.spec, self.allocation)
        except (ValueError, TypeError, KeyError) as error:
            raise JobFileError(f"{damaged} ({error})") from error
        if self.own is not None:
            job.__class__ = kind
            _unpickle_attributes(job, self.own, source)
        return job


def _advise_import(module: str) -> str:
    if module == "__main__":
        return "only the program that defines it can load it. Move the class into a module to load it elsewhere"
    return f"import {module} first"


def pickle_attributes(job: Any, exclude: Container[str]) -> str:
    """The attributes of a job of a program's own type but ``exclude``, or what its ``__getstate__`` returns, in base64.

    Raises JobUnsupported if they cannot be pickled or are too large.
    """
    state = vars(job) if _has_default_state(job) else job.__getstate__()
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in exclude}
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, job).dump(state)
    except Exception as error:  # any code of the program can run here
        raise JobUnsupported(
            f"a {type(job).__name__} cannot be saved: its attributes cannot be pickled "
            f"({type(error).__name__}: {error}). Leave them out in __getstate__()"
        ) from error
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    if len(data) > SIZE_LIMIT // 2:
        raise JobUnsupported(
            f"a {type(job).__name__} cannot be saved: its attributes have {len(data)} bytes, and the limit is "
            f"{SIZE_LIMIT // 2}. Leave the large ones out in __getstate__()"
        )
    return data


def _unpickle_attributes(job: Any, data: str, source: str) -> None:
    try:
        state = _Unpickler(io.BytesIO(base64.b64decode(data)), job).load()
        if hasattr(job, "__setstate__"):
            job.__setstate__(state)
        else:
            vars(job).update(state)
    except Exception as error:  # any code of the program can run here
        raise JobFileError(
            f"cannot load the job in {source}: its attributes cannot be unpickled ({type(error).__name__}: {error})"
        ) from error


def _has_default_state(job: Any) -> bool:
    return getattr(type(job), "__getstate__", None) is getattr(object, "__getstate__", None)  # Python 3.10 has none


class _Pickler(pickle.Pickler):
    """Refers to the job whose attributes it pickles instead of pickling it again."""

    def __init__(self, file: io.BytesIO, job: Any) -> None:
        super().__init__(file)
        self._job = job

    def persistent_id(self, value: Any) -> str | None:
        return "job" if value is self._job else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, job: Any) -> None:
        super().__init__(file)
        self._job = job

    def persistent_load(self, name: str) -> Any:
        return self._job


def read_job_file(path: str) -> bytes:
    """The contents of a file that should hold a job; follows a symlink.

    Raises FileNotFoundError, and JobFileError if the file cannot be opened, belongs to another user, or holds a job and
    other users may access it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobFileError(f"cannot read the job in {path}: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise JobFileError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid != os.geteuid():
            raise JobFileError(f"refusing to load the job in {path}: the file belongs to user {status.st_uid}")
        if status.st_size > SIZE_LIMIT:
            raise JobFileError(f"{path} is not a saved meshgate job: it has {status.st_size} bytes")
        data = file.read(SIZE_LIMIT)
        if data.startswith(HEADER) and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise JobFileError(
                f"refusing to load the job in {path}: other users may read or write it "
                f"(mode {stat.S_IMODE(status.st_mode):o}), and it holds a token. If no one else has changed it, run "
                f"chmod 600 {path}"
            )
        return data


def holds_job(path: str) -> bool:
    """Whether a file that ``read_job_file`` or ``SavedJob`` rejects may be replaced by a job: it is this user's, and is
    empty, a damaged or exposed job, or a pickle, which Monarch's own jobs are."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        with open(path, "rb") as file:
            start = file.read(len(HEADER))
    except OSError:  # which read_job_file has reported
        return False
    return start in (b"", HEADER) or start.startswith(PICKLE_HEADER)


def write_job_file(path: str, data: bytes) -> None:
    """Replaces the file at ``path``, or the target if that is a symlink; creates its directory."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # as of a full disk
            error.filename = str(target)
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


class CachedJob(Protocol):
    _apply_id: str | None

    @property
    def active(self) -> bool: ...

    def can_run(self, spec: Any) -> bool: ...

    def _is_running(self) -> bool: ...

    def _kill(self) -> None: ...


J = TypeVar("J", bound=CachedJob)


def find_cached_job(path: str, load: Callable[[str], J], spec: J) -> J | None:
    """The job in the file if it is running and can run ``spec``; None otherwise.

    A job that is running with another specification is killed, and the file is removed. A job file that cannot be
    loaded, or a pickle, is kept under another name. Each of these issues a JobCacheWarning. Raises JobFileError if
    ``path`` is anything else, which is left alone, JobError if the job is one of another machine or container, and
    ConnectionFailedError if it cannot be found out whether it is still running.
    """
    try:
        job = load(path)
    except FileNotFoundError:
        return None
    except JobFileError as error:
        if not holds_job(path):
            raise JobFileError(f"{error}. Pass another cached_path to state()") from None
        backup = f"{os.path.realpath(path)}.replaced"
        os.replace(os.path.realpath(path), backup)
        warn_caller(f"{error}. Moving it to {backup} and starting a new job", JobCacheWarning)
        return None
    if not job.active:
        return None
    name = f"the {type(job).__name__} in {path}"
    try:
        if job.can_run(spec):
            return job
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"cannot tell whether {name} is still running: {error}. To start another job, pass another cached_path to "
            "state(), or remove the file; whatever is still running then ends after its idle timeout"
        ) from error
    if job._is_running():
        warn_caller(f"{name} has a different specification; replacing it", JobCacheWarning)
    else:
        warn_caller(f"{name} has ended; starting a new one", JobCacheWarning)
    try:
        job._kill()
    except Exception as error:  # noqa: BLE001 - the new job must start even if the old one cannot be ended
        warn_caller(
            f"cannot end {name}: {type(error).__name__}: {str(error).rstrip('.')}. Its processes or pods may still be "
            "running",
            JobCacheWarning,
        )
    remove_job_file(path, job._apply_id)
    return None


def find_running_job(path: str, load: Callable[[str], J], spec: J) -> J:
    """The running job in the file ``path`` that can run ``spec``. Changes nothing. Raises JobNotRunning."""
    try:
        job = load(path)
    except FileNotFoundError:
        raise JobNotRunning(f"{spec!r} is not running here, and there is no saved job in {path}") from None
    except JobFileError as error:
        raise JobNotRunning(f"{spec!r} is not running here: {error}") from error
    if not job.active or not job.can_run(spec):
        raise JobNotRunning(f"the job in {path} has ended, or has a different specification than {spec!r}")
    return job


def remove_job_file(path: str, apply_id: str | None) -> None:
    """Removes the file, not a symlink to it, if it still holds the allocation ``apply_id``."""
    with contextlib.suppress(OSError, JobFileError):
        if SavedJob.from_bytes(read_job_file(path)).apply_id == apply_id:
            os.unlink(os.path.realpath(path))

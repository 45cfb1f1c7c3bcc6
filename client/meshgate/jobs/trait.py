"""What every job is: a specification, and once it is applied, the machines that run it.

The names, the signatures and the rules are Monarch's: ``apply()`` once is enough, ``state()`` applies what has not
been applied and finds again what another process started, ``kill()`` twice is harmless. Two things are meshgate's:
a job is a context manager that kills on exit, and a saved job is no pickle (``saved.py`` says why).

A kind of job implements ``_create``, ``_state``, ``_kill`` and ``can_run``; to be saved, ``_spec``, ``_allocation``
and ``_restore`` too. It never sets ``_status``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from typing_extensions import Self

from meshgate.errors import JobCacheWarning, JobError, JobFileError, JobNotRunning, JobUnsupported
from meshgate.jobs.image import Image
from meshgate.jobs.saved import SavedJob, locked, read_job_file, write_job_file
from meshgate.jobs.state import JobState

if TYPE_CHECKING:
    from meshgate.code import SyncReport
    from meshgate.pull import Pulled

__all__ = ["DEFAULT_JOB_PATH", "JobTrait", "job_load", "job_loads"]

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"


@dataclass(frozen=True, slots=True)
class CachedRunning:
    """The status of a job that another process applied: ``job`` is what its file held."""

    job: JobTrait


Status: TypeAlias = Literal["running", "not_running"] | CachedRunning


class JobTrait(ABC):
    """A job: what is asked for, and, once it is applied, what was given.

    ``with`` binds it to the block: it is killed at the end, after an exception or a Ctrl-C as well, and, where the
    kind of job can do so, when this process is killed. Inside the block the default cache file is neither read
    nor written, so that two programs in one directory do not end each other's jobs.
    """

    _kinds: ClassVar[dict[str, type[JobTrait]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        JobTrait._kinds[_kind(cls)] = cls

    def __init__(self) -> None:
        super().__init__()
        self._status: Status = "not_running"
        self._apply_id: str | None = None
        self._lock = threading.RLock()  # one apply, state or kill at a time
        self._scoped = False
        self._attached: JobState | None = None  # what the present session has attached to
        self._images: dict[str, Image] = {}  # of each mesh; not saved: what is asked for now is what counts
        self._cache_file: str | None = None  # the one that state() wrote or found this job in

    # --- what a kind of job implements

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Makes the job exist. It cleans up after itself when it fails. ``self._apply_id`` is the new job's."""

    @abstractmethod
    def _state(self) -> JobState:
        """The host meshes of the running job."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends the job and all it has made, and waits until they are gone."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job, which was found in a file, still runs and is what ``spec`` asks for."""

    def _is_running(self) -> bool:
        """Whether what was applied is still there. Cheap: ``apply()`` and ``state()`` ask each time."""
        return self.can_run(self)

    def _spec(self) -> dict[str, Any]:
        """The specification as JSON."""
        raise JobError(f"a {type(self).__name__} cannot be saved")

    def _allocation(self) -> dict[str, Any] | None:
        """What another process needs to find the running job, as JSON; None where none can."""
        raise JobError(f"a {type(self).__name__} cannot be saved")

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        """The job that ``_spec`` and ``_allocation`` describe. Raises ValueError on anything else."""
        raise JobError(f"a {cls.__name__} cannot be loaded")

    def _outlive_driver(self) -> None:  # noqa: B027  (nothing to do where a job outlives it anyway)
        """Called when the running job has been saved: from now on it does not end with this process."""

    def _bring_code(self, running: JobTrait) -> None:  # noqa: B027  (nothing to do where code follows when told to)
        """Called by each ``state()`` when the job has a session: brings this driver's code to it, where this kind of
        job does so unasked. ``running``: the job that runs, this one or the one its file held."""

    # --- what a program uses

    def apply(self, client_script: str | None = None) -> None:
        """Brings the job into existence; does nothing when it exists.

        A job that has ended meanwhile, on its own or by someone else's hand, is made anew.
        """
        with self._lock:
            running = self._running
            if running is not None and not running._is_running():
                self.kill()
            if self._running is None:
                self._require_copied()
                self._apply_id = str(uuid.uuid4())
                self._create(client_script)
                self._status = "running"

    @property
    def apply_id(self) -> str | None:
        """A UUID of the present allocation, the same in every process that uses it; None when not applied."""
        running = self._running
        return None if running is None else running._apply_id

    @property
    def active(self) -> bool:
        """Whether the job has been applied and not killed, as far as this object knows."""
        return self._running is not None

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """The job's host meshes.

        A job that is not applied yet is looked for in the file ``cached_path`` first; if what is there still runs
        and ``can_run`` this one, that is the job. Otherwise this one is applied and saved there, and from then on
        outlives this process. With None no file is read or written. Steps of an image that the hosts have not run
        are run now; raises ImageStepFailed where one fails.
        """
        if self._scoped and cached_path == DEFAULT_JOB_PATH:
            cached_path = None
        with self._lock:
            running = self._running
            if running is None and cached_path is not None:
                running = self._find_or_save(cached_path)
            if running is None:
                self.apply()
                running = self
            state = running._state()
            self._bring_code(running)
            self._apply_images(state)
            return state

    def sync(
        self,
        *,
        watch: bool = False,
        sync_dirs: Sequence[str] | None = None,
        quiet: bool = False,
    ) -> SyncReport:
        """Brings the driver's code to every host, now; with ``watch`` also on every save from now on.

        The tree is the git root around the working directory or the script, or ``sync_dirs``. Processes that are
        spawned from now on run it; ``procs.reload()`` brings running ones to it. Returns when every host has it,
        with a line on the terminal unless ``quiet``. Raises StaleCodeError naming hosts that cannot get it,
        ValueError and meshgate_sync.errors.TreeError where there is no reasonable tree, JobNotRunning before
        ``state()``.
        """
        from meshgate.jobs.code import sync_of  # noqa: PLC0415 - only who syncs pays for it

        return sync_of(self._running or self, sync_dirs).now(watch=watch, quiet=quiet)

    def kill(self) -> None:
        """Ends the job, everywhere; does nothing when there is none."""
        with self._lock:
            running = self._running
            if running is None:
                return
            running._kill()
            running._attached = None
            if self._cache_file is not None:
                _forget(self._cache_file, running._apply_id)
                self._cache_file = None
            self._status = "not_running"

    def pull(
        self,
        remote: str,
        local: str | os.PathLike[str],
        ranks: Sequence[int] | int | None = None,
        mesh: str | None = None,
    ) -> Pulled:
        """Brings the file or directory ``remote`` from the job's hosts to ``local``, with a progress bar.

        ``mesh`` names whose hosts (default: the only mesh), ``ranks`` which of them (default: all). From one host
        the file or what the directory holds comes into ``local``, from several each into ``local/rank-<n>``. What is
        there already is not sent again, and a pull that was interrupted goes on where it stopped. Raises PullFailed,
        JobNotRunning before ``state()``, ValueError on a mesh or rank that is not there.
        """
        from meshgate.pull import pull  # noqa: PLC0415  (few programs pull)

        with self._lock:
            running = self._running
            if running is None:
                raise JobNotRunning(f"{self!r} is not running: there is nothing to pull from")
            meshes = running._state()._hosts
        if mesh is None and len(meshes) > 1:
            raise ValueError(f"pull(mesh=…): name one of the meshes {', '.join(sorted(meshes))}")
        if mesh is not None and mesh not in meshes:
            raise ValueError(f"pull(mesh={mesh!r}): the meshes are {', '.join(sorted(meshes))}")
        return pull(meshes[mesh or next(iter(meshes))], remote, local, ranks)

    def dump(self, filename: str) -> None:
        """Saves the job to a file, following a symlink there; makes the directory. The file holds the job's token."""
        write_job_file(filename, self._saved().to_bytes())
        self._detach()

    def dumps(self) -> bytes:
        """The job as bytes, for ``job_loads``. They hold the job's token."""
        data = self._saved().to_bytes()
        self._detach()
        return data

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **kwargs: Any,
    ) -> None:
        """Not in this release: raises JobUnsupported."""
        raise _unsupported(self, "remote_mount", "mounts are not in this release; code follows by itself")

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Not in this release: raises JobUnsupported."""
        raise _unsupported(self, "gather_mount", "bring files back by pull() instead")

    def enable_telemetry(self, config: Any = None, *, mesh_admin_config: Any = None, **kwargs: Any) -> Self:
        """Not in this release: raises JobUnsupported."""
        raise _unsupported(self, "enable_telemetry", "leave the call out")

    def enable_admin(self, config: Any = None, **kwargs: Any) -> Self:
        """Not in this release: raises JobUnsupported."""
        raise _unsupported(self, "enable_admin", "leave the call out")

    def __enter__(self) -> Self:
        self._scoped = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scoped = False
        self.kill()

    def __reduce__(self) -> tuple[Callable[[bytes], JobTrait], tuple[bytes]]:
        return job_loads, (self._saved().to_bytes(),)

    # --- how it is done

    def _require_copied(self) -> None:
        """Raises ValueError where a step is to copy what is not here, before hosts are made in vain."""
        for image in self._images.values():
            if image.live_steps:
                from meshgate.images.plan import require_sources  # noqa: PLC0415  (few jobs have steps)

                require_sources(image.live_steps)

    def _apply_images(self, state: JobState) -> None:
        for mesh, image in self._images.items():
            if image.live_steps:
                from meshgate.images.apply import apply_image  # noqa: PLC0415  (few jobs have steps)

                apply_image(getattr(state, mesh), mesh, image)

    @property
    def _running(self) -> JobTrait | None:
        """The job that runs: this one, the one its file held, or none."""
        match self._status:
            case "not_running":
                return None
            case "running":
                return self
            case CachedRunning(job):
                return job

    def _find_or_save(self, path: str) -> JobTrait:
        with locked(path):
            found = _load_cached(path, self)
            if found is None:
                self.apply()
                self.dump(path)
            else:
                self._status = CachedRunning(found)
            self._cache_file = path
        return found or self

    def _saved(self) -> SavedJob:
        job = self._running or self
        running = self._running is not None
        return SavedJob(
            kind=_kind(type(job)),
            apply_id=job._apply_id if running else None,
            spec=job._spec(),
            allocation=job._allocation() if running else None,
        )

    def _detach(self) -> None:
        running = self._running
        if running is not None and not self._scoped:
            running._outlive_driver()


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """The job that ``dump`` wrote to a file; it is active when that one was.

    Raises FileNotFoundError, and JobFileError when the file is no job of meshgate's, or not this user's alone.
    """
    return _from_bytes(read_job_file(filename), filename)


def job_loads(data: bytes) -> JobTrait:
    """The job that ``dumps`` wrote. Raises JobFileError on anything else, and runs nothing that ``data`` names."""
    return _from_bytes(data, "this data")


def _from_bytes(data: bytes, where: str) -> JobTrait:
    saved = SavedJob.from_bytes(data, where)
    module = saved.kind.partition(":")[0]
    if module.startswith("meshgate."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    kind = JobTrait._kinds.get(saved.kind)
    if kind is None:
        raise JobFileError(f"{where} holds a job of the kind {saved.kind}: import {module} first")
    try:
        job = kind._restore(saved.spec, saved.allocation)
    except (ValueError, TypeError, KeyError) as error:
        raise JobFileError(f"{where} is damaged, or another version of meshgate saved it: {error}") from error
    job._apply_id = saved.apply_id
    job._status = "not_running" if saved.allocation is None else "running"
    return job


def _kind(cls: type[JobTrait]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _load_cached(path: str, spec: JobTrait) -> JobTrait | None:
    """The job in the file, if it runs and can run ``spec``. One that cannot is ended, and the file is freed."""
    try:
        job = job_load(path)
    except FileNotFoundError:
        return None
    except JobFileError as error:
        aside = f"{os.path.realpath(path)}.replaced"
        os.replace(os.path.realpath(path), aside)
        _warn(f"{error}. It is kept as {aside}, and a new job is started")
        return None
    if not job.active:
        return None
    if job.can_run(spec):
        return job
    if job._is_running():
        _warn(f"the {type(job).__name__} in {path} is not what is asked for now; it is ended, and a new one started")
    else:
        _warn(f"the {type(job).__name__} in {path} has ended; a new one is started")
    try:
        job._kill()
    except Exception as error:  # noqa: BLE001  (whatever it is, the new job must not fail for the old one)
        _warn(f"ending the {type(job).__name__} in {path} failed: {type(error).__name__}: {error}")
    _forget(path, job._apply_id)
    return None


def _forget(path: str, apply_id: str | None) -> None:
    """Removes the file, not a symlink to it, if it still holds the allocation ``apply_id``."""
    with contextlib.suppress(OSError, JobFileError):
        if SavedJob.from_bytes(read_job_file(path)).apply_id == apply_id:
            os.unlink(os.path.realpath(path))


def _unsupported(job: JobTrait, method: str, instead: str) -> JobUnsupported:
    return JobUnsupported(f"{type(job).__name__}.{method}() is not supported yet: {instead}")


def _warn(message: str) -> None:
    warnings.warn(message, JobCacheWarning, stacklevel=5)

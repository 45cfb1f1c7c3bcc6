"""The base class of every job: a specification and, once it is applied, the machines that run it.

Names, signatures and rules are Monarch's: ``apply()`` is idempotent, ``state()`` applies a job that has not been
applied and finds one that another process started, and ``kill()`` may be called twice. meshgate adds two things: a job
is a context manager that kills on exit, and a saved job is not a pickle (see ``saved.py``).

A job type implements ``_create``, ``_dialer``, ``_mesh_sizes``, ``_state``, ``_kill`` and ``can_run``. It never sets
``_status``. The types of meshgate also implement ``_spec``, ``_allocation`` and ``_restore``, so that loading their
files runs nothing. The types of a program need not: their attributes are pickled, as Monarch pickles its jobs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from typing_extensions import Self

from meshgate.caller import note_wait, report_interrupt, warn_caller
from meshgate.errors import JobCacheWarning, JobError, JobNotRunning, JobUnsupported, MeshgateError
from meshgate.html import card
from meshgate.jobs.rank_access import RankAccess
from meshgate.jobs.run_access import RunAccess
from meshgate.jobs.saved import (
    DEFAULT_JOB_PATH,
    SavedJob,
    check_writable,
    find_cached_job,
    find_running_job,
    locked,
    pickle_attributes,
    read_job_file,
    remove_job_file,
    write_job_file,
)
from meshgate.jobs.sessions import SessionAccess
from meshgate.jobs.signals import catch_end_signals, restore_signals
from meshgate.jobs.state import JobState
from meshgate.mounts.on_job import Mounting
from meshgate.session.errors.faults import uninterrupted
from meshgate.suggestions import did_you_mean

if TYPE_CHECKING:
    from meshgate.code_sync.push import SyncReport
    from meshgate.images.image import Image
    from meshgate.proxies.client import Client
    from meshgate.session.dialing import Dialer
    from meshgate_wire.status import JoinableJob


@dataclass(frozen=True, slots=True)
class CachedRunning:
    """The status of a job that another process applied; ``job`` was loaded from its file, or is the submitted
    program's."""

    job: JobTrait


Status: TypeAlias = Literal["running", "not_running"] | CachedRunning


HOSTS_TIMEOUT = 600.0  # seconds in which a cluster replaces a lost host, a node included


class JobTrait(SessionAccess, RankAccess, RunAccess, Mounting, ABC):
    """A job.

    A ``with`` block kills the job at its end, also after an exception, Ctrl-C, SIGTERM or SIGHUP and, if the job type
    supports it, when this process is killed. A child that was forked in the block does not kill the job of its parent.
    Inside the block the default cache file is neither read nor written, so that two programs in one directory do not
    end each other's jobs, and a job that ``attach``, ``sessions`` or ``end_session`` has found by its name is left
    running. None of this applies to a detached job: the block leaves it running.
    """

    _kinds: ClassVar[dict[str, type[JobTrait]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        JobTrait._kinds[kind_of(cls)] = cls

    def __init__(self) -> None:
        super().__init__()
        self._status: Status = "not_running"
        self._apply_id: str | None = None
        self._lock = threading.RLock()  # serializes apply, state and kill
        self._scoped = False
        self._catches_signals = False
        self._owner = os.getpid()  # the process that may end the job at the end of a ``with`` block
        self._only_found = False  # by a name or in a file, without state(): a ``with`` block does not end it
        self._images: dict[str, Image] = {}  # by mesh; not saved, because each program brings its own
        self._cache_file: str | None = None  # the file that state() wrote or found this job in

    # --- implemented by job types

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Starts the job, with ``self._apply_id`` as its id. Cleans up if it fails."""

    @abstractmethod
    def _state(self) -> JobState:
        """The host meshes of the running job."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends the job and everything it created, and waits until it is gone."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job, loaded from a file, is still running and matches ``spec``."""

    def _is_running(self) -> bool:
        """Whether the applied job still exists. A type that implements it has ``apply()`` replace a job that has ended;
        ``apply()`` calls it each time, so it must be cheap."""
        return self.can_run(self)

    @property
    def _ends_when_killed(self) -> bool:
        """Whether ``_kill`` ends the job. It leaves one running that this program is part of, or cannot end."""
        return True

    def _spec(self) -> dict[str, Any]:
        """The specification as JSON."""
        raise JobUnsupported(f"a {type(self).__name__} cannot be saved: it does not implement _spec()")

    def _allocation(self) -> dict[str, Any] | None:
        """What another process needs to find the running job, as JSON; None if no other process can find it."""
        raise JobUnsupported(f"a {type(self).__name__} cannot be saved: it does not implement _allocation()")

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        """The job that ``_spec`` and ``_allocation`` describe. Raises ValueError on invalid data."""
        raise JobError(f"a {cls.__name__} cannot be loaded")

    def _dialer(self) -> Dialer:
        """The route to the running job's gateway."""
        raise JobUnsupported(f"{type(self).__name__} does not say how to reach its gateway")

    def _joinable(self) -> JoinableJob:
        from meshgate_wire.status import JoinableJob  # noqa: PLC0415 - few programs submit others

        return JoinableJob(kind=_base(type(self)).__name__)

    def _find_joined(self) -> JobTrait | None:
        """The running job, if this program was submitted to it. For job types; see ``joined.py``."""
        return None

    def _find_existing(self) -> bool:
        """Finds the running job without its file, as ``_create`` would leave it. Returns whether this job has what that
        takes. Raises JobNotRunning."""
        return False

    def _mesh_names(self) -> Collection[str] | None:
        """The names of the job's meshes; None if they are unknown before it runs."""
        return None

    def _outlive_driver(self) -> None:
        """Called when the running job has been saved: from now on it must not end with this process. Applies to jobs
        that this one keeps in attributes."""
        for value in vars(self).values():
            if isinstance(value, JobTrait) and value is not self:
                value._detach()

    def _push_code(self, running: JobTrait) -> None:
        """Called by each ``state()`` once the job has a session: pushes this driver's code if the job type syncs
        automatically. ``running`` is the running job: this one, or the one loaded from its file."""

    # --- public interface

    def apply(self, client_script: str | None = None) -> None:
        """Starts the job unless it is running. Starts a new one if it has ended."""
        with self._lock:
            self._use_joined()
            running = self._running
            if running is not None and running._has_ended():
                self.kill()
            if self._running is None:
                self._require_image_sources()
                self._apply_id = str(uuid.uuid4())
                self._create(client_script)
                self._status, self._only_found = "running", False
                self._owner = os.getpid()

    @property
    def apply_id(self) -> str | None:
        """The UUID of the current allocation, the same in every process that uses it; None if not applied."""
        running = self._running
        return None if running is None else running._apply_id

    @property
    def active(self) -> bool:
        """Whether the job has been applied and not killed, as far as this object knows."""
        return self._running is not None

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH, *, wait: bool | float = False) -> JobState:
        """The job's host meshes.

        Unless this job is applied, looks in the file ``cached_path`` for a running job that can run this one, and uses
        it; otherwise applies this job and saves it there, so that it outlives this process; warns if this type of job
        cannot be saved. With None, no file is read or written. Runs image steps that the hosts have not run yet; raises
        ImageStepFailed if one fails.

        With ``wait``, returns once every host is there, also those that replace lost ones: waits for so many seconds,
        or with True for ten minutes, and then raises TimeoutError. If a host will not return, raises why at once.
        """
        if self._ignores(cached_path):
            cached_path = None
        with self._lock:
            self._use_joined()
            running = self._running
            if running is None and cached_path is not None:
                running = self._find_or_save(cached_path)
            if running is None:
                self.apply()
                running = self
            if self._telemetry is not None:
                running._before_attaching = self._telemetry.start
            state = running._state()
            if wait:
                state._wait_for_hosts(HOSTS_TIMEOUT if wait is True else wait)
            self._push_code(running)
            self._apply_images(state)
            mounted = self._mount(running, state._hosts)
            return self._with_services(state if mounted is state._hosts else JobState(mounted))

    def sync(
        self,
        *,
        watch: bool = False,
        sync_dirs: Sequence[str] | None = None,
        quiet: bool = False,
    ) -> SyncReport:
        """Pushes the driver's code to every host; with ``watch``, also pushes on every later save.

        The synced tree is ``sync_dirs``, or the git root around the working directory or the script, or without git the
        directory of the program. Processes spawned afterwards run it; ``procs.reload()`` updates running ones. Returns
        when every host has the code, and prints a line unless ``quiet``. Raises StaleCodeError naming the hosts that
        cannot get it, SupervisionError if these were lost, StepFailedError if no hosts could be attached, ValueError or
        TreeError if the tree cannot be synced, and JobNotRunning before ``state()``.
        """
        from meshgate.code_sync.session_sync import sync_for  # noqa: PLC0415 - only drivers that sync pay for it

        return sync_for(self._open_client("sync()"), sync_dirs).push_and_wait(watch=watch, quiet=quiet)

    def scale(
        self, mesh: str, hosts: int, *, timeout: float | None = None, cached_path: str | None = DEFAULT_JOB_PATH
    ) -> None:
        """Changes the number of hosts of a mesh. Raises ``JobUnsupported``, unless this is a ``KubernetesJob``."""
        raise JobUnsupported(
            f"a {type(self).__name__} cannot be scaled: end it, and start a job whose mesh {mesh!r} has {hosts} hosts"
        )

    @property
    def client(self) -> Client:
        """The client of the job's session, which ``use_client`` takes in a program with several jobs.

        Raises JobNotRunning before ``state()``.
        """
        return self._open_client("client")

    def _open_client(self, wanted: str) -> Client:
        client = (self._running or self)._client
        if client is None or client.closed:
            raise JobNotRunning(f"{self!r} has no session: call state() before {wanted}")
        return client

    def kill(self) -> None:
        """Ends the job and everything it created. Does nothing if it is not running.

        A job that has a name in its cluster is found by it, also if this object has neither applied nor found it.
        """
        with self._lock:
            if self._apply_id is None:  # once apply() was called, a job of this name may be someone else's
                with contextlib.suppress(JobNotRunning):
                    self._use_existing()
            running = self._running
            if running is None:
                return
            try:
                self._close_services()
                self._unmount(running._reachable_hosts())
            finally:  # also after Ctrl-C
                if self._running is running:  # otherwise a signal handler has ended it meanwhile
                    running._kill()
                    running._attached = None
                    if self._cache_file is not None:
                        remove_job_file(self._cache_file, running._apply_id)
                        self._cache_file = None
                    self._status, self._only_found = "not_running", False

    def dump(self, filename: str) -> None:
        """Saves the job, including its token, to a file; follows a symlink and creates the directory."""
        write_job_file(filename, self._saved().to_bytes())
        self._detach()

    def dumps(self) -> bytes:
        """The job, including its token, as bytes for ``job_loads``."""
        data = self._saved().to_bytes()
        self._detach()
        return data

    def _repr_html_(self) -> str:
        """For notebooks: whether it runs, its session, and its host meshes as this process knows them."""
        running = self._running
        if running is None:
            return card(repr(self), {"state": "not applied"})
        client, attached = running._client, running._attached
        session = "none" if client is None else "ended" if client.closed else client.session_id[:8]
        meshes = [] if attached is None or session == "ended" else attached._hosts.values()
        facts = {"state": "applied", "id": running._apply_id or "", "session": session}
        return card(repr(self), facts, [hosts._repr_html_() for hosts in meshes])

    def __enter__(self) -> Self:
        self._scoped = not self._detached
        self._catches_signals = catch_end_signals()
        self._owner = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._owner == os.getpid():
                if self._detached:
                    if error is not None:
                        report_interrupt(error, "The detached session goes on: attach() takes it over", also=True)
                    self._leave()
                elif self._only_found:
                    self._leave()
                elif self._running is not None:
                    ends = f"Ending {self!r}; Ctrl-C again does not wait"
                    noted = error is not None and report_interrupt(error, ends, also=True)
                    try:
                        self._kill_unless_interrupted(noted)
                    except MeshgateError as unfinished:  # a line: the error that ends the block matters more
                        if error is None:
                            raise
                        sys.stderr.write(f"meshgate: {self!r} could not be ended: {unfinished}\n")
        finally:
            self._leave_block()

    def _leave_block(self) -> None:
        self._scoped = False
        if self._catches_signals:
            restore_signals()

    def _kill_unless_interrupted(self, noted: bool) -> None:
        """``noted``: a line has said that Ctrl-C ends the job, so that another Ctrl-C needs no traceback."""
        try:
            with uninterrupted():
                self.kill()
        except KeyboardInterrupt as again:
            if noted:
                vars(again).pop("_meshgate_waited_for", None)
                note_wait(again, f"while {self!r} was being ended")
                report_interrupt(again, self._unfinished_end)
            raise

    _unfinished_end: ClassVar[str] = "It may still run"

    if not TYPE_CHECKING:  # which reports this mistake itself

        def __getattr__(self, attr):
            if attr.startswith("_"):  # libraries ask for such names, and expect a quick answer
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}")
            if inspect.getattr_static(type(self), attr, None) is not None:  # a property that raised AttributeError
                return object.__getattribute__(self, attr)
            meshes = [*(self._mesh_names() or ())]
            if attr in meshes or attr in ("spawn", "spawn_procs"):
                wanted = attr if attr in meshes else f"{(*meshes, 'workers')[0]}.{attr}(...)"
                hint = f": write job.state().{wanted}"
            else:
                hint = did_you_mean(attr, dir(type(self)))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}{hint}", name=attr)

    _not_for_workers = (
        "a job cannot be sent to workers, because it contains the token of its gateway. Nothing was sent. Check if an "
        "argument, or code of your script that runs on workers, refers to the job, such as a global variable 'job'"
    )

    def __reduce__(self) -> tuple[Callable[[bytes], JobTrait], tuple[bytes]]:
        return job_loads, (self._saved().to_bytes(),)

    # --- internals

    def _require_image_sources(self) -> None:
        """Raises ValueError if a file or directory that a step copies does not exist, before any host is started."""
        for image in self._images.values():
            if image.live_steps:
                from meshgate.images.plan import require_sources  # noqa: PLC0415  (few jobs have steps)

                require_sources(image.live_steps)

    def _apply_images(self, state: JobState) -> None:
        for mesh, image in self._images.items():
            if image.live_steps:
                from meshgate.images.apply import apply_image  # noqa: PLC0415  (few jobs have steps)

                apply_image(getattr(state, mesh), mesh, image)

    def _leave(self) -> None:
        """Leaves the detached session, which continues, or ends another one; the job continues."""
        with self._lock:
            running = self._running
            if running is not None and (client := running._client) is not None:
                try:
                    self._close_services()
                    self._unmount({} if self._detached else running._reachable_hosts())
                finally:  # also after Ctrl-C
                    (client.leave if self._detached else client.close)()
                    running._client = running._attached = None

    def _find_running(self, path: str | None) -> JobTrait:
        """The running job, found as ``state`` finds it. Raises JobNotRunning."""
        if self._running is None:
            self._use_existing()
            if self._running is None and path is not None and not self._ignores(path):
                self._use_saved(find_running_job(path, job_load, self))
                self._cache_file = path
            self._only_found = self._running is not None
        running = self._running
        if running is None or not running._is_running():
            ignored = f" here: in a `with` block, the saved job in {path} is not looked for"
            hint = ignored if self._ignores(path) else ""
            raise JobNotRunning(f"{self!r} is not running{hint}")
        return running

    def _ignores(self, path: str | None) -> bool:
        """Whether no job is looked for in, or saved in, the file ``path``."""
        return self._scoped and path == DEFAULT_JOB_PATH

    def _use_saved(self, job: JobTrait) -> None:
        """``job`` does not know whether this program detaches its sessions."""
        job._detached = self._detached
        self._status = CachedRunning(job)

    def _use_existing(self) -> None:
        """Finds the running job without its file, if this type of job can. Raises JobNotRunning."""
        self._use_joined()
        if self._running is None and self._find_existing():
            self._apply_id, self._status = str(uuid.uuid4()), "running"

    def _use_joined(self) -> None:
        if self._running is None and (joined := self._find_joined()) is not None:
            self._use_saved(joined)

    @property
    def _running(self) -> JobTrait | None:
        """The running job: this one, the one loaded from its file, or None."""
        match self._status:
            case "not_running":
                return None
            case "running":
                return self
            case CachedRunning(job):
                return job._running  # none, once the job has ended itself, as one that fails to start does

    def _find_or_save(self, path: str) -> JobTrait:
        with locked(path):
            found = find_cached_job(path, job_load, self)
            if found is None:
                check_writable(path)
                self.apply()
                try:
                    self.dump(path)
                except JobUnsupported as error:
                    message = f"{error}. Other processes cannot find this job: pass cached_path=None to state()"
                    warn_caller(message, JobCacheWarning)
                    return self
            else:
                self._use_saved(found)
            self._cache_file = path
        return found or self

    def _has_ended(self) -> bool:
        """``can_run``, by which ``_is_running`` decides unless the type implements it, also returns False if a running
        job must not be reused."""
        return type(self)._is_running is not JobTrait._is_running and not self._is_running()

    def _saved(self) -> SavedJob:
        job = self._running or self
        running = self._running is not None
        base = _base(type(job))
        saved = SavedJob(
            kind=kind_of(type(job)),
            apply_id=job._apply_id if running else None,
            spec=base._spec(job),
            allocation=base._allocation(job) if running else None,
        )
        if base is type(job):
            return saved
        plain = base._restore(saved.spec, None)
        return replace(saved, own=pickle_attributes(job, exclude=vars(plain)))

    def _detach(self) -> None:
        running = self._running
        if running is not None and not self._scoped:
            running._outlive_driver()


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """The job that ``dump`` saved; it is active if the saved job was.

    Raises FileNotFoundError, and JobFileError if the file is not a saved job or other users may access it.
    """
    return _from_bytes(read_job_file(filename), filename)


def job_loads(data: bytes) -> JobTrait:
    """The job that ``dumps`` saved. Raises JobFileError on anything else.

    Runs nothing that ``data`` names, unless it is a job of a type that the program itself defines and has imported:
    its attributes are unpickled.
    """
    return _from_bytes(data, "this data")


def kind_of(cls: type[JobTrait]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


class _PlainJob(JobTrait):
    """What a job of a type that implements no ``_restore`` consists of besides its own attributes."""

    _create = _state = _kill = can_run = None  # type: ignore[assignment]

    def _spec(self) -> dict[str, Any]:
        return {}

    def _allocation(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        return cls()


def _base(kind: type[JobTrait]) -> type[JobTrait]:
    """The type whose ``_spec``, ``_allocation`` and ``_restore`` save a job of type ``kind``.

    It is ``kind`` itself, or, for a type of a program that implements no ``_restore``, the one that it extends. The
    attributes that ``kind`` adds are then pickled.
    """
    if kind.__module__.startswith("meshgate."):
        return kind
    base: type[JobTrait] = next(cls for cls in kind.__mro__ if "_restore" in vars(cls))
    return _PlainJob if base is JobTrait else base


def _from_bytes(data: bytes, source: str) -> JobTrait:
    saved = SavedJob.from_bytes(data, source)
    job = saved.restore(JobTrait._kinds, _base, source)
    job._apply_id = saved.apply_id
    job._status = "not_running" if saved.allocation is None else "running"
    return job

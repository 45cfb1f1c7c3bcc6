"""What jobs on clusters have in common: their session, the driver's code, and their end with the driver.

If the driver is killed in a ``with`` block, a child process of it ends the job. The child holds the reading end of a
pipe whose other end only the driver has, and which the kernel closes however the driver ends. Until then it is a bare
interpreter that waits. It runs in its own session, so that a Ctrl-C in the terminal, or its end, does not reach it. It
does not survive what kills a whole container or machine; for that, jobs have an idle timeout.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import Self

from meshgate.code_sync.project import driver_import_paths
from meshgate.errors import JobNotRunning, MeshgateError
from meshgate.jobs import registry
from meshgate.jobs.saved import SavedJob
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_loads, kind_of

# The last line names the job to end; an empty one, none. The line contains a token, so it is passed on by a pipe.
_WAIT = """\
import os, sys
lines = sys.stdin.buffer.read().split(b"\\n")
if len(lines) < 2 or not lines[-2]:
    sys.exit()
reading, writing = os.pipe()
os.write(writing, lines[-2])
os.close(writing)
os.dup2(reading, 0)
os.execv(sys.executable, [sys.executable, "-c", "from meshgate.jobs import cluster_job; cluster_job.end_bound_job()"])
"""
MAX_LINE = 1 << 15  # fits into a pipe

_pipes: set[int] = set()
ATTEMPTS = 8
"""With doubling delays: about four minutes without a network."""


class Running(Protocol):
    """What the driver knows of a running job, and saves."""

    @property
    def meshes(self) -> Mapping[str, int]: ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


RunningT = TypeVar("RunningT", bound=Running)


class ClusterJob(JobTrait, Generic[RunningT]):
    """A job on machines of a cluster, which ends with a ``with`` block even if its process is killed there."""

    def __init__(self, sync_dirs: Sequence[str] | None, *, watch: bool) -> None:
        super().__init__()
        self._sync_dirs, self._watch = self._check_directories(sync_dirs), watch
        self._job: RunningT | None = None
        self._reaper: Reaper | None = None  # in a ``with`` block

    @classmethod
    def _check_directories(cls, sync_dirs: Any) -> list[str] | None:
        """Raises ValueError or TypeError before anything is created on the cluster."""
        if sync_dirs is None:
            return None
        if isinstance(sync_dirs, (str, bytes, Mapping)) or not isinstance(sync_dirs, Iterable):
            raise TypeError(f"{cls.__name__}(sync_dirs={sync_dirs!r}): expected a list, such as sync_dirs=[…]")
        paths = [os.fspath(path) for path in sync_dirs]
        if missing := [path for path in paths if not os.path.isdir(os.path.expanduser(path))]:
            raise ValueError(f"{cls.__name__}(sync_dirs=…): {missing[0]!r} is not a directory on this machine")
        return paths

    # --- implemented by job types

    @abstractmethod
    def _end(self, job: RunningT) -> None:
        """Ends the job on the cluster, and waits until it is gone."""

    @abstractmethod
    def _spec_for_reaper(self) -> tuple[type[JobTrait], dict[str, Any]]:
        """The job type and its specification. Not a subclass: the reaper may not be able to import it."""

    # --- implementation of JobTrait

    def __enter__(self) -> Self:
        super().__enter__()
        if self._job is not None:
            self._bind_if_scoped(self._job)
        return self

    def _bind_if_scoped(self, job: RunningT) -> None:
        """In a ``with`` block, lets a reaper end the job if this process is killed."""
        if self._scoped:
            self._reaper = self._reaper or Reaper(str(self._apply_id))
            kind, spec = self._spec_for_reaper()
            allocation = job.model_dump(mode="json")
            saved = SavedJob(kind=kind_of(kind), apply_id=self._apply_id, spec=spec, allocation=allocation)
            self._reaper.bind(saved.to_bytes())

    def _outlive_driver(self) -> None:
        if self._reaper is not None:
            self._reaper.release()
            self._reaper = None

    def _require_job(self) -> RunningT:
        if self._job is None:
            raise JobNotRunning(f"{self!r} is not running")
        return self._job

    def _state(self) -> JobState:
        return self._attach_meshes(self._require_job().meshes)

    def _mesh_sizes(self) -> Mapping[str, int]:
        return self._job.meshes if self._job is not None else {}

    def _push_code(self, running: JobTrait) -> None:
        from meshgate.code_sync.session_sync import push_automatically  # noqa: PLC0415 - only drivers that sync need it

        assert running._client is not None
        push_automatically(running._client, self._sync_dirs, watch=self._watch)

    def _kill(self) -> None:
        try:
            if self._client is not None:
                self._client.close()
                self._client = None
        finally:  # a second Ctrl-C, while the session closes, must not leave the job running
            if self._job is not None:
                self._end(self._job)
                self._job = None
            self._outlive_driver()

    def _allocation(self) -> dict[str, Any]:
        return self._require_job().model_dump(mode="json")


def _close_in_forked_child() -> None:
    for descriptor in _pipes:  # a forked child would keep the pipe open after this process has ended
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _pipes.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


class Reaper:
    """Ends the job of ``bind`` when this process ends, unless ``release`` was called before."""

    def __init__(self, apply_id: str) -> None:
        """Starts the child. Its log, in the directory of the registry, remains only if it cannot end the job."""
        self._apply_id = apply_id
        reading, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(driver_import_paths())}
        try:
            with registry.log_file(apply_id).open("ab") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-S", "-c", _WAIT],
                    stdin=reading,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._close()
            registry.unregister(apply_id)
            raise
        finally:
            os.close(reading)

    def bind(self, saved_job: bytes) -> None:
        """From now on the child ends this job. ``saved_job`` needs no more than what ``kill`` needs."""
        line = base64.b64encode(saved_job) + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"the job has {len(line)} bytes, more than the {MAX_LINE} that a reaper can take")
        self._write(line)

    def release(self) -> None:
        """The job has ended, or is to outlive this process: ends the child. May be called again."""
        if self._pipe in _pipes:
            self._write(b"\n")
            self._close()
            self._child.wait()
            registry.unregister(self._apply_id)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone has killed the child
            os.write(self._pipe, line)

    def _close(self) -> None:
        if self._pipe in _pipes:  # not in a forked child
            _pipes.discard(self._pipe)
            os.close(self._pipe)


def end_bound_job() -> None:
    """What the child becomes once the driver has gone: ends the job that it reads from its standard input."""
    end_job(base64.b64decode(sys.stdin.buffer.read()))


def end_job(saved_job: bytes) -> None:
    """Raises MeshgateError if the job still cannot be ended after several attempts."""
    job = job_loads(saved_job)
    apply_id = job.apply_id
    for attempt in range(ATTEMPTS):
        try:
            job.kill()
            break
        except MeshgateError as error:
            if attempt == ATTEMPTS - 1:
                raise
            print(f"attempt {attempt + 1} of {ATTEMPTS}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
            time.sleep(2**attempt)
    if apply_id is not None:
        registry.unregister(apply_id)

"""The job in a cache file: found and reused by ``state()``, replaced with a warning if it cannot be used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from meshgate.caller import warn_caller
from meshgate.errors import ConnectionFailedError, JobCacheWarning, JobFileError, JobNotRunning
from meshgate.jobs.saved import SavedJob, holds_job, read_job_file


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
            f"cannot end {name}: {type(error).__name__}: {error}. Its processes or pods may still be running",
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

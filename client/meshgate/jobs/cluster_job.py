"""What jobs on clusters have in common: their session, the driver's code, and their end with the driver."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import Self

from meshgate.errors import JobNotRunning
from meshgate.jobs.reaper import Reaper
from meshgate.jobs.saved import SavedJob
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, kind_of


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
        self._sync_dirs, self._watch = sync_dirs, watch
        self._job: RunningT | None = None
        self._reaper: Reaper | None = None  # in a ``with`` block

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

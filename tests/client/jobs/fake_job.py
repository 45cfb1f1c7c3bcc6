"""A job whose allocations are names in a set."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait

RUNNING: set[str] = set()  # the existing allocations, as a scheduler would know them


class FakeJob(JobTrait):
    def __init__(self, size: int, fail: BaseException | None = None) -> None:
        super().__init__()
        self.size = size
        self.fail = fail
        self.allocation: str | None = None
        self.outlives_driver = False

    def _create(self, client_script: str | None) -> None:
        if self.fail:
            raise self.fail
        self.allocation = str(self._apply_id)
        RUNNING.add(self.allocation)

    def _state(self) -> JobState:
        return JobState({"workers": (self.size, self.allocation)})  # type: ignore[dict-item]

    def _kill(self) -> None:
        RUNNING.discard(str(self.allocation))

    def _is_running(self) -> bool:
        return self.allocation in RUNNING

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, FakeJob) and spec.size == self.size and self._is_running()

    def _outlive_driver(self) -> None:
        self.outlives_driver = True

    def _spec(self) -> dict[str, Any]:
        return {"size": self.size}

    def _allocation(self) -> dict[str, Any]:
        return {"name": self.allocation}

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls(**spec)
        job.allocation = allocation["name"] if allocation else None
        return job

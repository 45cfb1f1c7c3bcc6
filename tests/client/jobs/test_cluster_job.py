"""A job on a cluster ends with its ``with`` block, whatever happens while it ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import JobNotRunning
from meshgate.jobs import cluster_job
from meshgate.jobs.cluster_job import ClusterJob
from meshgate.jobs.saved import SavedJob
from meshgate.jobs.trait import JobTrait, kind_of


class Allocation:
    meshes: Mapping[str, int] = {"workers": 2}

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return {"id": 12}


class Job(ClusterJob[Allocation]):
    def __init__(self) -> None:
        super().__init__(None, watch=False)
        self.ended: list[Allocation] = []

    def __repr__(self) -> str:
        return "Job()"

    def _create(self, client_script: str | None) -> None:
        self._job = Allocation()
        self._bind_if_scoped(self._job)

    def _end(self, job: Allocation) -> None:
        self.ended.append(job)

    def _spec_for_reaper(self) -> tuple[type[JobTrait], dict[str, Any]]:
        return Job, {"nodes": 2}

    def can_run(self, spec: JobTrait) -> bool:
        return self._job is not None


class RecordedReaper:
    def __init__(self, apply_id: str) -> None:
        self.bound: list[bytes] = []
        self.released = False

    def bind(self, saved: bytes) -> None:
        self.bound.append(saved)

    def release(self) -> None:
        self.released = True


@pytest.fixture
def reapers(monkeypatch: pytest.MonkeyPatch) -> list[RecordedReaper]:
    started: list[RecordedReaper] = []

    def start(apply_id: str) -> RecordedReaper:
        started.append(RecordedReaper(apply_id))
        return started[-1]

    monkeypatch.setattr(cluster_job, "Reaper", start)
    return started


def test_a_reaper_can_end_the_job_of_a_block_until_the_block_has(reapers: list[RecordedReaper]) -> None:
    job = Job()
    with job:
        job.apply()
        (reaper,) = reapers
        saved = SavedJob.from_bytes(reaper.bound[-1], "the reaper's line")
        assert (saved.kind, saved.spec, saved.allocation) == (kind_of(Job), {"nodes": 2}, {"id": 12})
        assert not reaper.released
    assert reaper.released
    assert len(job.ended) == 1


def test_a_job_that_was_applied_before_its_block_is_bound_by_it(reapers: list[RecordedReaper]) -> None:
    job = Job()
    job.apply()
    assert not reapers
    with job:
        assert reapers[0].bound


def test_a_detached_job_has_no_reaper(reapers: list[RecordedReaper]) -> None:
    job = Job()
    job._detached = True
    with job:
        job.apply()
    assert not reapers
    assert not job.ended


def test_an_interrupt_while_the_session_closes_still_ends_the_job() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    job = Job()
    job.apply()
    job._client = SimpleNamespace(close=interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        job.kill()
    assert len(job.ended) == 1


def test_the_state_of_a_job_that_was_not_applied_is_refused() -> None:
    with pytest.raises(JobNotRunning, match=r"Job\(\) is not running"):
        Job()._state()

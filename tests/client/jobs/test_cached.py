"""What ``state()`` does with the job in its cache file."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest

from meshgate.errors import JobCacheWarning, JobFileError
from meshgate.jobs.cached import find_cached_job, remove_job_file
from meshgate.jobs.trait import job_load
from tests.client.jobs.fake_job import RUNNING, FakeJob


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUNNING.clear()


def test_a_running_job_with_the_same_specification_is_found_without_a_warning(path: str) -> None:
    first, second = FakeJob(1), FakeJob(1)
    first.state(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.state(path).workers == (1, first.apply_id)
    assert second.active
    assert second.apply_id == first.apply_id
    assert len(RUNNING) == 1


def test_a_found_job_can_be_killed(path: str) -> None:
    first, second = FakeJob(1), FakeJob(1)
    first.state(path)
    second.state(path)
    second.kill()
    assert set() == RUNNING
    assert not second.active
    assert not os.path.exists(path)


def test_a_job_with_a_different_specification_is_ended_and_replaced_with_a_warning(path: str) -> None:
    FakeJob(1).state(path)
    job = FakeJob(2)
    with pytest.warns(JobCacheWarning, match="has a different specification; replacing it"):
        job.state(path)
    assert {job.apply_id} == RUNNING
    assert job_load(path).apply_id == job.apply_id


def test_a_job_that_has_ended_is_replaced_with_a_warning(path: str) -> None:
    FakeJob(1).state(path)
    RUNNING.clear()
    job = FakeJob(1)
    with pytest.warns(JobCacheWarning, match="has ended; starting a new one"):
        job.state(path)
    assert job_load(path).apply_id == job.apply_id


def test_a_foreign_file_is_kept_as_a_backup_and_replaced_with_a_warning(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(foreign := pickle.dumps({"a": 1}))
    Path(path).chmod(0o600)
    job = FakeJob(1)
    with pytest.warns(JobCacheWarning, match=r"it was not loaded. Moving it to .*\.replaced and starting a new job"):
        job.state(path)
    assert Path(f"{path}.replaced").read_bytes() == foreign
    assert job_load(path).apply_id == job.apply_id


def test_a_warning_points_at_the_program(path: str) -> None:
    FakeJob(1).state(path)
    RUNNING.clear()
    with pytest.warns(JobCacheWarning) as warned:
        FakeJob(1).state(path)
    assert warned[0].filename == __file__


def test_an_old_job_that_cannot_be_ended_does_not_stop_the_new_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeJob(1).state(path)

    def fail(self: FakeJob) -> None:
        raise ConnectionError("unreachable")

    monkeypatch.setattr(FakeJob, "_kill", fail)
    job = FakeJob(2)
    with pytest.warns(JobCacheWarning) as warned:
        job.state(path)
    message = str(warned[-1].message)
    assert message.startswith(f"cannot end the FakeJob in {path}: ConnectionError: unreachable.")
    assert job.active


def test_a_saved_job_that_was_never_applied_is_ignored(path: str) -> None:
    FakeJob(1).dump(path)
    assert find_cached_job(path, job_load, FakeJob(1)) is None
    job = FakeJob(1)
    job.state(path)
    assert job_load(path).apply_id == job.apply_id


def test_a_file_that_holds_another_allocation_is_not_removed(path: str) -> None:
    job = FakeJob(1)
    job.state(path)
    remove_job_file(path, "another")
    assert os.path.exists(path)
    remove_job_file(path, job.apply_id)
    assert not os.path.exists(path)


@pytest.mark.parametrize("path", ["/proc/job.pkl", "/proc/jobs/job.pkl"])
def test_a_job_that_cannot_be_saved_is_not_started(path: str) -> None:
    with pytest.raises(JobFileError, match=r"the job cannot be saved in /proc.*cached_path=None"):
        FakeJob(1).state(path)
    assert set() == RUNNING

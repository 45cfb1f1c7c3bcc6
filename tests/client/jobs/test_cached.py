"""What ``state()`` does with the job in its cache file."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest

from meshgate.errors import ConnectionFailedError, JobCacheWarning, JobError, JobFileError
from meshgate.jobs.cached import find_cached_job, remove_job_file
from meshgate.jobs.find import find_job
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.saved import SavedJob, write_job_file
from meshgate.jobs.this_machine.local_gateway import GatewayRecord
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


def test_a_file_that_never_was_a_job_is_neither_moved_nor_replaced(tmp_path: Path) -> None:
    notes, directory, private = tmp_path / "notes", tmp_path / "directory", tmp_path / "private"
    notes.write_text("of the user")
    directory.mkdir()
    private.write_text("of the user")
    private.chmod(0o600)
    for path in (notes, directory, private):
        with pytest.raises(JobFileError, match="Pass another cached_path"):
            FakeJob(1).state(str(path))
    assert sorted(os.listdir(tmp_path)) == ["directory", "notes", "private"]
    assert set() == RUNNING


def test_the_job_of_another_machine_is_neither_ended_nor_replaced(path: str, tmp_path: Path) -> None:
    """The directory may be shared, and seems to be that of a gateway that has ended."""
    (temporary := tmp_path / "temporary").mkdir()
    record = GatewayRecord(
        apply_id="1234", url="ws://127.0.0.1:1", token="", pid=1, started="login2:0/boot/1/5", directory=str(temporary)
    )
    kind = "meshgate.jobs.process:ProcessJob"
    saved = SavedJob(kind=kind, apply_id="1234", spec={"meshes": {"workers": 1}}, allocation=record.model_dump())
    write_job_file(path, saved.to_bytes())
    for use in (lambda: ProcessJob({"workers": 1}).state(path), lambda: job_load(path), lambda: find_job(path)):
        with pytest.raises(JobError, match="job 1234 was started on login2, which is another machine or container"):
            use()
    assert Path(path).read_bytes() == saved.to_bytes()
    assert temporary.exists()


def test_a_job_that_does_not_answer_is_not_replaced_and_the_error_says_how_to_go_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeJob(1).state(path)

    def fail(self: FakeJob) -> bool:
        raise ConnectionFailedError("the login node is down")

    monkeypatch.setattr(FakeJob, "_is_running", fail)
    with pytest.raises(ConnectionFailedError, match=r"FakeJob in .* is still running: the login node.*remove the file"):
        FakeJob(1).state(path)
    assert job_load(path).apply_id in RUNNING


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

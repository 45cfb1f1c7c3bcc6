"""The rules that every kind of job follows, shown on one whose machines are a set of names."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from meshgate import Image
from meshgate.errors import JobCacheWarning, JobFileError, JobUnsupported
from meshgate.jobs import JobState, JobTrait, job_load, job_loads

RUNNING: set[str] = set()  # the allocations there are, as a scheduler would know them


class ListedJob(JobTrait):
    def __init__(self, size: int, fail: BaseException | None = None) -> None:
        super().__init__()
        self.size = size
        self.fail = fail
        self.allocation: str | None = None
        self.outlives = False

    def _create(self, client_script: str | None) -> None:
        if self.fail:
            raise self.fail
        self.allocation = str(self._apply_id)
        RUNNING.add(self.allocation)

    def _state(self) -> JobState:
        return JobState({"workers": (self.size, self.allocation)})

    def _kill(self) -> None:
        RUNNING.discard(str(self.allocation))

    def _is_running(self) -> bool:
        return self.allocation in RUNNING

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, ListedJob) and spec.size == self.size and self._is_running()

    def _outlive_driver(self) -> None:
        self.outlives = True

    def _spec(self) -> dict[str, Any]:
        return {"size": self.size}

    def _allocation(self) -> dict[str, Any]:
        return {"name": self.allocation}

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls(**spec)
        job.allocation = allocation["name"] if allocation else None
        return job


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUNNING.clear()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cache" / "job.pkl")


def test_a_new_job_is_not_active() -> None:
    job = ListedJob(1)
    assert (job.active, job.apply_id) == (False, None)


def test_apply_once_is_enough() -> None:
    job = ListedJob(1)
    job.apply()
    first = job.apply_id
    job.apply()
    assert job.active
    assert job.apply_id == first is not None
    assert len(RUNNING) == 1


def test_apply_makes_a_job_anew_that_has_ended() -> None:
    job = ListedJob(1)
    job.apply()
    first = job.apply_id
    RUNNING.clear()
    job.apply()
    assert job.apply_id != first
    assert {job.apply_id} == RUNNING


def test_a_failed_apply_leaves_the_job_not_active() -> None:
    job = ListedJob(1, fail=OSError("no machines"))
    with pytest.raises(OSError, match="no machines"):
        job.apply()
    assert (job.active, job.apply_id) == (False, None)


def test_what_is_not_there_to_be_copied_is_told_before_the_job_is_made(tmp_path: Path) -> None:
    for image in (Image().copy(tmp_path / "absent"), Image().sync_package(tmp_path / "absent")):
        job = ListedJob(2)
        job._images = {"workers": image}
        with pytest.raises(ValueError, match=f"{tmp_path}/absent"):
            job.apply()
        assert not job.active
        assert not RUNNING


def test_state_applies_and_saves_under_monarchs_name() -> None:
    job = ListedJob(1)
    assert job.state().workers == (1, job.apply_id)
    assert Path(".monarch/job_state.pkl").stat().st_mode & 0o777 == 0o600
    assert job.outlives


def test_state_without_a_path_saves_nothing() -> None:
    job = ListedJob(1)
    job.state(cached_path=None)
    assert os.listdir() == []
    assert not job.outlives


def test_state_after_apply_saves_nothing() -> None:
    job = ListedJob(1)
    job.apply()
    job.state()
    assert os.listdir() == []


def test_state_finds_the_job_that_another_object_started(path: str) -> None:
    first, second = ListedJob(1), ListedJob(1)
    first.state(path)
    assert second.state(path).workers == (1, first.apply_id)
    assert second.active
    assert second.apply_id == first.apply_id
    assert len(RUNNING) == 1


def test_the_finder_may_kill_it(path: str) -> None:
    first, second = ListedJob(1), ListedJob(1)
    first.state(path)
    second.state(path)
    second.kill()
    assert set() == RUNNING
    assert not second.active
    assert not os.path.exists(path)


def test_a_job_of_another_spec_is_ended_and_replaced_with_a_warning(path: str) -> None:
    ListedJob(1).state(path)
    job = ListedJob(2)
    with pytest.warns(JobCacheWarning, match="not what is asked for now"):
        job.state(path)
    assert {job.apply_id} == RUNNING
    assert job_load(path).apply_id == job.apply_id


def test_a_stale_file_is_replaced_with_a_warning(path: str) -> None:
    ListedJob(1).state(path)
    RUNNING.clear()
    job = ListedJob(1)
    with pytest.warns(JobCacheWarning, match="has ended"):
        job.state(path)
    assert job_load(path).apply_id == job.apply_id


def test_a_foreign_file_is_kept_aside_and_replaced_with_a_warning(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(foreign := pickle.dumps({"a": 1}))
    Path(path).chmod(0o600)
    job = ListedJob(1)
    with pytest.warns(JobCacheWarning, match="nothing in it was run"):
        job.state(path)
    assert Path(f"{path}.replaced").read_bytes() == foreign
    assert job_load(path).apply_id == job.apply_id


def test_a_warning_points_at_the_program(path: str) -> None:
    ListedJob(1).state(path)
    RUNNING.clear()
    with pytest.warns(JobCacheWarning) as warned:
        ListedJob(1).state(path)
    assert warned[0].filename == __file__


def test_an_old_job_that_cannot_be_ended_does_not_stop_the_new_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ListedJob(1).state(path)

    def refuse(self: ListedJob) -> None:
        raise ConnectionError("no way there")

    monkeypatch.setattr(ListedJob, "_kill", refuse)
    job = ListedJob(2)
    with pytest.warns(JobCacheWarning) as warned:
        job.state(path)
    assert "no way there" in str(warned[-1].message)
    assert job.active


def test_a_saved_spec_that_was_never_applied_is_no_job_to_find(path: str) -> None:
    ListedJob(1).dump(path)
    assert not job_load(path).active
    job = ListedJob(1)
    job.state(path)
    assert job_load(path).apply_id == job.apply_id


def test_kill_twice_is_harmless() -> None:
    job = ListedJob(1)
    job.apply()
    job.kill()
    job.kill()
    assert (job.active, RUNNING) == (False, set())


def test_kill_before_apply_is_harmless() -> None:
    ListedJob(1).kill()


def test_kill_leaves_the_file_of_a_job_that_came_after(path: str) -> None:
    first, second = ListedJob(1), ListedJob(2)
    first.state(path)
    second.apply()
    second.dump(path)
    first.kill()
    assert job_load(path).apply_id == second.apply_id


def test_kill_leaves_what_dump_wrote(path: str) -> None:
    job = ListedJob(1)
    job.apply()
    job.dump(path)
    job.kill()
    assert os.path.exists(path)


def test_with_kills_at_the_end() -> None:
    with ListedJob(1) as job:
        job.state()
        assert len(RUNNING) == 1
    assert not job.active
    assert set() == RUNNING


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_with_kills_after_an_error_and_lets_it_pass(error: BaseException) -> None:
    def program() -> None:
        with ListedJob(1) as job:
            job.state()
            raise error

    with pytest.raises(type(error)):
        program()
    assert set() == RUNNING


def test_within_with_the_default_file_is_not_touched() -> None:
    outside = ListedJob(1)
    outside.state()
    with ListedJob(1) as inside:
        inside.state()
        assert inside.apply_id != outside.apply_id
    assert {outside.apply_id} == RUNNING
    assert job_load().apply_id == outside.apply_id


def test_within_with_a_saved_job_still_ends_with_the_driver(path: str) -> None:
    with ListedJob(1) as job:
        job.state(path)
        assert job_load(path).apply_id == job.apply_id
        assert not job.outlives
    assert not os.path.exists(path)


def test_dump_follows_a_symlink(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "context" / "state.pkl"
    link.symlink_to(target)
    ListedJob(3).dump(str(link))
    assert link.is_symlink()
    assert job_load(str(target))._spec() == {"size": 3}


def test_bytes_and_pickles_round_trip_with_the_allocation() -> None:
    job = ListedJob(1)
    job.apply()
    for copy in (job_loads(job.dumps()), pickle.loads(pickle.dumps(job))):
        assert isinstance(copy, ListedJob)
        assert copy.active
        assert copy.apply_id == job.apply_id
        assert copy.can_run(job)


def test_a_kind_of_job_that_was_not_imported_is_named() -> None:
    data = ListedJob(1).dumps().replace(b":ListedJob", b":LostJob")
    with pytest.raises(JobFileError, match=r"LostJob: import .*test_trait first"):
        job_loads(data)


def test_a_spec_that_its_kind_refuses_is_a_damaged_file() -> None:
    with pytest.raises(JobFileError, match="damaged"):
        job_loads(ListedJob(1).dumps().replace(b'"size"', b'"sizes"'))


def test_a_missing_file_is_told_as_such() -> None:
    with pytest.raises(FileNotFoundError):
        job_load()


def test_what_is_not_in_this_release_says_so() -> None:
    job = ListedJob(1)
    for call in (
        lambda: job.remote_mount("/data"),
        lambda: job.gather_mount("/there", "/here"),
        job.enable_telemetry,
        job.enable_admin,
    ):
        with pytest.raises(JobUnsupported, match="not supported yet") as raised:
            call()
        assert isinstance(raised.value, NotImplementedError)


def test_a_job_that_is_found_says_nothing(path: str) -> None:
    ListedJob(1).state(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ListedJob(1).state(path)

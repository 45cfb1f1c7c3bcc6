"""The rules that every job type follows."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshgate import Image, ProcessJob, TelemetryConfig
from meshgate.errors import InvalidRequestError, JobCacheWarning, JobFileError, JobNotRunning
from meshgate.jobs.trait import JobTrait, job_load, job_loads
from meshgate.serialization.pickling import dump_class, dumps
from tests.client.jobs.fake_job import RUNNING, FakeJob


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUNNING.clear()


def test_a_new_job_is_not_active() -> None:
    job = FakeJob(1)
    assert (job.active, job.apply_id) == (False, None)


def test_apply_is_idempotent() -> None:
    job = FakeJob(1)
    job.apply()
    first = job.apply_id
    job.apply()
    assert job.active
    assert job.apply_id == first is not None
    assert len(RUNNING) == 1


def test_apply_starts_a_job_that_has_ended_again() -> None:
    job = FakeJob(1)
    job.apply()
    first = job.apply_id
    RUNNING.clear()
    job.apply()
    assert job.apply_id != first
    assert {job.apply_id} == RUNNING


def test_a_failed_apply_leaves_the_job_inactive() -> None:
    job = FakeJob(1, fail=OSError("no machines"))
    with pytest.raises(OSError, match="no machines"):
        job.apply()
    assert (job.active, job.apply_id) == (False, None)


def test_a_missing_image_source_is_reported_before_the_job_starts(tmp_path: Path) -> None:
    for image in (Image().copy(tmp_path / "absent"), Image().sync_package(tmp_path / "absent")):
        job = FakeJob(2)
        job._images = {"workers": image}
        with pytest.raises(ValueError, match=f"{tmp_path}/absent"):
            job.apply()
        assert not job.active
        assert not RUNNING


def test_state_applies_and_saves_under_monarchs_default_path() -> None:
    job = FakeJob(1)
    assert job.state().workers == (1, job.apply_id)
    assert Path(".monarch/job_state.pkl").stat().st_mode & 0o777 == 0o600
    assert job.outlives_driver


def test_state_without_a_path_saves_nothing() -> None:
    job = FakeJob(1)
    job.state(cached_path=None)
    assert os.listdir() == []
    assert not job.outlives_driver


def test_state_after_apply_saves_nothing() -> None:
    job = FakeJob(1)
    job.apply()
    job.state()
    assert os.listdir() == []


def test_kill_is_idempotent() -> None:
    job = FakeJob(1)
    job.kill()
    job.apply()
    job.kill()
    job.kill()
    assert (job.active, RUNNING) == (False, set())


def test_kill_leaves_the_file_of_a_later_job(path: str) -> None:
    first, second = FakeJob(1), FakeJob(2)
    first.state(path)
    second.apply()
    second.dump(path)
    first.kill()
    assert job_load(path).apply_id == second.apply_id


def test_kill_leaves_a_dumped_file(path: str) -> None:
    job = FakeJob(1)
    job.apply()
    job.dump(path)
    job.kill()
    assert os.path.exists(path)


def test_a_with_block_kills_at_its_end() -> None:
    with FakeJob(1) as job:
        job.state()
        assert len(RUNNING) == 1
    assert not job.active
    assert set() == RUNNING


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_a_with_block_kills_after_an_error_and_propagates_it(error: BaseException) -> None:
    def program() -> None:
        with FakeJob(1) as job:
            job.state()
            raise error

    with pytest.raises(type(error)):
        program()
    assert set() == RUNNING


def runs_after_with_block_in_child(job: FakeJob) -> bool:
    """Forks in ``with job``, leaves the block in the child, and returns whether the job runs there afterwards."""
    receiver, sender = os.pipe()
    with job:
        job.apply()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return os.read(receiver, 1) == b"1"
    if not child:
        try:
            os.write(sender, b"%d" % job._is_running())
        finally:
            os._exit(0)
    raise AssertionError("the parent returns in the block")


def test_a_child_forked_in_a_with_block_does_not_kill_the_job_of_its_parent() -> None:
    job = FakeJob(1)
    assert runs_after_with_block_in_child(job)
    assert not RUNNING  # the parent has left the block, too


def test_a_forked_child_ends_the_job_that_it_has_applied() -> None:
    job = FakeJob(1)
    with job:
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            try:
                job.apply()
                job.__exit__(None, None, None)
                os.write(sender, b"%d" % len(RUNNING))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(receiver, 1) == b"0"


def test_a_with_block_ignores_the_default_file() -> None:
    outside = FakeJob(1)
    outside.state()
    with FakeJob(1) as inside:
        inside.state()
        assert inside.apply_id != outside.apply_id
    assert {outside.apply_id} == RUNNING
    assert job_load().apply_id == outside.apply_id


def test_a_job_saved_in_a_with_block_still_ends_with_the_driver(path: str) -> None:
    with FakeJob(1) as job:
        job.state(path)
        assert job_load(path).apply_id == job.apply_id
        assert not job.outlives_driver
    assert not os.path.exists(path)


def test_dump_follows_a_symlink(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "context" / "state.pkl"
    link.symlink_to(target)
    FakeJob(3).dump(str(link))
    assert link.is_symlink()
    assert job_load(str(target))._spec() == {"size": 3}


def test_bytes_and_pickles_round_trip_with_the_allocation() -> None:
    job = FakeJob(1)
    job.apply()
    for copy in (job_loads(job.dumps()), pickle.loads(pickle.dumps(job))):
        assert isinstance(copy, FakeJob)
        assert copy.active
        assert copy.apply_id == job.apply_id
        assert copy.can_run(job)


def test_a_job_type_that_is_not_imported_is_named() -> None:
    data = FakeJob(1).dumps().replace(b":FakeJob", b":LostJob")
    with pytest.raises(JobFileError, match=r"its type is .*fake_job:LostJob; import .*fake_job first"):
        job_loads(data)


def test_a_specification_that_its_type_rejects_is_a_damaged_file() -> None:
    with pytest.raises(JobFileError, match="cannot load the job in this data: it is damaged or was saved by another"):
        job_loads(FakeJob(1).dumps().replace(b'"size"', b'"sizes"'))


def test_loading_a_missing_file_raises_file_not_found() -> None:
    with pytest.raises(FileNotFoundError):
        job_load()


def test_sync_and_pull_need_a_running_job(tmp_path: Path) -> None:
    job = FakeJob(1)
    with pytest.raises(JobNotRunning, match=r"it has no session. Call state\(\) before sync\(\)"):
        job.sync()
    with pytest.raises(JobNotRunning, match=r"it is not running. Call state\(\) before pull\(\)"):
        job.pull("/data", tmp_path)


@pytest.mark.parametrize("mesh", [None, "others"])
def test_pull_needs_the_name_of_one_of_several_meshes(tmp_path: Path, mesh: str | None) -> None:
    job = FakeJob(1)
    state = job.state(cached_path=None)
    state._hosts["readers"] = state._hosts["workers"]
    job._state = lambda: state  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="readers, workers"):
        job.pull("/data", tmp_path, mesh=mesh)


def test_telemetry_is_started_before_hosts_are_attached_and_left_by_kill() -> None:
    calls: list[str] = []
    telemetry: Any = type(
        "Telemetry", (), {"config": TelemetryConfig(include_dashboard=True), "url": "http://127.0.0.1:1"}
    )()
    telemetry.start = calls.append
    telemetry.query_client = lambda: "client"
    telemetry.close = lambda: calls.append("close")
    job = FakeJob(1).enable_telemetry(include_dashboard=True)
    assert job._admin is not None
    job._admin, job._telemetry = None, telemetry
    state = job.state(cached_path=None)
    assert (state.query_engine_client, state.telemetry_url) == ("client", "http://127.0.0.1:1")
    assert state.dashboard_url == state.telemetry_url
    job.kill()
    assert job._before_attaching == telemetry.start
    assert calls == ["close"]


def test_an_admin_server_is_started_by_state_and_left_by_kill() -> None:
    calls: list[str] = []
    server: Any = type("Server", (), {})()
    server.url = lambda hosts: calls.append("url") or "http://127.0.0.1:1"
    server.close = lambda: calls.append("close")
    job = FakeJob(1).enable_admin(admin_addr="127.0.0.1:0")
    job._admin = server
    assert job.state(cached_path=None).admin_url == "http://127.0.0.1:1"
    job.kill()
    assert calls == ["url", "close"]


class UnsavedJob(FakeJob):
    """As a program writes one: without what saving needs."""

    _spec = JobTrait._spec


def test_a_job_type_that_cannot_be_saved_starts_with_a_warning(tmp_path: Path) -> None:
    job = UnsavedJob(2)
    with pytest.warns(JobCacheWarning, match="UnsavedJob cannot be saved.*pass cached_path=None"):
        state = job.state(str(tmp_path / "job"))
    assert job.active
    assert not (tmp_path / "job").exists()
    assert (state.query_engine, state.admin_url) == (None, None)
    job.kill()
    assert not job.active


def test_a_job_is_not_sent_to_workers_even_as_a_global_of_code_that_is() -> None:
    job = ProcessJob({"workers": 1})
    program = """
class Trainer:
    def step(self):
        return job.state()
"""
    names: dict[str, Any] = {"job": job, "__name__": "__main__"}
    exec(program, names)
    with pytest.raises(InvalidRequestError, match="a job cannot be sent to workers, because it contains the token"):
        dump_class(names["Trainer"], by_value=True)
    with pytest.raises(InvalidRequestError, match="a job cannot be sent to workers"):
        dumps([job])

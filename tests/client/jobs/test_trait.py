"""The rules that every job type follows."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import monarch.job
import pytest

from meshgate import Image, ProcessJob, TelemetryConfig
from meshgate.caller import note_wait, report_interrupt
from meshgate.errors import (
    InvalidRequestError,
    JobCacheWarning,
    JobError,
    JobFileError,
    JobNotRunning,
    JobStartFailed,
    JobUnsupported,
)
from meshgate.jobs import trait
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_load, job_loads, kind_of
from meshgate.serialization.pickling import dump_class, dumps
from tests.client.jobs.fake_job import RUNNING, FakeJob


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


class NamedJob(FakeJob):
    """A job that can be found by its name, which is its size."""

    def _find_existing(self) -> bool:
        self.allocation = f"named {self.size}"
        if self.allocation not in RUNNING:
            raise JobNotRunning(f"there is no job {self.size}")
        return True


def test_a_new_object_kills_the_running_job_of_its_name() -> None:
    RUNNING.update({"named 1", "named 2"})
    NamedJob(1).kill()
    assert {"named 2"} == RUNNING
    NamedJob(1).kill()  # there is none any more
    NamedJob(2).kill()
    assert set() == RUNNING


def test_a_job_of_the_same_name_outlives_an_apply_that_failed_and_a_block_that_did_not_use_it() -> None:
    RUNNING.add("named 1")
    job = NamedJob(1, fail=JobStartFailed("a different job has this name"))
    with pytest.raises(JobStartFailed):
        job.apply()
    job.kill()
    with NamedJob(1):
        pass
    with pytest.raises(JobStartFailed), NamedJob(1, fail=JobStartFailed("the same")) as job:
        job.apply()
    assert {"named 1"} == RUNNING


@pytest.mark.parametrize(
    "look",
    [
        lambda job: job.attach("nihgt"),
        lambda job: job.sessions(),
        lambda job: job.end_session("nihgt"),
        lambda job: (job._find_running(None), job.state()),
    ],
)
def test_a_with_block_leaves_a_job_that_it_has_only_looked_up(look: Callable[[Any], object]) -> None:
    RUNNING.add("named 1")
    with NamedJob(1) as job, contextlib.suppress(JobUnsupported):  # it has no gateway
        look(job)
    assert job.active
    assert {"named 1"} == RUNNING
    job.kill()
    with job:
        job.state()
    assert not job.active  # it was this program's


def test_a_with_block_ends_its_session_with_a_job_that_it_has_only_looked_up() -> None:
    RUNNING.add("named 1")
    session: Any = SimpleNamespace(closed=False, close=lambda: setattr(session, "closed", True))
    with NamedJob(1) as job:
        job._find_running(None)
        job._client = session
    assert session.closed
    assert job._client is None
    assert {"named 1"} == RUNNING


def test_the_default_file_is_not_looked_up_in_a_with_block(path: str) -> None:
    FakeJob(1).state()
    with FakeJob(1) as job:
        assert job.sessions() == []
        with pytest.raises(JobNotRunning, match=r"in a `with` block, the saved job in .monarch/job_state.pkl is not"):
            job.attach()
        assert not job.active
        with pytest.raises(JobNotRunning, match="there is no saved job"):
            job.attach(cached_path=path)


def test_a_job_found_in_its_file_has_sessions_as_this_program_wants_them() -> None:
    FakeJob(1).state()
    for find in (FakeJob.state, lambda job: job._find_running(DEFAULT_JOB_PATH)):
        job = FakeJob(1)
        job._detached = "night"
        find(job)
        assert job._running is not job
        assert job._running._detached == "night"


def test_a_job_found_in_its_file_that_ends_itself_is_started_again(path: str) -> None:
    FakeJob(1).state(path)
    job = FakeJob(1)
    job.state(path)
    found = job._running
    assert found is not None
    found.kill()  # as a job does whose workers do not come
    assert not job.active
    with pytest.warns(JobCacheWarning, match="has ended; starting a new one"):
        job.state(path)
    assert {job.apply_id} == RUNNING != {found.apply_id}


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


def test_a_job_that_a_with_block_cannot_end_after_an_error_is_a_line_and_not_a_second_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(job: FakeJob) -> NoReturn:
        raise JobError("the login node did not answer")

    def program(error: BaseException | None) -> None:
        with FakeJob(1) as job:
            job.state()
            if error is not None:
                raise error

    monkeypatch.setattr(FakeJob, "_kill", fail)
    with pytest.raises(ValueError, match="first") as caught:
        program(ValueError("first"))
    assert caught.value.__context__ is None
    assert "meshgate: <" in (said := capsys.readouterr().err)
    assert said.endswith("could not be ended: the login node did not answer\n")
    with pytest.raises(JobError, match="the login node did not answer"):
        program(None)


def interrupted(job: JobTrait, reported: str = "") -> KeyboardInterrupt:
    """What Ctrl-C in ``get()`` raises out of the ``with`` block of ``job``."""
    error = KeyboardInterrupt()
    note_wait(error, "while waiting for trainers.step: 1 of 4 ranks answered")
    if reported:
        report_interrupt(error, reported)

    def program() -> None:
        with job:
            job.state()
            raise error

    with pytest.raises(KeyboardInterrupt) as caught:
        program()
    return caught.value


def test_ctrl_c_in_a_with_block_says_what_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(1)
    error = interrupted(job)
    line = "\nmeshgate: interrupted while waiting for trainers.step: 1 of 4 ranks answered. "
    assert capsys.readouterr().err == f"{line}Ending {job!r}; Ctrl-C again does not wait\n"
    assert report_interrupt(error, "The program ends")
    assert capsys.readouterr().err == ""  # once
    detached = FakeJob(1)
    detached._detached = True
    interrupted(detached)
    assert capsys.readouterr().err == f"{line}The detached session goes on: attach() takes it over\n"
    detached.kill()


def test_ctrl_c_in_a_with_block_of_a_notebook_says_what_it_ended_too(capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(1)
    interrupted(job, "The call is cancelled")
    call, ending = capsys.readouterr().err.splitlines()[1:]
    assert call.endswith("1 of 4 ranks answered. The call is cancelled")
    assert ending == f"meshgate: Ending {job!r}; Ctrl-C again does not wait"


def test_another_ctrl_c_while_the_job_ends_needs_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(FakeJob):
        def _kill(self) -> None:
            super()._kill()
            again = KeyboardInterrupt()
            note_wait(again, "while waiting for session.close: ...")
            raise again

    job = Slow(1)
    again = interrupted(job)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"meshgate: interrupted while {job!r} was being ended. It may still run"
    assert report_interrupt(again, "The program ends")
    assert capsys.readouterr().err == ""


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
    with pytest.raises(JobNotRunning, match=r"has no session: call state\(\) before sync\(\)"):
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


def test_telemetry_that_cannot_be_read_is_the_error_of_monarchs_type_and_says_what_to_call() -> None:
    job = FakeJob(1)
    with pytest.raises(RuntimeError, match=r"Call state\(\) before telemetry_query_client\(\)"):
        job.telemetry_query_client()
    job.apply()
    with pytest.raises(RuntimeError, match=r"no distributed telemetry configured. Call enable_telemetry\(\), and then"):
        job.telemetry_query_client()
    job.enable_telemetry()
    with pytest.raises(RuntimeError, match=r"telemetry is not active. Call state\(\) before profile\(\)"):
        job.profile()
    RUNNING.clear()
    with pytest.raises(RuntimeError, match=r"no longer running or healthy. Call state\(\) to start it again"):
        job.telemetry_query_client()


def test_the_telemetry_of_a_job_that_says_it_cannot_run_is_not_asked_for_unless_it_is_active() -> None:
    job = OwnJob("workers", reusable=False).enable_telemetry()
    job.apply()
    with pytest.raises(RuntimeError, match="no longer running or healthy"):
        job.telemetry_query_client()
    telemetry: Any = type("Telemetry", (), {"started": True, "query_client": lambda self: "client"})()
    job._telemetry = telemetry
    assert job.telemetry_query_client() == "client"


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


def test_configurations_of_monarchs_are_taken_and_checked_as_ours() -> None:
    admin: Any = monarch.job.MeshAdminConfig("0.0.0.0:1729")
    telemetry: Any = monarch.job.TelemetryConfig(retention_secs=5)
    job = FakeJob(1).enable_telemetry(telemetry)
    assert job._telemetry is not None
    assert job._telemetry.config == TelemetryConfig(retention_secs=5)
    with pytest.raises(ValueError, match=r"admin_addr='0\.0\.0\.0:1729': expected 127\.0\.0\.1:PORT"):
        job.enable_telemetry(telemetry, mesh_admin_config=admin)
    with pytest.raises(TypeError, match="expected a TelemetryConfig, not 'yes'"):
        job.enable_telemetry("yes")  # type: ignore[arg-type]


class OwnJob(JobTrait):
    """As a program writes one: Monarch asks for these four methods and pickles the rest."""

    def __init__(self, *names: str, reusable: bool = True) -> None:
        self.names = names  # before JobTrait's own attributes exist
        super().__init__()
        self.reusable = reusable
        self.created = 0
        self.latest: JobTrait = self

    def _create(self, client_script: str | None) -> None:
        self.created += 1

    def _state(self) -> JobState:
        return JobState(dict.fromkeys(self.names, self._apply_id))  # type: ignore[arg-type]

    def _kill(self) -> None:
        self.created = 0

    def can_run(self, spec: JobTrait) -> bool:
        return self.reusable and isinstance(spec, OwnJob)


class OwnExtendedJob(ProcessJob):
    def __init__(self, hosts: int) -> None:
        super().__init__({"workers": hosts}, idle_timeout=7.0)
        self.hosts = hosts


class OwnStateJob(OwnJob):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "names": ("from_getstate",)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, reusable=False)


class WithProperty(FakeJob):
    @property
    def owner(self) -> str:
        return self.no_such_thing  # type: ignore[attr-defined,no-any-return]


def test_a_wrong_attribute_is_answered_with_the_closest_and_private_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job: Any = WithProperty(1)
    with pytest.raises(
        AttributeError, match=r"'WithProperty' object has no attribute 'sate'\. Did you mean 'state'\?$"
    ):
        job.sate()
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_thing'$"):
        job.owner  # noqa: B018
    monkeypatch.setattr(trait, "did_you_mean", None)  # which would be called
    assert not hasattr(job, "_repr_svg_")
    assert not hasattr(WithProperty.__new__(WithProperty), "_request")  # half-made


def test_a_job_type_of_the_program_is_saved_with_its_attributes(path: str) -> None:
    job = OwnJob("trainers", "readers")
    state = job.state(path)
    found = OwnJob()
    assert found.state(path).readers == state.readers == job.apply_id
    assert found.created == 0
    for copy in (job_load(path), job_loads(job.dumps()), pickle.loads(pickle.dumps(job))):
        assert isinstance(copy, OwnJob)
        assert (copy.active, copy.apply_id, copy.names, copy.created) == (True, job.apply_id, job.names, 1)
        assert copy.latest is copy
        copy.kill()
        assert not copy.active
    assert not OwnJob("x")._saved().restore(JobTrait._kinds, trait._base, "").active


def test_a_job_type_of_the_program_that_extends_ours_keeps_both_parts() -> None:
    copy = job_loads(OwnExtendedJob(3).dumps())
    assert isinstance(copy, OwnExtendedJob)
    assert copy.hosts == 3
    assert copy._request == OwnExtendedJob(3)._request
    assert not copy.active


def test_getstate_and_setstate_of_a_job_type_are_used() -> None:
    job = OwnStateJob("a")
    job.apply()
    copy = job_loads(job.dumps())
    assert isinstance(copy, OwnStateJob)
    assert (copy.names, copy.reusable, copy.apply_id) == (("from_getstate",), False, job.apply_id)


def test_jobs_that_a_saved_job_keeps_are_saved_and_outlive_the_driver(path: str) -> None:
    job = OwnJob("a")
    job.latest = inner = FakeJob(2)
    inner.apply()
    job.state(path)
    assert inner.outlives_driver
    copy = job_load(path)
    assert isinstance(copy, OwnJob)
    assert copy.latest.apply_id == inner.apply_id


def test_apply_does_not_replace_a_job_because_it_must_not_be_reused() -> None:
    job = OwnJob("a", reusable=False)
    job.apply()
    first = job.apply_id
    job.apply()
    assert (job.apply_id, job.created) == (first, 1)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [(threading.Lock(), "cannot be pickled .TypeError: .*lock"), (bytes(1 << 20), "have 1398.* bytes")],
    ids=["lock", "large"],
)
def test_a_job_type_whose_attributes_cannot_be_saved_starts_with_a_warning(
    path: str, attribute: object, reason: str
) -> None:
    job = OwnJob("a")
    job.opened = attribute  # type: ignore[attr-defined]
    message = f"OwnJob cannot be saved: its attributes {reason}.*__getstate__.*pass cached_path=None"
    with pytest.warns(JobCacheWarning, match=message):
        state = job.state(path)
    assert job.active
    assert not os.path.exists(path)
    assert (state.query_engine, state.admin_url) == (None, None)
    job.kill()
    assert not job.active


def test_pickled_attributes_are_read_for_types_of_the_program_only(monkeypatch: pytest.MonkeyPatch) -> None:
    job = OwnJob("a")
    job.bomb = Bomb()  # type: ignore[attr-defined]
    data = job.dumps()
    own = kind_of(OwnJob).encode()
    for ours in (b"meshgate.jobs.process:ProcessJob", b"meshgate.jobs.trait:_PlainJob"):
        with pytest.raises(JobFileError):
            job_loads(data.replace(own, ours))
    monkeypatch.delitem(JobTrait._kinds, kind_of(OwnJob))
    with pytest.raises(JobFileError, match=f"import {OwnJob.__module__} first"):
        job_loads(data)
    with pytest.raises(JobFileError, match="only the program that defines it can load it"):
        job_loads(data.replace(own, b"__main__:OwnJob"))
    assert not os.path.exists("unpickled")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_attributes_that_cannot_be_unpickled_are_named_with_the_file() -> None:
    job = OwnJob("a")
    job.bomb = Bomb()  # type: ignore[attr-defined]
    os.mkdir("unpickled")
    with pytest.raises(JobFileError, match=r"this data: its attributes cannot be unpickled \(FileExistsError"):
        job_loads(job.dumps())


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


def test_a_job_of_another_type_than_kubernetes_cannot_be_scaled() -> None:
    with pytest.raises(
        JobUnsupported, match="a FakeJob cannot be scaled: end it, and start a job whose mesh 'workers'"
    ):
        FakeJob(1).scale("workers", 2)

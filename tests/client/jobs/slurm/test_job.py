"""Wrong arguments are refused by name before any connection is made; what the user sees while a job waits."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from meshgate import SlurmJob, job_loads
from meshgate.errors import ConnectionFailedError, GatewayLostError, JobError, JobNotRunning, JobStartFailed
from meshgate.jobs import cluster_job
from meshgate.jobs.slurm import login_node
from meshgate.jobs.slurm.access import Known, SlurmSilent
from meshgate.jobs.slurm.job import (
    Live,
    Plain,
    Silent,
    build_spec,
    choose_progress,
    describe,
    second_interrupt,
    wait_for_workers,
)
from meshgate.jobs.slurm.login_node import SshLogin
from meshgate.progress import new_console
from meshgate_slurm.messages import JOB_FILE, JobReport, RunningSlurmJob, StartRequest


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"time_limit": "soon"}, r"SlurmJob\(time_limit='soon'\): not a time of Slurm's"),
        ({"meshes": {"workers": 0}}, r"SlurmJob\(meshes\['workers'\]=0\)"),
        ({"exclusive": False, "monarch_port": 22222}, "SlurmJob: monarch_port=22222 with exclusive=False"),
        ({"env": {"MY VARIABLE": "secret"}}, r"SlurmJob\(env\): 'MY VARIABLE' is not the name of a variable"),
        ({"login": "-oProxyCommand=evil"}, "expected a destination of ssh"),
        ({"login": "a b"}, "expected a destination of ssh"),
        ({"out_of_cluster": True}, "out_of_cluster=True.*pass login= instead"),
        ({"attach_to": "tcp://n1:22222"}, "attach_to=.*pass login= instead"),
        ({"bind_to": "0.0.0.0"}, "bind_to=.*remove the argument"),
        ({"job_start_timeout": 0}, "job_start_timeout=0"),
        ({"sync_dirs": [__file__]}, "is not a directory"),
    ],
)
def test_each_error_names_its_argument(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SlurmJob(**{"meshes": {"workers": 1}, **arguments})


@pytest.mark.parametrize("argument", ["slurm_args", "sync_dirs"])
def test_one_text_is_not_a_list(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}='--x'.*expected a list"):
        SlurmJob({"workers": 1}, **{argument: "--x"})  # type: ignore[arg-type]


def test_meshes_that_are_not_numbers_by_name_are_rejected() -> None:
    with pytest.raises(
        TypeError, match=r"^SlurmJob: meshes=2: expected the number of nodes of each, such as \{'workers'"
    ):
        SlurmJob(2)  # type: ignore[arg-type]


def test_an_argument_of_none_has_its_default() -> None:
    assert build_spec({"meshes": {"workers": 1}, "mem": None, "lease": None}).idle_timeout == 1800


def test_meshes_can_be_added_and_nodes_shared() -> None:
    job = SlurmJob({})
    job.add_mesh("trainers", 2)
    job.add_mesh("data", 1)
    job.share_node(tasks_per_node=2, gpus_per_task=1, partition="gpu")
    spec = build_spec(job._arguments)
    assert (spec.meshes, spec.gpus_per_node, spec.exclusive, spec.share) == ({"trainers": 2, "data": 1}, 2, False, True)
    with pytest.raises(ValueError, match="meshes"):
        job.add_mesh("data", 0)


def test_a_job_that_is_not_running_can_be_saved(tmp_path: Path) -> None:
    job = SlurmJob(
        {"workers": 2}, login="me@login", partition="gpu", job_start_timeout=5, slurm_args=["--constraint=x"]
    )
    again = job_loads(job.dumps())
    assert isinstance(again, SlurmJob)
    assert repr(again) == "SlurmJob({'workers': 2}, login='me@login')"
    assert build_spec(again._arguments) == build_spec(job._arguments)
    assert not again.active


class RecordedAccess:
    """A cluster that takes every job."""

    queue_interval = 1.0

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.error: BaseException | None = None

    def start(self, request: StartRequest, known: Known) -> None:
        self.running.add(7)
        job = RunningSlurmJob(
            apply_id=request.apply_id, job_id=7, host="login", directory="/d", socket="/s", pid=1, started="1",
            token="t", meshes=request.spec.meshes, log_dir="/l",
        )  # fmt: skip
        known(job)
        if self.error is not None:
            raise self.error

    def end(self, job: RunningSlurmJob) -> None:
        self.running.remove(job.job_id)

    def close(self) -> None:
        return None


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> RecordedAccess:
    recorded = RecordedAccess()
    monkeypatch.setattr(SlurmJob, "_find_access", lambda job: recorded)
    return recorded


def job_of(number: int, cluster: str = "a", **arguments: Any) -> SlurmJob:
    job = SlurmJob({"workers": 2}, **arguments)
    job._job, job._apply_id, job._status = running(number, cluster), "0123abcd", "running"
    return job


def running(number: int, cluster: str) -> RunningSlurmJob:
    return RunningSlurmJob(
        apply_id="0123abcd", job_id=number, cluster=cluster, host="login", directory="/d", socket="/s", pid=1,
        started="1", token="t", meshes={"workers": 2}, log_dir="/l",
    )  # fmt: skip


@pytest.fixture
def in_job_7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs as the client of batch job 7 of cluster a."""
    (tmp_path / "job.json").write_text(running(7, "a").model_dump_json())
    monkeypatch.setenv(JOB_FILE, str(tmp_path / "job.json"))


@pytest.mark.usefixtures("in_job_7")
def test_a_program_in_a_job_ends_other_jobs_but_not_its_own(access: RecordedAccess) -> None:
    for number, cluster, ends in ((7, "a", False), (8, "a", True), (7, "b", True)):
        access.running = {number}
        job = job_of(number, cluster, login="me@login")
        assert job._ends_when_killed is ends
        job.kill()
        assert bool(access.running) is not ends


@pytest.mark.usefixtures("in_job_7")
def test_a_program_in_a_job_reaches_other_jobs_by_their_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_node, "TEMPORARY", str(tmp_path))
    monkeypatch.setattr(SshLogin, "_ensure", lambda login: None)
    monkeypatch.setenv("MESHGATE_TOKEN", "t")
    here = str(job_of(7)._find_access())
    for arguments in ({"login": "me@login"}, {"gateway_url": "wss://gateway"}):
        assert str(job_of(7, **arguments)._find_access()) == here
        for number, cluster in ((8, "a"), (7, "b")):
            assert str(job_of(number, cluster, **arguments)._find_access()) != here


class RecordedReaper:
    bound: bytes = b""

    def __init__(self, apply_id: str) -> None:
        pass

    def bind(self, saved: bytes) -> None:
        type(self).bound = saved

    def release(self) -> None:
        return None


def test_a_large_environment_of_the_workers_does_not_reach_the_reaper(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_job, "Reaper", RecordedReaper)
    with SlurmJob({"workers": 2}, env={"LARGE": "x" * cluster_job.MAX_LINE}, login="me@login") as job:
        job.apply()
        assert access.running == {7}
        assert len(RecordedReaper.bound) < 2000
        bound = job_loads(RecordedReaper.bound)
    assert isinstance(bound, SlurmJob)
    assert (bound.job_id, bound._login_name) == (7, "me@login")


@pytest.mark.parametrize("error", [OSError("too many open files"), KeyboardInterrupt()])
def test_a_job_that_no_reaper_takes_is_cancelled(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(apply_id: str) -> NoReturn:
        raise error

    monkeypatch.setattr(cluster_job, "Reaper", fail)
    with SlurmJob({"workers": 2}) as job:
        with pytest.raises(type(error)):
            job.apply()
        assert not access.running
        assert not job.active


@pytest.mark.parametrize("error", [JobStartFailed("the connection was lost"), KeyboardInterrupt()])
def test_a_job_that_became_known_before_its_start_failed_is_cancelled(
    access: RecordedAccess, error: BaseException
) -> None:
    access.error = error
    job = SlurmJob({"workers": 2})
    with pytest.raises(type(error)):
        job.apply()
    assert not access.running
    assert not job.active


def test_a_job_whose_gateway_has_ended_is_not_running() -> None:
    class Gone:
        queue_interval = 1.0

        def report(self, job: RunningSlurmJob) -> JobReport:
            raise GatewayLostError("the gateway of Slurm job 8 on login is gone")

    job = job_of(8)
    job._access = Gone()  # type: ignore[assignment]
    with pytest.raises(JobNotRunning, match=r"on login is gone\. Call apply\(\) to submit it again"):
        job._wait(job._require_job())


def report(**facts: Any) -> JobReport:
    return JobReport.model_validate({"job_id": 7, "state": "RUNNING", "nodes": 2, **facts})


def answers(*reports: JobReport | Exception) -> Callable[[], JobReport]:
    remaining = iter(reports)

    def ask() -> JobReport:
        answer = next(remaining)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


PENDING = {"state": "PENDING", "pending": True, "why": "Resources: waits for nodes to become free"}


def test_the_wait_ends_when_all_workers_are_connected_and_each_step_is_shown_once() -> None:
    stream = io.StringIO()
    steps = [report(**PENDING), report(**PENDING), report(registered=1), report(registered=2)]
    assert wait_for_workers(answers(*steps), Plain(stream), None).registered == 2
    assert stream.getvalue().splitlines() == [
        "Slurm job 7 is PENDING (Resources: waits for nodes to become free)",
        "Slurm job 7 is RUNNING, 1 of 2 workers are connected",
        "Slurm job 7 is RUNNING, 2 of 2 workers are connected",
    ]


def test_nothing_is_shown_if_there_is_nothing_to_wait_for() -> None:
    stream = io.StringIO()
    wait_for_workers(answers(report(registered=2)), Plain(stream), None)
    assert stream.getvalue() == ""


def test_the_expected_start_is_shown_until_it_has_passed() -> None:
    assert "; expected to start at " in describe(report(**PENDING, expected_start=time.time() + 100))
    assert "expected" not in describe(report(**PENDING, expected_start=time.time() - 100))


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"state": "FAILED", "ended": True, "why": "FAILED: it broke"}, "Slurm job 7 has ended: FAILED: it broke"),
        ({"failed": "the worker on n1 ended"}, "the worker on n1 ended"),
    ],
)
def test_a_job_that_ends_while_it_is_awaited_is_an_error(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobStartFailed, match=problem):
        wait_for_workers(answers(report(**facts)), Silent(), None)


def test_the_wait_has_a_limit() -> None:
    with pytest.raises(JobStartFailed, match=r"PENDING.*after 0\.01 s \(job_start_timeout\)"):
        wait_for_workers(lambda: report(**PENDING), Silent(), 0.01)


def test_a_cut_connection_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ConnectionFailedError("cut")
    assert wait_for_workers(answers(cut, cut, report(registered=2)), Silent(), None)
    monkeypatch.setattr("meshgate.jobs.slurm.job.GATEWAY_TIMEOUT", 0.05)
    with pytest.raises(ConnectionFailedError, match="cut"):
        wait_for_workers(answers(*[cut] * 100), Silent(), None)


SILENT = SlurmSilent("me@login: squeue failed: Socket timed out\nSlurm's controller does not answer")
NOTICE = "waiting for up to 120 s until Slurm's controller answers: me@login: squeue failed: Socket timed out"


@pytest.fixture
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.jobs.slurm.job.LONGEST_DELAY", 0.01)
    monkeypatch.setenv("MESHGATE_PROGRESS", "plain")


@pytest.mark.usefixtures("_no_delay")
def test_a_silent_slurm_is_waited_for_with_one_notice_and_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    steps = [SILENT, ConnectionFailedError("cut"), SILENT, SILENT, report(registered=2)]
    assert wait_for_workers(answers(*steps), Plain(stream), None)
    assert stream.getvalue().splitlines() == [NOTICE]
    monkeypatch.setattr("meshgate.jobs.slurm.job.SLURM_TIMEOUT", 0.05)
    with pytest.raises(SlurmSilent, match=r"Socket timed out(?s:.*)\. It has not answered for 0 s$"):
        wait_for_workers(answers(*[SILENT] * 100), Silent(), None)


@pytest.mark.usefixtures("_no_delay")
def test_a_silent_slurm_is_waited_for_no_longer_than_the_job_may_take_to_start() -> None:
    def fail(*_: object) -> NoReturn:
        raise SILENT

    job = job_of(8)
    job._start_timeout = 0.05
    job._access = RecordedAccess()  # type: ignore[assignment]
    job._access.report = job._access.end = fail  # type: ignore[method-assign, union-attr]
    with pytest.raises(JobStartFailed, match=r"job_start_timeout=0\.05 is over(?s:.*)`scancel 8` cancels it"):
        job._wait(job._require_job())


@pytest.mark.usefixtures("_no_delay")
def test_a_job_is_submitted_once_slurm_answers(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, asked, silence = access.start, [], [SILENT, SILENT]

    def start(request: StartRequest, known: Known) -> None:
        asked.append(request)
        if silence:
            raise silence.pop()
        started(request, known)

    monkeypatch.setattr(access, "start", start)
    SlurmJob({"workers": 2}).apply()
    assert access.running == {7}
    assert asked == [asked[0]] * 3
    assert capsys.readouterr().err.count(NOTICE) == 1
    monkeypatch.setattr("meshgate.jobs.slurm.job.SLURM_TIMEOUT", 0.0)
    silence.append(SILENT)
    with pytest.raises(JobStartFailed, match=r"It has not answered for 0 s\. Nothing was submitted$"):
        SlurmJob({"workers": 2}).apply()


@pytest.mark.usefixtures("_no_delay")
def test_whether_a_job_runs_is_asked_until_slurm_answers(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[JobError | None] = [None, SILENT, SILENT]

    def is_running(job: RunningSlurmJob) -> bool:
        if step := steps.pop():
            raise step
        return True

    monkeypatch.setattr(access, "is_running", is_running, raising=False)
    assert job_of(7)._is_running()


def test_progress_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    assert isinstance(choose_progress(), Silent)
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="expected auto, plain or off"):
        choose_progress()


def test_the_line_on_a_terminal_shows_text_in_brackets_as_it_is() -> None:
    screen = io.StringIO()
    with Live(new_console(file=screen, force_terminal=True, width=100)) as live:
        live.show("Slurm job 12 is PENDING (node[a,b] [/x] :x:)")
    assert "(node[a,b] [/x] :x:)" in screen.getvalue()


class InterruptedStream(io.StringIO):
    """Stands for a person who presses Ctrl-C as soon as the text appears."""

    def flush(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_counts_from_the_moment_the_text_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", InterruptedStream())
    assert second_interrupt(12)


def test_without_a_second_interrupt_the_job_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert not second_interrupt(12, seconds=0.01)
    assert "Slurm job 12 stays in the queue" in capsys.readouterr().err

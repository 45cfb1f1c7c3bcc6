"""serve() refuses what cannot work before anything starts, and an SPMDJob lives as the job inside it does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from meshgate import JobState, JobUnsupported, KubernetesJob, LocalJob, ProcessJob, SlurmJob
from meshgate.jobs.spmd.job import SPMDJob
from meshgate.jobs.spmd.schedulers import job_of
from meshgate.jobs.spmd.torchrun import parse_command
from meshgate.jobs.trait import job_loads
from meshgate.spmd import serve
from tests.client.jobs.fake_job import RUNNING, FakeJob

COMMAND = ["torchrun", "--nproc-per-node=2", "train.py"]


MESHES = ProcessJob({"a": 1, "b": 1})


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["torchrun", "--node-rank=1", "train.py"], {}, "--node-rank=1 is not supported"),
        (COMMAND, {"scheduler": "mast_conda"}, "unknown scheduler 'mast_conda': the schedulers are .*local_cwd"),
        (COMMAND, {}, "unknown scheduler 'mast_conda'"),
        (["torchrun", "--nnodes=2", "train.py"], {"scheduler": "local_cwd"}, r"has one host, and --nnodes is 2:2"),
        (COMMAND, {"scheduler": "local_cwd", "scheduler_cfg": {"log_dir": "x"}}, "scheduler_cfg of local_cwd: log_dir"),
        (COMMAND, {"job": FakeJob(1), "scheduler_cfg": {"a": 1}}, "takes no scheduler_cfg"),
        (COMMAND, {"job": FakeJob(1), "scheduler": "local_cwd"}, "either those of the job or of a new one"),
        (COMMAND, {"job": MESHES, "mesh": "zz"}, "mesh='zz': the job has no such mesh; its meshes are: a, b"),
        (COMMAND, {"job": MESHES}, "the job has several meshes; choose one with mesh=…: a, b"),
        (COMMAND, {"job": SlurmJob({"a": 1}), "mesh": "zz"}, "mesh='zz': .*its meshes are: a"),
        (COMMAND, {"job": KubernetesJob(selector="app=x"), "mesh": "zz"}, "mesh='zz': .*its meshes are: workers"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    command: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serve(command, **options)
    assert not RUNNING
    assert not MESHES.active


def test_a_name_is_saved_and_refused_for_an_appdef() -> None:
    with pytest.raises(ValueError, match=r"name is only supported for command lists; set AppDef\.name"):
        serve(object(), name="night", job=FakeJob(1))
    with serve(COMMAND, name="night", job=FakeJob(1)) as job:
        loaded = job_loads(job.dumps())
        assert isinstance(loaded, SPMDJob)
        assert loaded._name == "night"


@pytest.mark.parametrize(("scheduler", "config", "name"), [("slurm", {}, "night"), ("slurm", {"job_name": "x"}, "x")])
def test_a_new_job_has_the_name(scheduler: str, config: dict[str, str], name: str) -> None:
    job = job_of(scheduler, config, parse_command(COMMAND), COMMAND, None, "night")
    assert isinstance(job, SlurmJob)
    assert job._arguments["job_name"] == name


def test_a_missing_script_is_refused_before_anything_starts() -> None:
    with pytest.raises(FileNotFoundError, match=r"typo\.py does not exist in"):
        serve(["torchrun", "typo.py"], job=FakeJob(1))
    assert not RUNNING


def test_serve_starts_the_job_and_kill_ends_it() -> None:
    job = serve(COMMAND, job=FakeJob(1))
    assert job.active
    assert {job.apply_id} == RUNNING
    job.kill()
    assert not RUNNING


def test_a_with_block_ends_the_job_inside() -> None:
    with serve(COMMAND, job=FakeJob(1)):
        assert RUNNING
    assert not RUNNING


def test_a_with_block_leaves_a_detached_job_inside_and_its_own_signals() -> None:
    inner = FakeJob(1)
    inner._detached = True
    before = signal.getsignal(signal.SIGTERM)
    with serve(COMMAND, job=inner) as job:
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert {inner.apply_id} == RUNNING
    job.kill()


def test_a_job_inside_that_is_detached_in_a_with_block_outlives_the_driver() -> None:
    inner = FakeJob(1)
    with serve(COMMAND, job=inner) as job:
        assert inner._scoped
        job._scoped, job._detached = False, "night"  # as detach() does, which needs a gateway
        job._outlive_driver()
        assert inner.outlives_driver
    assert {inner.apply_id} == RUNNING
    job.kill()


def test_a_job_inside_that_ends_with_this_process_cannot_be_detached() -> None:
    with pytest.raises(JobUnsupported, match=r"the hosts of SPMDJob\(.*LocalJob.* end with this process"):
        SPMDJob(LocalJob({"workers": 1}), COMMAND).detach()


def test_its_gateway_meshes_and_sessions_are_those_of_the_job_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: Any = ProcessJob({"workers": 2}, detached="night")
    monkeypatch.setattr(inner, "_dialer", lambda: "the way")
    monkeypatch.setattr(inner, "state", lambda cached_path: JobState({}))
    job: Any = SPMDJob(inner, COMMAND)
    assert (job._dialer(), job._mesh_sizes(), job._joinable().kind) == ("the way", {"workers": 2}, "ProcessJob")
    assert job._detached == "night"
    job._detached = "day"  # as of the program that found it in its file
    inner._client = inner._attached = "the session"
    job._state()
    assert (inner._detached, job._client, job._attached) == ("day", "the session", "the session")
    monkeypatch.setattr(inner, "_take_over", lambda name, replay: (name, replay))
    inner._client = "another"
    assert (job._take_over("day", replay=True), job._client) == (("day", True), "another")


def test_a_saved_job_has_its_command_and_finds_the_running_job() -> None:
    job = serve(COMMAND, job=FakeJob(3))
    loaded = job_loads(job.dumps())
    assert isinstance(loaded, SPMDJob)
    assert loaded.can_run(SPMDJob(FakeJob(3), COMMAND))
    assert not loaded.can_run(SPMDJob(FakeJob(3), ["torchrun", "train.py"]))
    assert not loaded.can_run(FakeJob(3))
    assert (loaded._arguments, loaded._job.apply_id) == (COMMAND, job._job.apply_id)
    loaded.kill()
    assert not RUNNING


class OwnJob(ProcessJob):
    """As a program writes one: without what saving needs."""

    def __init__(self, hosts: int) -> None:
        super().__init__({"workers": hosts})
        self.hosts = hosts


def test_a_saved_job_keeps_the_attributes_of_a_job_type_of_the_program() -> None:
    loaded = job_loads(SPMDJob(OwnJob(3), COMMAND).dumps())
    assert isinstance(loaded, SPMDJob)
    assert isinstance(loaded._job, OwnJob)
    assert loaded._job.hosts == 3


def test_a_job_that_is_saved_outlives_the_driver() -> None:
    inner = FakeJob(1)
    job = serve(COMMAND, job=inner)
    job.dumps()
    assert inner.outlives_driver
    job.kill()


def test_a_job_that_does_not_run_is_saved_without_an_allocation() -> None:
    loaded = job_loads(SPMDJob(FakeJob(1), COMMAND).dumps())
    assert not loaded.active


def test_a_job_with_several_meshes_needs_the_name_of_one() -> None:
    state = JobState({"a": 1, "b": 2})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="several meshes; choose one with mesh=…: a, b"):
        SPMDJob(FakeJob(1), COMMAND)._hosts(state)
    assert SPMDJob(FakeJob(1), COMMAND, mesh="b")._hosts(state) == 2
    with pytest.raises(ValueError, match="mesh='c': the job has no such mesh; its meshes are: a, b"):
        SPMDJob(FakeJob(1), COMMAND, mesh="c")._hosts(state)


def test_only_hosts_on_other_machines_need_the_script_synced(tmp_path: Path) -> None:
    assert not SPMDJob(ProcessJob({"workers": 1}), COMMAND)._needs_sync(str(tmp_path))
    assert SPMDJob(FakeJob(1), COMMAND)._needs_sync(str(tmp_path))
    assert not SPMDJob(FakeJob(1), ["torchrun", "-m", "train"])._needs_sync(str(tmp_path))

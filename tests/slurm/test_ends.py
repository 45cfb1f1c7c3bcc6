"""How jobs and nodes end, and what the driver sees: the reason, the node, and the last lines of the worker's log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import (
    GatewayLostError,
    JobNotRunning,
    JobStartFailed,
    MeshFailure,
    MeshgateError,
    SlurmJob,
    SupervisionError,
    job_loads,
)
from meshgate.jobs.slurm.access import NodeAccess
from meshgate_slurm.messages import JobReport, RunningSlurmJob
from tests.slurm.actors import Trainer
from tests.slurm.cluster import DISTURBED, NOTICED, kit, pids, queue, run, small_job
from tests.waiting import Printed, wait_for


@pytest.fixture(autouse=True)
def _quiet_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: None)


def waiting_call(job: SlurmJob) -> tuple[Any, Any]:
    """A call that never returns, on every rank of the mesh ``workers``, and the processes that it runs in."""
    procs = job.state().workers.spawn_procs(per_host={"gpus": 1})
    trainers = procs.spawn("trainers", Trainer)
    trainers.node.call().get(timeout=NOTICED)
    return trainers.wait.call(), procs


def failure_of(call: Any, timeout: float = NOTICED) -> str:
    with pytest.raises(SupervisionError) as failed:
        call.get(timeout=timeout)
    return str(failed.value)


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_cancelled_job_ends_its_calls_with_state_node_and_log(name: str, tmp_path: Path, gateway_on: str) -> None:
    with small_job({"workers": 2}, name, tmp_path, gateway_on=gateway_on) as job:
        call, _ = waiting_call(job)
        started = time.monotonic()
        run("scancel", str(job.job_id))
        failure = failure_of(call)
        assert time.monotonic() - started < NOTICED
        assert f"Slurm ended job {job.job_id}: CANCELLED" in failure
        assert "The last lines of the worker on n" in failure
        with pytest.raises(JobNotRunning, match=r"CANCELLED.*Call apply\(\) to submit it again"):
            job.state()
        first = job.job_id
        job.apply()
        assert job.job_id != first
        job.state().workers.spawn_procs().spawn("trainers", Trainer).node.call().get(timeout=NOTICED)


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_driver_leaves_a_job_that_has_ended_without_waiting_for_its_gateway(
    name: str, tmp_path: Path, gateway_on: str, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    failures: list[MeshFailure] = []
    monkeypatch.setattr(kt, "unhandled_fault_hook", failures.append)
    monkeypatch.setenv("MESHGATE_CLOSE_TIMEOUT", "3600")
    monkeypatch.setenv("MESHGATE_QUIET", "5")  # as in programs
    with small_job({"workers": 2}, name, tmp_path, gateway_on=gateway_on) as job:
        waiting_call(job)
        run("scancel", str(job.job_id))
        wait_for(lambda: len(failures) == 2, "the fault of each rank")
    assert all(failure.job_lost for failure in failures)
    assert "calls wait" not in printed.err.rpartition("connected to")[2]


@pytest.mark.slow
def test_the_time_limit_is_announced_and_named(name: str, tmp_path: Path, printed: Printed) -> None:
    with small_job({"workers": 1}, name, tmp_path, time_limit="9", warn_before=700) as job:
        call, _ = waiting_call(job)
        wait_for(lambda: f"[meshgate] Slurm ends job {job.job_id} at " in printed.err, "the announcement")
        # Slurm looks for jobs that are over their limit every half minute, and the limit is what ends the job now.
        run("scontrol", "update", f"JobId={job.job_id}", "EndTime=now+1")
        assert re.search(r"TIMEOUT: it reached its time limit of \d min", failure_of(call, timeout=180))


def test_nodes_are_about_to_end_until_the_time_limit_is_raised(name: str, tmp_path: Path) -> None:
    with small_job({"workers": 1}, name, tmp_path, time_limit="9", warn_before=700) as job:
        hosts = job.state().workers
        (ending,) = wait_for(lambda: hosts.ending, "the notice")
        assert ending.reason == f"Slurm ends job {job.job_id} at its time limit"
        assert 0 < ending.seconds_left <= 540
        hosts.initialized.get(timeout=NOTICED)  # which waits for no other node
        (session,) = job.status().sessions
        assert [0 < (host.seconds_left or 0) <= 540 for host in session.hosts] == [True]
        run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")
        wait_for(lambda: not hosts.ending, "the notice to be withdrawn")


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_preempted_job_says_so(name: str, tmp_path: Path, disturbed_node: str, gateway_on: str) -> None:
    options = {"partition": "spot", "on_disturbed": True, "gateway_on": gateway_on}
    with small_job({"workers": 1}, name, tmp_path, **options) as job:
        call, _ = waiting_call(job)
        other = subprocess.Popen(["srun", "--partition=cpu", f"--nodelist={disturbed_node}", "--exclusive", "true"])
        try:
            assert "PREEMPTED: a job of another partition or QOS took its nodes" in failure_of(call)
        finally:
            other.wait(NOTICED)


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_preempted_job_has_notice_of_its_grace_time(
    name: str, tmp_path: Path, disturbed_node: str, gateway_on: str
) -> None:
    with partition_with_grace_time(name, disturbed_node, seconds=300):
        options = {"partition": name, "on_disturbed": True, "gateway_on": gateway_on}
        with small_job({"workers": 1}, name, tmp_path, **options) as job:
            hosts = job.state().workers
            trainers = hosts.spawn_procs().spawn("trainers", Trainer)
            assert trainers.node.call_one().get(timeout=NOTICED) == disturbed_node
            other = subprocess.Popen(["srun", "--partition=cpu", f"--nodelist={disturbed_node}", "--exclusive", "true"])
            (ending,) = wait_for(lambda: hosts.ending, "the notice")
            why = "because a job of another partition or QOS takes its nodes"
            assert ending.reason == f"Slurm ends job {job.job_id} {why}"
            assert 0 < ending.seconds_left <= 300
            log = tmp_path / f"slurm_{job.job_id}_{name}_{disturbed_node}.log"
            wait_for(
                lambda: "SIGTERM: continues until the gateway ends this worker" in log.read_text(), "Slurm's SIGTERM"
            )
            assert trainers.node.call_one().get(timeout=NOTICED) == disturbed_node
        other.wait(NOTICED)


def test_a_suspended_job_has_notice_and_goes_on_when_it_is_resumed(name: str, tmp_path: Path) -> None:
    with small_job({"workers": 1}, name, tmp_path) as job:
        hosts = job.state().workers
        trainers = hosts.spawn_procs().spawn("trainers", Trainer)
        trainers.node.call_one().get(timeout=NOTICED)
        run("scontrol", "suspend", str(job.job_id))
        (ending,) = wait_for(lambda: hosts.ending, "the notice")
        assert ending.reason == f"Slurm has suspended job {job.job_id}"
        run("scontrol", "resume", str(job.job_id))
        wait_for(lambda: not hosts.ending, "the notice to be withdrawn")
        assert hosts.spawn_procs().spawn("again", Trainer).node.call_one().get(timeout=NOTICED)


def test_a_node_that_does_not_share_the_home_directory_is_reported(
    name: str, tmp_path: Path, disturbed_node: str
) -> None:
    """Its log is there, and the gateway's token here."""
    directory = Path("~/.meshgate").expanduser()
    directory.mkdir(exist_ok=True)
    kit("on", disturbed_node, "mount", "-t", "tmpfs", "none", str(directory))
    try:
        job = small_job({"workers": 1}, name, tmp_path, on_disturbed=True, gateway_on="node", log_dir=None)
        with (
            pytest.raises(JobStartFailed, match=rf"FAILED(?s:.*){directory}.*\. Do the nodes share its directory"),
            job,
        ):
            job.state()
    finally:
        kit("on", disturbed_node, "umount", str(directory))


@contextlib.contextmanager
def partition_with_grace_time(name: str, node: str, seconds: int) -> Iterator[None]:
    """A partition of this name whose jobs are preempted by those of others."""
    limits = ("PriorityTier=1", f"GraceTime={seconds}", "MaxTime=60", "State=UP")
    run("scontrol", "create", f"PartitionName={name}", f"Nodes={node}", *limits)
    try:
        yield
    finally:
        wait_for(lambda: not queue(name), "the jobs of the partition to end")
        run("scontrol", "delete", f"PartitionName={name}")


def test_a_node_without_power_is_lost_alone(name: str, tmp_path: Path, disturbed_node: str) -> None:
    nodes = [f"--nodelist=n3,{DISTURBED}"]
    with small_job({"workers": 2}, name, tmp_path, on_disturbed=True, slurm_args=nodes) as job:
        call, procs = waiting_call(job)
        kit("node", disturbed_node, "kill")
        # Slurm would notice by itself. But with the kit's short SlurmdTimeout it then often takes healthy nodes too,
        # whose answers to pings wait for that of the dead one.
        run("scontrol", "update", f"NodeName={disturbed_node}", "State=DOWN", "Reason=no power")
        noticed = time.monotonic()
        failure = failure_of(call)
        assert time.monotonic() - noticed < NOTICED
        # Slurm may have the reason already and still the state of before.
        assert re.search(rf"Slurm took node {disturbed_node} from job {job.job_id} \([A-Z_+]+: no power\)", failure)
        assert "rank 1" in failure
        again = procs.slice(hosts=slice(0, 1)).spawn("again", Trainer)
        assert [node for _, node in again.node.call().get(timeout=NOTICED).items()] == ["n3"]
        other = job_loads(job.dumps())
        hosts = other.state(cached_path=None).workers  # of a new session
        with pytest.raises(SupervisionError, match=rf"has lost hosts \({disturbed_node}: Slurm took node"):
            hosts.spawn_procs().initialized.get(timeout=NOTICED)
        assert hosts.slice(hosts=0).spawn_procs().spawn("new", Trainer).node.call_one().get(timeout=NOTICED) == "n3"
        assert other._client is not None
        other._client.close()


def test_a_job_whose_gateway_was_on_a_node_without_power_ends_with_the_nodes_state(
    name: str, tmp_path: Path, disturbed_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Usually Slurm notices the loss minutes after the driver, which asks Slurm until it has."""
    answers: list[bool] = []  # whether the job has ended
    ask = NodeAccess._ask_slurm

    def ask_slurm(self: NodeAccess, job: RunningSlurmJob) -> JobReport:
        report = ask(self, job)
        answers.append(report.ended)
        return report

    with small_job({"workers": 1}, name, tmp_path, on_disturbed=True, gateway_on="node") as job:
        call, _ = waiting_call(job)
        monkeypatch.setattr(NodeAccess, "_ask_slurm", ask_slurm)
        kit("node", disturbed_node, "kill")
        wait_for(lambda: answers, "the driver to ask about the job: nothing closes the connection")
        run("scontrol", "update", f"NodeName={disturbed_node}", "State=DOWN", "Reason=no power")
        noticed = time.monotonic()
        with pytest.raises(GatewayLostError, match=rf"Slurm ended job {job.job_id}: NODE_FAIL: a node failed"):
            call.get(timeout=2 * NOTICED)
        print(f"the call failed {time.monotonic() - noticed:.1f} s after Slurm knew")
        # One interrupts the attempt to connect, and the next two are at least GONE_INTERVAL apart, which is more than
        # the session waits for another gateway (lost_after).
        assert 1 <= answers.count(True) <= 3
        with pytest.raises(JobNotRunning, match=r"NODE_FAIL.*Call apply\(\) to submit it again"):
            job.state()


def test_a_process_that_takes_too_much_memory_ends_alone(name: str, tmp_path: Path) -> None:
    with small_job({"workers": 1}, name, tmp_path, mem="400M") as job:
        procs = job.state().workers.spawn_procs(per_host={"gpus": 1})
        failure = failure_of(procs.spawn("eaters", Trainer).fill_memory.call())
        assert "rank 0 of mesh 'eaters' on n" in failure  # and the kernel's reason, if Monarch knows it in time
        assert job.state().workers.spawn_procs().spawn("again", Trainer).node.call().get(timeout=NOTICED)


@pytest.mark.parametrize(
    ("gateway_on", "why"), [("login", "its process on .* has ended"), ("node", r"Slurm ended job \d+: FAILED")]
)
def test_a_job_whose_gateway_is_killed_ends_with_its_words(
    name: str, tmp_path: Path, gateway_on: str, why: str
) -> None:
    with small_job({"workers": 1}, name, tmp_path, gateway_on=gateway_on) as job:
        call, _ = waiting_call(job)
        directory = job._require_job().directory
        for pid in pids(b"meshgate_gateway\0--slurm-job", directory.encode()):
            with contextlib.suppress(ProcessLookupError):  # the server ends with its supervisor
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(MeshgateError, match=why):
            call.get(timeout=NOTICED)
        with pytest.raises(JobNotRunning, match=rf"(?s){why}.*Call apply\(\) to submit it again"):
            job.state()


def test_a_worker_that_is_killed_is_lost_while_the_job_runs(name: str, tmp_path: Path) -> None:
    with small_job({"workers": 2}, name, tmp_path) as job:
        call, _ = waiting_call(job)
        pid, *_ = [  # what it starts is a copy at first
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit() and is_worker(Path("/proc") / entry, job.job_id, rank=1)
        ]
        os.kill(pid, signal.SIGKILL)
        failure = failure_of(call)
        assert f"the worker on this node ended, while Slurm job {job.job_id} runs" in failure


def is_worker(process: Path, job_id: int | None, *, rank: int) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    marks = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_PROCID={rank}".encode()}
    return command.endswith(b"-m\0meshgate_worker.slurm\0") and marks <= set(variables)


@pytest.mark.parametrize(
    ("gateway_on", "code"), [("login", "Exited with exit code 1"), ("node", "FAILED: its batch script failed")]
)
def test_what_cannot_start_shows_its_last_words(name: str, tmp_path: Path, gateway_on: str, code: str) -> None:
    job = small_job({"workers": 2}, name, tmp_path, env={"PYTHONHOME": "/nonexistent"}, gateway_on=gateway_on)
    with pytest.raises(JobStartFailed) as failed, job:
        job.state()
    assert "No module named 'encodings'" in str(failed.value)
    assert code in str(failed.value)
    assert not job.active


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_actors_run_in_the_home_directory_and_a_job_leaves_no_temporary_files(
    name: str, tmp_path: Path, gateway_on: str
) -> None:
    """Monarch leaves a directory for each process that is killed."""
    with small_job({"workers": 1}, name, tmp_path, gateway_on=gateway_on) as job:
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        directory, temporary = trainers.directories.call_one().get(timeout=NOTICED)
        assert directory == str(Path.home())
        assert job._job is not None
        engines = os.path.realpath(Path(job._job.directory) / "tmp")
        assert os.listdir(engines)
    for path in (temporary, engines):  # the processes on the node may end after Slurm's job
        wait_for(lambda path=path: not os.path.exists(path), f"{path} to be removed")  # type: ignore[misc]


def test_a_directory_that_the_user_chooses_is_used(name: str, tmp_path: Path) -> None:
    with small_job({"workers": 1}, name, tmp_path, slurm_args=["--chdir=/usr"]) as job:
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.directories.call_one().get(timeout=NOTICED)[0] == "/usr"

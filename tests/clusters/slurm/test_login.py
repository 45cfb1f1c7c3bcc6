"""What the program on the login node says about a job's gateway, and what becomes of a job that no client takes."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from meshgate_processes.identity import identify_process
from meshgate_slurm import commands, login
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.gateway_process import LOG_FILE, PROCESS_FILE, make_log_directory
from meshgate_slurm.login import _state
from meshgate_slurm.messages import (
    BatchRequest,
    Ended,
    GatewayState,
    JobReport,
    RecordedJob,
    Rejected,
    RunningSlurmJob,
    StartRequest,
    read_answer,
    run_submission,
)
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus
from tests.programs import child_process
from tests.waiting import DEADLINE, wait_for


@pytest.mark.parametrize(
    ("started", "alive"),
    [(None, True), ("1", False), ("login2:0/another boot/1/5", True)],  # of this process, a reused pid, and elsewhere
)
def test_only_the_machine_of_a_gateway_says_that_it_has_ended(tmp_path: Path, started: str | None, alive: bool) -> None:
    (tmp_path / LOG_FILE).write_text("last words")
    own = identify_process(os.getpid())
    assert own is not None
    job = RunningSlurmJob(
        apply_id="12345678", job_id=7, host="login", directory=str(tmp_path), socket="/s", pid=own.pid,
        started=started or own.started, token="", meshes={"a": 1}, log_dir="",
    )  # fmt: skip
    state = _state(json.dumps(job.model_dump()))
    assert isinstance(state, GatewayState)
    assert (state.alive, state.output) == (alive, "" if alive else "last words")


def report_of_a_job_on_nodes(directory: Path) -> JobReport:
    """What the login node says of job 7, whose gateway is to run on its first node."""
    job = RunningSlurmJob(
        apply_id="12345678", job_id=7, host="", directory=str(directory), socket="", pid=0, started="", token="",
        meshes={"a": 1}, log_dir="", batch_log=str(directory / "batch.log"),
    )  # fmt: skip
    report = login._report(job.model_dump_json())
    assert isinstance(report, JobReport)
    return report


@pytest.mark.parametrize("late", [False, True])
def test_a_gateway_on_a_node_that_leaves_no_address_names_the_directory_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    started = time.time() - (login.GATEWAY_TIMEOUT + 1 if late else 0)
    status = JobStatus(job_id=7, state="RUNNING", expected_start=started)
    monkeypatch.setattr(commands, "jobs", lambda numbers: {7: status})
    (tmp_path / "batch.log").write_text("srun: no such directory")
    report = report_of_a_job_on_nodes(tmp_path)
    if late:
        assert f"did not leave its address in {tmp_path} within" in (report.failed or "")
        assert "and the nodes share this directory?\nThe last lines of the batch script:\n  srun" in (
            report.failed or ""
        )
    else:
        assert (report.failed, report.gateway) == (None, "")


def test_a_job_that_failed_with_its_log_elsewhere_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "jobs", lambda numbers: {7: JobStatus(job_id=7, state="FAILED")})
    report = report_of_a_job_on_nodes(tmp_path)
    assert f"does not have the log of the batch script, {tmp_path}/batch.log. Do the nodes share" in (
        report.failed or ""
    )


# --- submissions: the program as a process, with a Slurm of the test's that numbers its jobs

SBATCH = """#!/bin/sh
number=$(ls {directory} | grep -c submitted)
: > {directory}/submitted$number
echo sbatch $number >> {directory}/calls
while [ -e {directory}/wait$number ]; do sleep 0.02; done
echo $number
"""
SCANCEL = "#!/bin/sh\necho scancel $1 >> {directory}/calls\n"
SQUEUE = "#!/bin/sh\necho Invalid job id >&2\nexit 1\n"
SCONTROL = "#!/bin/sh\necho 'ClusterName = local'\n"
SUBMIT = [sys.executable, "-m", "meshgate_slurm.login", "submit"]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the calls of Slurm's commands."""
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL), ("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text.format(directory=shlex.quote(str(tmp_path))))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "calls"


def request(directory: Path) -> str:
    spec = SlurmSpec(meshes={"a": 1}, log_dir=str(directory))
    apply_id = str(uuid.uuid4())
    return BatchRequest(apply_id=apply_id, spec=spec, client="true", directory="/").model_dump_json()


def confirm(printed: str) -> bool:
    assert isinstance(read_answer(printed, RunningSlurmJob), RunningSlurmJob)
    return True


def test_a_job_that_its_client_confirms_is_kept(tmp_path: Path, calls: Path) -> None:
    ran = run_submission(SUBMIT, request(tmp_path), confirm, DEADLINE)
    assert ran.returncode == 0
    assert calls.read_text() == "sbatch 0\n"
    assert recorded(tmp_path) == ["0.json"]
    job = read_answer(ran.stdout, RunningSlurmJob)
    assert isinstance(job, RunningSlurmJob)
    assert (job.job_id, job.cluster) == (0, "local")
    record = RecordedJob.model_validate_json((tmp_path / ".meshgate/slurm/jobs/local/0.json").read_bytes())
    assert record.job == job


def recorded(home: Path) -> list[str]:
    return sorted(os.listdir(home / ".meshgate/slurm/jobs/local"))


def test_a_job_that_cannot_be_recorded_is_ended(tmp_path: Path, calls: Path) -> None:
    (tmp_path / ".meshgate").touch()
    ran = run_submission(SUBMIT, request(tmp_path), lambda printed: False, DEADLINE)
    reply = read_answer(ran.stdout, RunningSlurmJob)
    assert isinstance(reply, Rejected)
    assert "Not a directory" in reply.error
    assert calls.read_text() == "sbatch 0\nscancel 0\n"


def test_a_job_is_not_submitted_if_the_name_of_the_cluster_is_unknown(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    ran = run_submission(SUBMIT, request(tmp_path), lambda printed: False, DEADLINE)
    assert isinstance(read_answer(ran.stdout, RunningSlurmJob), Rejected)
    assert not calls.exists()


def test_a_job_ends_although_its_record_cannot_be_removed(tmp_path: Path, calls: Path) -> None:
    replies: list[RunningSlurmJob] = []

    def keep(printed: str) -> bool:
        reply = read_answer(printed, RunningSlurmJob)
        assert isinstance(reply, RunningSlurmJob)
        replies.append(reply)
        return True

    run_submission(SUBMIT, request(tmp_path), keep, DEADLINE)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    command = [*SUBMIT[:-1], "end"]
    ended = subprocess.run(command, input=replies[0].model_dump_json(), capture_output=True, text=True, check=True)
    assert isinstance(read_answer(ended.stdout, Ended), Ended)
    assert calls.read_text() == "sbatch 0\nscancel 0\n"
    assert recorded(tmp_path) == ["0.json"]


def test_a_job_whose_client_is_interrupted_when_it_has_read_the_reply_is_ended(tmp_path: Path, calls: Path) -> None:
    def interrupt(printed: str) -> NoReturn:
        confirm(printed)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_submission(SUBMIT, request(tmp_path), interrupt, DEADLINE)
    wait_for(lambda: "scancel 0" in calls.read_text(), "the job to be cancelled")


def test_a_job_that_its_client_does_not_take_is_ended_before_the_program_exits(tmp_path: Path, calls: Path) -> None:
    assert run_submission(SUBMIT, request(tmp_path), lambda printed: False, DEADLINE).returncode == 1
    assert calls.read_text() == "sbatch 0\nscancel 0\n"
    assert recorded(tmp_path) == []


def test_the_job_of_a_client_that_was_gone_before_the_reply_ends_before_the_next_submission_of_it(
    tmp_path: Path, calls: Path
) -> None:
    (tmp_path / "wait0").touch()
    given = request(tmp_path)
    with child_process(SUBMIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdin.write(f"{given}\n".encode())
        first.stdin.close()
        wait_for(calls.exists, "sbatch")
        first.stdout.close()
        with ThreadPoolExecutor(1) as thread:
            second = thread.submit(run_submission, SUBMIT, given, confirm, DEADLINE)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                first.send_signal(signum)
            (tmp_path / "wait0").unlink()
            assert second.result().returncode == 0
        assert first.wait(DEADLINE) == 1
    assert calls.read_text() == "sbatch 0\nscancel 0\nsbatch 1\n"


@pytest.mark.parametrize("action", [login._start, login._submit])
def test_a_job_is_submitted_by_one_program_at_a_time(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[str], object]
) -> None:
    monkeypatch.setattr(login, "CLAIM_TIMEOUT", 0)
    login._claim(str(uuid.uuid4()))
    given = request(tmp_path)
    login._claim(json.loads(given)["apply_id"])
    with pytest.raises(SlurmError, match="has been submitting this job"):
        action(given)
    assert not calls.exists()


def test_a_client_that_does_not_answer_keeps_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(login, "CONFIRMATION_TIMEOUT", 0)
        assert not login._confirmed()


@pytest.fixture
def gateway() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("calls")
def test_a_start_ends_what_a_killed_start_of_the_same_job_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateway: subprocess.Popen[bytes]
) -> None:
    start = StartRequest(apply_id=str(uuid.uuid4()), spec=SlurmSpec(meshes={"a": 1}))
    directory = tmp_path / ".meshgate" / "slurm" / start.apply_id
    directory.mkdir(parents=True)
    identity = identify_process(gateway.pid)
    assert identity is not None
    (directory / PROCESS_FILE).write_text(f"{identity.pid} {identity.started}")

    def start_gateway(where: Path, *arguments: object) -> Rejected:
        assert where == directory
        assert not directory.exists()
        return Rejected(error="started again")

    monkeypatch.setattr(login, "start_gateway", start_gateway)
    assert login._start(start.model_dump_json()) == Rejected(error="started again")
    assert gateway.wait(DEADLINE) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "NODE_FAIL"}, True),
        ({"state": "FAILED", "reason": "RaisedSignal", "signal": 9}, True),
        ({"state": "FAILED", "exit_code": 1}, False),
        ({"state": "CANCELLED", "signal": 15}, False),
    ],
)
def test_the_end_of_a_job_by_the_failure_of_its_first_node_has_slurms_reason_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: dict[str, object], said: bool
) -> None:
    ended = JobStatus.model_validate({"job_id": 7, "batch_host": "n1", **status})
    monkeypatch.setattr(commands, "jobs", lambda numbers: {7: ended})
    monkeypatch.setattr(commands, "node_problem", lambda node: "DOWN: memory errors")
    report = report_of_a_job_on_nodes(tmp_path)
    assert ("The gateway was on node n1, which is DOWN: memory errors" in report.why) == said
    assert str(report.failed).startswith(report.why)


@pytest.mark.parametrize(("restarts", "ended"), [(0, False), (1, True)])
def test_a_job_that_was_requeued_after_its_gateway_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, ended: bool
) -> None:
    status = JobStatus(job_id=7, state="PENDING", restarts=restarts)
    monkeypatch.setattr(commands, "jobs", lambda numbers: {7: status})
    assert report_of_a_job_on_nodes(tmp_path).pending  # as after a start that failed before the gateway ran
    report = report_of_a_job_on_nodes(tmp_path / "removed")
    assert (report.ended, "put back into the queue" in report.why) == (ended, ended)


@pytest.mark.parametrize("missing", [True, False])
def test_a_directory_of_logs_that_cannot_be_used_is_named(tmp_path: Path, missing: bool) -> None:
    logs = tmp_path / "file" / "logs" if missing else tmp_path / "file"
    (tmp_path / "file").touch()
    with pytest.raises(SlurmError, match=rf"cannot create the directory of the logs, log_dir='{logs}'"):
        make_log_directory(SlurmSpec(meshes={"a": 1}, log_dir=str(logs)))


@pytest.mark.parametrize(("error", "silent"), [(Unanswered("squeue failed"), True), (SlurmError("no job"), False)])
def test_a_rejection_says_whether_slurm_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: SlurmError, silent: bool
) -> None:
    def fail(text: str) -> NoReturn:
        raise error

    monkeypatch.setattr(login, "_report", fail)
    monkeypatch.setattr(sys, "argv", ["login", "report"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}\n"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    login.main()
    assert read_answer(capsys.readouterr().out, JobReport) == Rejected(error=str(error), silent=silent)

"""Jobs that are submitted as a user, and their records. Slurm's side is a program of the test's."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from meshgate_gateway.provisioning import slurm_submission
from meshgate_gateway.provisioning.slurm_submission import Account, Record, Submissions
from meshgate_slurm.commands import SlurmError
from meshgate_slurm.messages import GatewayState, Rejected, RunningSlurmJob, StartRequest
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus

ID = "0123abcd-0000"
PROGRAM = """#!{python}
import json, os, sys
request = json.loads(sys.stdin.readline())
with open({calls!r}, "a") as calls:
    print(sys.argv[3], os.environ["HOME"], os.environ.get("MESHGATE_TOKEN"), file=calls)
job = dict(apply_id={id!r}, job_id=7, host="login", directory="/d", socket="/s", pid=1, started="1", token="secret",
           meshes=request.get("spec", dict()).get("meshes", dict()), log_dir="/l")
answers = dict(start=job, submit=dict(job, socket="", token=""), end=dict(state="CANCELLED"),
               state=dict(host="login", alive=False, output="last words"))
if {answers}:
    print("a start-up file says hello")
    print("meshgate-slurm: " + json.dumps({refusal} or answers[sys.argv[3]]), flush=True)
    if sys.argv[3] in ("start", "submit"):
        confirmed = sys.stdin.readline() == "confirmed\\n" and not {late}
        sys.exit(0 if confirmed or {refusal} else 1)
else:
    sys.exit("no module")
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


def account(
    directory: Path, *, job_id: str = ID, answers: bool = True, refusal: str = "None", late: bool = False
) -> Account:
    """``late``: the program has ended the job when the confirmation comes."""
    program = directory / "python"
    program.write_text(
        PROGRAM.format(
            python=sys.executable,
            calls=str(directory / "calls"),
            id=job_id,
            answers=answers,
            refusal=refusal,
            late=late,
        )
    )
    program.chmod(0o755)
    return Account(user=None, python=str(program))


def start(submissions: Submissions, account: Account, apply_id: str = ID) -> Record | Rejected:
    request = StartRequest(apply_id=apply_id, spec=SlurmSpec(meshes={"a": 1}))
    return submissions.start("caller:alice", account, request)


def test_a_job_is_found_again_by_another_gateway_until_it_has_ended(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", "the gateway's own")
    record = start(Submissions(tmp_path / "records"), account(tmp_path))
    assert isinstance(record, Record)
    (file,) = (tmp_path / "records").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600  # it has the job's token
    assert file.parent.stat().st_mode & 0o777 == 0o700
    later = Submissions(tmp_path / "records")
    assert later.find(ID) == record
    assert record.gateway_state() == GatewayState(host="login", alive=False, output="last words")
    assert later.end(record) == "CANCELLED"
    assert later.find(ID) is None
    assert Submissions(tmp_path / "records").find(ID) is None
    home = pwd.getpwuid(os.getuid()).pw_dir  # HOME may be another one
    assert calls.read_text().splitlines() == [f"{action} {home} None" for action in ("start", "state", "end")]


def test_jobs_that_slurm_has_ended_are_cleaned_up_and_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions = Submissions(tmp_path / "records")
    record = start(submissions, account(tmp_path))
    status = {7: JobStatus(job_id=7, state="RUNNING")}
    monkeypatch.setattr(slurm_submission.commands, "jobs", lambda numbers: status)
    assert submissions.running("caller:alice") == [record]
    assert submissions.running("caller:bob") == []
    status[7] = JobStatus(job_id=7, state="TIMEOUT")
    assert submissions.running("caller:alice") == []
    assert submissions.find(ID) is None
    assert list((tmp_path / "records").iterdir()) == []


def test_what_the_login_node_refuses_is_returned_and_not_recorded(tmp_path: Path) -> None:
    submissions = Submissions(tmp_path / "records")
    refused = start(submissions, account(tmp_path, refusal="dict(error='invalid partition')"))
    assert refused == Rejected(error="invalid partition")
    assert submissions.find(ID) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"answers": False}, "with exit code 1: no module"),
        ({"refusal": "dict(nonsense=1)"}, "cannot run .* as "),
        ({"late": True}, "Slurm job 7 was cancelled: this gateway did not confirm it in time"),
        ({"job_id": "ffffffff"}, "started another job than the one that was requested"),
    ],
)
def test_a_program_that_misbehaves_is_an_error(tmp_path: Path, options: dict[str, str], problem: str) -> None:
    submissions = Submissions(tmp_path / "records")
    with pytest.raises(SlurmError, match=problem):
        start(submissions, account(tmp_path, **options))  # type: ignore[arg-type]
    assert submissions.find(ID) is None
    assert list((tmp_path / "records").iterdir()) == []


def test_a_job_is_recorded_before_it_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submissions = Submissions(tmp_path / "records")

    def fail(record: Record) -> NoReturn:
        raise OSError("the disk is full")

    monkeypatch.setattr(submissions, "_keep", fail)
    with pytest.raises(SlurmError, match="the disk is full"):
        start(submissions, account(tmp_path))


def test_a_job_that_another_ends_while_it_is_confirmed_is_known_to_its_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions = Submissions(tmp_path / "records")
    keep = submissions._keep

    def keep_and_end(record: Record) -> None:
        keep(record)
        assert submissions.end(record) == "CANCELLED"

    monkeypatch.setattr(submissions, "_keep", keep_and_end)
    assert start(submissions, account(tmp_path)).job.job_id == 7
    assert submissions.find(ID) is None


def test_a_record_of_which_a_killed_gateway_wrote_a_part_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    for name in (f"{ID}.json", f"{ID}.new"):
        (tmp_path / "records" / name).write_text("{")
    record = start(Submissions(tmp_path / "records"), account(tmp_path))
    assert Submissions(tmp_path / "records").find(ID) == record


def test_a_user_that_was_removed_is_named() -> None:
    job = RunningSlurmJob(
        apply_id=ID, job_id=7, host="", directory="", socket="", pid=0, started="", token="", meshes={}, log_dir=""
    )
    with pytest.raises(SlurmError, match="has no user 'no-such-user'"):
        Account(user="no-such-user", python=sys.executable).run("state", job, GatewayState)


def test_an_unreadable_record_does_not_hide_the_others(tmp_path: Path) -> None:
    record = start(Submissions(tmp_path / "records"), account(tmp_path))
    (tmp_path / "records" / "broken.json").write_text("{")
    assert Submissions(tmp_path / "records").find(ID) == record

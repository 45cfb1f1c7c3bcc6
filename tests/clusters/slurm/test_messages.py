"""Answers of the login node among other output, and the messages of a provisioning gateway."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from meshgate_slurm.messages import (
    JOB_FILE,
    MARK,
    Ended,
    EndJob,
    JobEnded,
    JobList,
    JobReport,
    Rejected,
    RunningSlurmJob,
    StartJob,
    parse_reply,
    parse_request,
    read_answer,
    surrounding_job,
)
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus

JOB = RunningSlurmJob(
    apply_id="0123abcd", job_id=7, host="login", directory="/d", socket="/s", pid=1, started="1", token="secret",
    meshes={"a": 1}, log_dir="/l",
)  # fmt: skip


def test_the_answer_is_found_among_what_start_up_files_print() -> None:
    output = f'Welcome!\n{MARK}{{"state": "CANCELLED"}}\nGoodbye\n'
    assert read_answer(output, Ended) == Ended(state="CANCELLED")
    assert read_answer("Welcome!\n", Ended) is None


def test_a_refusal_takes_the_place_of_an_answer() -> None:
    for kind in (RunningSlurmJob, Ended, JobList):  # also one without required fields
        assert read_answer(f'{MARK}{{"error": "no Slurm"}}', kind) == Rejected(error="no Slurm")


def test_the_answer_of_another_version_is_an_error() -> None:
    with pytest.raises(ValidationError, match="job_id"):
        read_answer(f'{MARK}{{"apply_id": "0123abcd"}}', RunningSlurmJob)


def test_requests_and_replies_keep_their_kind() -> None:
    start = StartJob(apply_id="0123abcd", spec=SlurmSpec(meshes={"a": 1}), client="python train.py")
    for request in (start, EndJob(apply_id="0123abcd")):
        assert parse_request(request.model_dump_json()) == request
    assert parse_reply(JobEnded(state="TIMEOUT").model_dump_json()) == JobEnded(state="TIMEOUT")


@pytest.mark.parametrize("apply_id", ["../../etc", "0123ABCD", "0123", "0123abcd\n"])
def test_an_id_is_safe_as_the_name_of_a_file(apply_id: str) -> None:
    with pytest.raises(ValidationError):
        EndJob(apply_id=apply_id)


def test_a_report_has_what_slurm_has_allocated() -> None:
    names = {"partition": "gpu", "account": "physics", "qos": "high"}
    facts = {"job_id": 7, "time_limit": 60, "end_time": time.time() + 720, **names}
    report = JobReport.of(JobStatus.model_validate({"state": "RUNNING", **facts}), 2)
    assert report.model_dump(include=set(names)) == names
    assert report.time_limit == 3600
    assert 700 < (report.seconds_left or 0) <= 720
    for state in ("PENDING", "TIMEOUT"):
        assert JobReport.of(JobStatus.model_validate({"state": state, **facts}), 2).seconds_left is None


def test_the_token_of_a_job_is_not_in_its_repr() -> None:
    assert "secret" not in repr(JOB)


def test_a_batch_job_is_found_by_its_own_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_FILE, raising=False)
    assert surrounding_job() is None
    (tmp_path / "job.json").write_text(JOB.model_dump_json())
    monkeypatch.setenv(JOB_FILE, str(tmp_path / "job.json"))
    assert surrounding_job() == JOB

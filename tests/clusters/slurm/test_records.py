"""Jobs that another machine of the user has submitted, as the cluster's files and Slurm describe them.

The login node is this machine, with a Slurm of the test's and a home directory of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate import SlurmJob
from meshgate.cli.app import app
from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs.find import find_job, slurm_name
from meshgate_slurm import commands, records
from meshgate_slurm.messages import PYTHON_FILE, RunningSlurmJob
from meshgate_slurm.records import list_jobs, record_job
from meshgate_slurm.spec import SlurmSpec

SQUEUE = "#!/bin/sh\necho squeue >> {directory}/calls\ncat {directory}/queue\n"
SCONTROL = "#!/bin/sh\necho 'ClusterName             = '$(cat {directory}/cluster)\n"
SPEC = SlurmSpec(meshes={"workers": 2}, job_name="train", python_exe="~/a python/bin/python", env={"KEY": "secret"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory; ``queue`` in it is what squeue prints, ``calls`` has a line for each call of it, and
    ``cluster`` is the name of the cluster."""
    (tmp_path / "cluster").write_text("a-1")
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text.format(directory=shlex.quote(str(tmp_path))))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_queue(home: Path, **states: Any) -> None:
    """Slurm's jobs from now on: ``_7="RUNNING"``."""
    jobs = [{"job_id": int(number[1:]), "job_state": [state]} for number, state in states.items()]
    (home / "queue").write_text(json.dumps({"jobs": jobs}))


def recorded(number: int, **facts: Any) -> RunningSlurmJob:
    job = RunningSlurmJob(
        apply_id=f"0123abcd{number}", job_id=number, host="login", directory="/d", socket="/s", pid=1, started="1",
        token="job's", meshes=SPEC.meshes, log_dir="/l",
    ).model_copy(update=facts)  # fmt: skip
    record_job(job, SPEC, commands.cluster_name())
    return job


def files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / ".meshgate/slurm/jobs/a-1").iterdir())


def test_only_the_owner_can_read_the_record_of_a_job(home: Path) -> None:
    recorded(7)
    for path in (home / ".meshgate/slurm/jobs/a-1", *(home / ".meshgate/slurm/jobs/a-1").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert files(home) == ["7.json"]


def test_the_record_of_a_job_does_not_have_the_environment_of_its_workers(home: Path) -> None:
    recorded(7)
    assert "secret" not in (home / ".meshgate/slurm/jobs/a-1/7.json").read_text()
    in_queue(home, _7="RUNNING")
    assert list_jobs().jobs[0].spec.env == {}


def grow_old(home: Path, number: int | str) -> None:
    then = time.time() - records.UNKNOWN_FOR - 1
    os.utime(home / f".meshgate/slurm/jobs/a-1/{number}.json", (then, then))


def test_a_submission_removes_old_records_of_jobs_that_have_ended(home: Path) -> None:
    for number in (5, 6, 7, 8):
        recorded(number)
        if number != 7:
            grow_old(home, number)
    (home / ".meshgate/slurm/jobs/a-1/8.json").write_text("unreadable")
    grow_old(home, 8)
    (home / ".meshgate/slurm/jobs/a-1/5.bak.json").write_text("of the user's own")
    grow_old(home, "5.bak")
    in_queue(home, _5="RUNNING", _6="COMPLETED")
    recorded(9)
    assert [job.job.job_id for job in list_jobs().jobs] == [5]
    (home / ".meshgate/slurm/jobs/a-1/5.bak.json").unlink()
    assert files(home) == ["5.json", "7.json", "9.json"]
    (home / "queue").write_text("Slurm does not answer")
    recorded(10)
    assert files(home) == ["10.json", "5.json", "7.json", "9.json"]


def test_an_old_record_that_cannot_be_read_is_removed_by_a_list(home: Path) -> None:
    recorded(7)
    (home / ".meshgate/slurm/jobs/a-1/7.json").write_text("unreadable")
    in_queue(home)
    assert list_jobs().unreadable == ()
    assert files(home) == ["7.json"]
    grow_old(home, 7)
    list_jobs()
    assert files(home) == []


def test_a_record_that_cannot_be_written_leaves_no_other_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(records.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        recorded(7)
    assert files(home) == []


def test_jobs_are_listed_until_slurm_has_ended_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (9, 7, 8, 6):
        recorded(number)
    in_queue(home, _7="RUNNING", _8="TIMEOUT", _9="PENDING")
    assert [(listed.job.job_id, listed.report.state) for listed in list_jobs().jobs] == [(7, "RUNNING"), (9, "PENDING")]
    assert files(home) == ["6.json", "7.json", "9.json"]  # the first may be that of a cluster of the same name
    monkeypatch.setattr(records, "UNKNOWN_FOR", 0.0)
    in_queue(home)
    assert list_jobs().jobs == ()
    assert files(home) == []
    assert list_jobs().jobs == ()
    assert (home / "calls").read_text() == "squeue\n" * 2  # Slurm is not asked about nothing


def test_clusters_that_share_a_home_directory_see_only_their_own_jobs(home: Path) -> None:
    recorded(7)
    (home / "cluster").write_text("a")
    recorded(7, token="a's")
    in_queue(home, _7="RUNNING")
    assert [listed.job.token for listed in list_jobs().jobs] == ["a's"]
    in_queue(home, _7="COMPLETED")
    assert list_jobs().jobs == ()
    records.forget_job(7)
    (home / "cluster").write_text("a-1")
    in_queue(home, _7="RUNNING")
    assert [listed.job.token for listed in list_jobs().jobs] == ["job's"]
    (home / "cluster").write_text("b")
    with pytest.raises(JobNotRunning):
        SlurmJob.find(7)


def test_jobs_of_another_version_are_named_and_left_alone(home: Path) -> None:
    recorded(7)
    (home / ".meshgate/slurm/jobs/a-1/8.json").write_text('{"format": "of tomorrow"}')
    in_queue(home, _7="RUNNING", _8="RUNNING")
    result = CliRunner().invoke(app, ["ls", "--login", "localhost"])
    assert "Slurm job 8 is not listed: another version of meshgate submitted it" in result.stderr
    assert result.stdout.splitlines()[1].split()[:4] == ["localhost:7", "train", "RUNNING", "workers=2"]
    assert len(result.stdout.splitlines()) == 2
    with pytest.raises(JobError, match="another version of meshgate has submitted Slurm job 8"):
        SlurmJob.find(8)


def test_ls_prints_what_other_commands_take(home: Path) -> None:
    recorded(7)
    in_queue(home, _7="PENDING")
    (row,) = json.loads(CliRunner().invoke(app, ["ls", "--login", "localhost", "--json"]).stdout)["jobs"]
    assert (row["id"], row["name"], row["state"]) == ("localhost:7", "train", "PENDING (not considered yet)")
    assert row["age"] >= 0
    job = find_job(row["id"])
    assert isinstance(job, SlurmJob)
    assert (job.job_id, job.apply_id, job.active) == (7, "0123abcd7", True)
    assert job._arguments["python_exe"] == sys.executable  # of the submission, whatever the other machine's path says
    assert job._require_job().token == "job's"
    in_queue(home)
    assert CliRunner().invoke(app, ["ls", "--login", "localhost"]).stdout == "no Slurm jobs at localhost\n"


def test_kill_takes_a_name_from_the_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(SlurmJob, "_end", lambda job, running: killed.append(running.job_id))
    recorded(7)
    in_queue(home, _7="RUNNING")
    result = CliRunner().invoke(app, ["kill", "localhost:7"])
    assert (result.exit_code, result.stdout) == (0, "ended SlurmJob({'workers': 2}, job 7)\n")
    assert killed == [7]


def test_a_job_that_has_ended_or_is_of_another_program_is_not_found(home: Path) -> None:
    recorded(7)
    in_queue(home, _5="RUNNING", _7="CANCELLED")
    for number in (5, 7):
        with pytest.raises(JobNotRunning, match=f"no running Slurm job {number} that .*`meshgate ls --login localh"):
            SlurmJob.find(number)


def test_a_machine_without_submissions_says_where_they_would_be(home: Path) -> None:
    with pytest.raises(JobError, match=rf"this machine .* has no jobs to list: {PYTHON_FILE} does not run there"):
        SlurmJob.find(7)


def test_the_list_of_a_login_node_has_no_namespaces() -> None:
    for arguments in (["-n", "team"], ["-A"]):
        assert CliRunner().invoke(app, ["ls", "--login", "login", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("me@login:4711", ("me@login", 4711)),
        ("ssh://me@login:22:4711", ("ssh://me@login:22", 4711)),
        ("4711", None),
        (":4711", None),
        ("login:", None),
        ("login:train", None),
        ("saved:1", None),  # a file
    ],
)
def test_the_name_of_a_slurm_job_ends_with_its_number(
    name: str, found: tuple[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saved:1").touch()
    monkeypatch.chdir(tmp_path)
    assert slurm_name(name) == found

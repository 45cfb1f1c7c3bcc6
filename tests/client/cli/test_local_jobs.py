"""``meshgate ls`` and ``meshgate kill`` on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshgate import job_load
from meshgate.cli.app import app
from meshgate.jobs import registry
from meshgate.jobs.registry import LocalEntry
from tests.client.jobs.fake_job import RUNNING, FakeJob


def test_ls_shows_running_jobs_oldest_first(run: CliRunner, jobs: list[LocalEntry]) -> None:
    lines = run.invoke(app, ["ls"]).output.splitlines()
    assert lines[0].split() == ["ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [entry.apply_id, "ProcessJob", "workers=2", str(entry.pid)] for entry in jobs
    ]


def test_ls_shortens_the_home_directory(run: CliRunner, jobs: list[LocalEntry]) -> None:
    home = os.path.expanduser("~")
    for directory, shown in ((f"{home}/project", "~/project"), (home, "~"), (f"{home}-other", f"{home}-other")):
        registry.register(jobs[0].model_copy(update={"directory": directory}))
        assert run.invoke(app, ["ls"]).output.splitlines()[1].split()[-1] == shown


def test_ls_drops_jobs_that_have_ended(run: CliRunner, jobs: list[LocalEntry]) -> None:
    log = registry.log_file(jobs[0].apply_id)
    registry.register(jobs[0].model_copy(update={"started": "before"}))
    assert jobs[0].apply_id not in run.invoke(app, ["ls"]).output
    assert not log.exists()
    assert [entry.apply_id for entry in registry.entries()] == [jobs[1].apply_id]


def test_jobs_of_other_machines_are_listed_and_left_alone(run: CliRunner, jobs: list[LocalEntry]) -> None:
    foreign = jobs[0].model_copy(update={"apply_id": "5ea", "started": "login2:0/boot/1/5"})
    registry.register(foreign)
    log = registry.log_file(foreign.apply_id)
    assert f"{foreign.pid} on login2" in run.invoke(app, ["ls"]).output
    machines = [job["machine"] for job in json.loads(run.invoke(app, ["ls", "--json"]).output)["jobs"]]
    assert sorted(machines) == ["", "", "login2"]
    for command in ("kill", "status"):
        result = run.invoke(app, [command, "5ea"])
        assert result.exit_code != 0
        problem = f"{result.output}{result.exception}".replace("\n", " ")
        assert "was started on login2" in problem
        assert f"remove {log.with_suffix('.json')}" in problem
    assert run.invoke(app, ["kill", "--all"]).exit_code == 0
    assert [entry.apply_id for entry in registry.entries()] == ["5ea"]
    assert log.exists()
    assert run.invoke(app, ["status"]).exit_code == 3  # of this machine's jobs, none is left
    registry.unregister("5ea")


def test_ls_without_jobs(run: CliRunner) -> None:
    assert run.invoke(app, ["ls"]).output == "no jobs on this machine\n"


def test_ls_drops_a_damaged_entry(run: CliRunner) -> None:
    path = registry.log_file("broken").with_suffix(".json")
    path.write_text("{}")
    assert run.invoke(app, ["ls"]).exit_code == 0
    assert not path.exists()
    registry.unregister("broken")


def test_kill_ends_the_named_job(run: CliRunner, jobs: list[LocalEntry]) -> None:
    result = run.invoke(app, ["kill", "0f"])
    assert result.output == f"ended 0f00d (ProcessJob, pid {jobs[0].pid})\n"
    assert jobs[0].process.wait_ended(10)
    assert jobs[1].process.alive


def test_kill_all_ends_all_jobs(run: CliRunner, jobs: list[LocalEntry]) -> None:
    assert run.invoke(app, ["kill", "--all"]).exit_code == 0
    assert not any(entry.process.alive for entry in jobs)
    assert run.invoke(app, ["kill", "--all"]).output == ""


def test_kill_ends_the_job_of_a_file(run: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "job_state.pkl"
    FakeJob(2).state(str(path))
    apply_id = job_load(str(path)).apply_id
    assert apply_id in RUNNING
    result = run.invoke(app, ["kill", str(path)])
    assert result.exit_code == 0
    assert "FakeJob" in result.output
    assert apply_id not in RUNNING
    assert not path.exists()
    result = run.invoke(app, ["kill", str(path)])
    assert result.exit_code != 0
    assert "no job file" in f"{result.output}{result.exception}"


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["x"], 3), ([""], 2)])
def test_kill_without_a_unique_id_ends_nothing(
    run: CliRunner, jobs: list[LocalEntry], arguments: list[str], code: int
) -> None:
    result = run.invoke(app, ["kill", *arguments])
    assert result.exit_code == code
    assert "run `meshgate ls` to list them" in result.output.replace("│", "").replace("\n", " ").replace("  ", " ")
    assert all(entry.process.alive for entry in jobs)


def test_only_the_owner_can_read_entries(jobs: list[LocalEntry]) -> None:
    directory = registry.log_file(jobs[0].apply_id).parent
    assert directory.stat().st_mode & 0o077 == 0
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_entries_are_in_the_temporary_directory_if_the_state_directory_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file instead of a directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert registry.log_file("1").is_relative_to(tmp_path)
    registry.unregister("1")

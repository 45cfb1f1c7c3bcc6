from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshgate.cli import app
from meshgate.jobs import registry
from meshgate.jobs.processes import process_name
from meshgate.jobs.registry import LocalEntry
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden

WAIT = "import sys; sys.stdin.read()"


@pytest.fixture
def run() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def jobs() -> Iterator[list[LocalEntry]]:
    """Two entries, each with a process that is alive."""
    started = [subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) for _ in range(2)]
    entries = []
    for number, process in enumerate(started):
        name = process_name(process.pid)
        assert name is not None
        entries.append(
            LocalEntry(
                apply_id=f"{number}f00d",
                kind="ProcessJob",
                meshes={"workers": 2},
                url="ws://127.0.0.1:1",
                pid=name.pid,
                started=name.started,
                directory=f"/home/{number}",
                created=1.0 + number,
            )
        )
        registry.register(entries[-1])
    yield entries
    for process, entry in zip(started, entries, strict=True):
        process.kill()
        process.communicate()
        registry.unregister(entry.apply_id)


def test_ls_shows_what_runs_oldest_first(run: CliRunner, jobs: list[LocalEntry]) -> None:
    lines = run.invoke(app, ["ls"]).output.splitlines()
    assert lines[0].split() == ["ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [entry.apply_id, "ProcessJob", "workers=2", str(entry.pid)] for entry in jobs
    ]


def test_ls_forgets_what_has_ended(run: CliRunner, jobs: list[LocalEntry]) -> None:
    log = registry.log_file(jobs[0].apply_id)
    registry.register(jobs[0].model_copy(update={"started": "before"}))
    assert jobs[0].apply_id not in run.invoke(app, ["ls"]).output
    assert not log.exists()
    assert [entry.apply_id for entry in registry.entries()] == [jobs[1].apply_id]


def test_ls_without_jobs(run: CliRunner) -> None:
    assert run.invoke(app, ["ls"]).output == "no job runs here\n"


def test_a_damaged_entry_is_dropped(run: CliRunner) -> None:
    path = registry.log_file("broken").with_suffix(".json")
    path.write_text("{}")
    assert run.invoke(app, ["ls"]).exit_code == 0
    assert not path.exists()
    registry.unregister("broken")


def test_kill_ends_the_one_that_is_named(run: CliRunner, jobs: list[LocalEntry]) -> None:
    ended = run.invoke(app, ["kill", "0f"])
    assert ended.output == f"ended 0f00d (ProcessJob, pid {jobs[0].pid})\n"
    assert jobs[0].process.wait_ended(10)
    assert jobs[1].process.alive


def test_kill_all_ends_all(run: CliRunner, jobs: list[LocalEntry]) -> None:
    assert run.invoke(app, ["kill", "--all"]).exit_code == 0
    assert not any(entry.process.alive for entry in jobs)
    assert run.invoke(app, ["kill", "--all"]).output == ""


@pytest.mark.parametrize("arguments", [[], ["2"], [""]])
def test_kill_ends_nothing_that_was_not_clearly_named(
    run: CliRunner, jobs: list[LocalEntry], arguments: list[str]
) -> None:
    refused = run.invoke(app, ["kill", *arguments])
    assert refused.exit_code == 2
    assert "meshgate ls lists them" in refused.output.replace("│", "").replace("\n", " ").replace("  ", " ")
    assert all(entry.process.alive for entry in jobs)


def test_entries_are_their_owners_alone(jobs: list[LocalEntry]) -> None:
    directory = registry.log_file(jobs[0].apply_id).parent
    assert directory.stat().st_mode & 0o077 == 0
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_usable_home_jobs_are_listed_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a directory is wanted")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert registry.log_file("1").is_relative_to(tmp_path)
    registry.unregister("1")


def test_who_may_not_list_the_whole_cluster_is_told_to_name_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def find(self, *what: object) -> object:
            raise Forbidden("list", "configmaps", "", user="bob")

    monkeypatch.setattr(Api, "from_kubeconfig", Refusing)
    ran = CliRunner().invoke(app, ["ls", "-A"])
    assert ran.exit_code == 1
    assert "bob may not list configmaps in all namespaces: name one of yours, -n NAMESPACE" in ran.output

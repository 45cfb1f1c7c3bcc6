"""``meshgate ls``, ``meshgate kill`` and ``meshgate gc``, on this machine and in a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from meshgate import job_load
from meshgate.cli import jobs as jobs_module
from meshgate.cli.app import app
from meshgate.cli.jobs import end_leftovers, find_leftovers
from meshgate.errors import JobError
from meshgate.jobs import registry
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from meshgate.jobs.registry import LocalEntry
from meshgate.jobs.sessions import SessionInfo
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, Unreachable
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.jobs.lifecycle import ListedJob
from tests.client.cli.looks import LIKE_MARKUP
from tests.client.jobs.fake_job import RUNNING, FakeJob
from tests.programs import child_process

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes by /proc")
READY_UNTIL_INPUT_CLOSES = "import sys; print(flush=True); sys.stdin.read()"


def test_ls_prints_json(run: CliRunner, jobs: list[LocalEntry]) -> None:
    found = json.loads(run.invoke(app, ["ls", "--json"]).output)
    assert [(job["id"], job["meshes"], job["pid"]) for job in found["jobs"]] == [
        (entry.apply_id, {"workers": 2}, entry.pid) for entry in jobs
    ]
    ended = run.invoke(app, ["kill", "0f", "--json"]).output
    assert json.loads(ended) == {"ended": [jobs[0].apply_id]}


def test_kill_ends_one_session_of_a_job(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, str | None, str]] = []

    def find(name: str | None, namespace: str | None) -> Any:
        def end(session: str, path: None) -> SessionInfo:
            asked.append((name, namespace, session))
            return SessionInfo(id="0123456789abcdef" * 2, name=session)

        return SimpleNamespace(end_session=end)

    monkeypatch.setattr("meshgate.jobs.find.find_job", find)
    result = run.invoke(app, ["kill", "0f", "--session", "train"])
    assert (result.exit_code, result.output) == (0, "ended session train (id 01234567)\n")
    found = json.loads(run.invoke(app, ["kill", "-n", "team", "--session", "0123", "--json"]).output)
    assert found == {"ended": ["0123456789abcdef" * 2]}
    assert asked == [("0f", None, "train"), (None, "team", "0123")]
    for arguments in (["0f", "1f"], ["--all"]):
        result = run.invoke(app, ["kill", *arguments, "--session", "train"])
        assert (result.exit_code, "one session of one job" in result.output) == (2, True)


def test_scale_changes_the_number_of_hosts_of_a_mesh(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def find(name: str | None, namespace: str | None) -> Any:
        def scale(mesh: str, hosts: int, *, timeout: float | None) -> None:
            asked.append((name, namespace, mesh, hosts, timeout))

        return SimpleNamespace(scale=scale)

    monkeypatch.setattr("meshgate.jobs.find.find_job", find)
    result = run.invoke(app, ["scale", "-n", "team", "trainer", "workers", "8"])
    assert (result.exit_code, result.output) == (0, "mesh workers has 8 hosts\n")
    result = run.invoke(app, ["scale", "job.pkl", "workers", "1", "--timeout", "60", "--json"])
    assert json.loads(result.output) == {"mesh": "workers", "hosts": 1}
    assert asked == [("trainer", "team", "workers", 8, None), ("job.pkl", None, "workers", 1, 60.0)]
    assert run.invoke(app, ["scale", "trainer", "workers", "0"]).exit_code == 2


def test_a_job_of_this_machine_cannot_be_scaled(run: CliRunner, jobs: list[LocalEntry]) -> None:
    result = run.invoke(app, ["scale", "0f", "workers", "3"])
    assert (result.exit_code, "a ProcessJob cannot be scaled: end it" in result.output) == (1, True)


def test_ls_shows_running_jobs_oldest_first(run: CliRunner, jobs: list[LocalEntry]) -> None:
    lines = run.invoke(app, ["ls"]).output.splitlines()
    assert lines[0].split() == ["ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [entry.apply_id, "ProcessJob", "workers=2", str(entry.pid)] for entry in jobs
    ]


def test_ls_shortens_the_home_directory(run: CliRunner, jobs: list[LocalEntry]) -> None:
    home = os.path.expanduser("~")
    for directory, shown in ((f"{home}/project", "~/project"), (home, "~"), (f"{home}-other", f"{home}-other")):
        registry.register(replace(jobs[0], directory=directory))
        assert run.invoke(app, ["ls"]).output.splitlines()[1].split()[-1] == shown


@pytest.mark.parametrize("odd", LIKE_MARKUP)
def test_ls_shows_text_in_brackets_as_it_is(run: CliRunner, jobs: list[LocalEntry], odd: str) -> None:
    registry.register(replace(jobs[0], directory=f"/data/{odd}"))
    result = run.invoke(app, ["ls"])
    assert (result.exit_code, f"/data/{odd}" in result.output) == (0, True)


def test_ls_drops_jobs_that_have_ended(run: CliRunner, jobs: list[LocalEntry]) -> None:
    log = registry.log_file(jobs[0].apply_id)
    registry.register(replace(jobs[0], started="before"))
    assert jobs[0].apply_id not in run.invoke(app, ["ls"]).output
    assert not log.exists()
    assert [entry.apply_id for entry in registry.entries()] == [jobs[1].apply_id]


def test_jobs_of_other_machines_are_listed_and_left_alone(run: CliRunner, jobs: list[LocalEntry]) -> None:
    foreign = replace(jobs[0], apply_id="5ea", started="login2:0/boot/1/5")
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
    path.write_text("{")
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


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["x"], 3)])
def test_kill_without_a_unique_id_ends_nothing(
    run: CliRunner, jobs: list[LocalEntry], arguments: list[str], code: int
) -> None:
    result = run.invoke(app, ["kill", *arguments])
    assert result.exit_code == code
    output = result.output.replace("│", "").replace("\n", " ").replace("  ", " ")
    assert "run `meshgate ls` to list them" in output
    assert ("for a job in a cluster, pass its namespace with -n" in output) == (arguments == ["x"])
    assert all(entry.process.alive for entry in jobs)


@pytest.mark.parametrize("arguments", [[""], ["", "0f"], ["0f", ""], ["--all", ""], ["-n", "team", ""]])
def test_an_empty_id_ends_nothing(run: CliRunner, jobs: list[LocalEntry], arguments: list[str]) -> None:
    registry.unregister(jobs[1].apply_id)  # so that the prefix "" fits one job
    result = run.invoke(app, ["kill", *arguments])
    assert result.exit_code == 2
    assert "the id of the job is empty; run `meshgate ls` to list the jobs" in result.output
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


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were ended, in a cluster with the jobs ``old`` and ``new``."""
    created = time.time() - 7200
    jobs = [
        ListedJob(name="old", namespace="team", uid="1", meshes=None, created=created, owner="alice"),
        ListedJob(name="new", namespace="team", uid="2", meshes={"workers": 2}, created=created, owner=""),
    ]
    ended: list[str] = []
    monkeypatch.setattr(Api, "from_kubeconfig", lambda *path: Mock(context="c", host="https://cluster"))
    monkeypatch.setattr(lifecycle, "list_jobs", lambda api, namespace: jobs if namespace in ("team", "") else [])
    monkeypatch.setattr(lifecycle, "end", lambda api, job: ended.append(job.name))
    return ended


@pytest.mark.usefixtures("ended")
def test_ls_shows_the_jobs_of_a_namespace_or_of_all(run: CliRunner) -> None:
    for arguments in (["-n", "team"], ["-A"]):
        lines = run.invoke(app, ["ls", *arguments]).output.splitlines()
        assert [line.split() for line in lines] == [
            ["NAME", "NAMESPACE", "MESHES", "AGE", "OWNER"],
            ["old", "team", "(another", "meshgate", "version)", "2h", "alice"],
            ["new", "team", "workers=2", "2h"],
        ]
    assert run.invoke(app, ["ls", "-n", "empty"]).output == "no jobs in namespace 'empty'\n"


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were ended behind a provisioning gateway, where this user may use the job ``mine``."""
    ended: list[str] = []
    mine = ListedJob(
        name="mine", namespace="team", uid="1", meshes={"workers": 2}, created=time.time() - 7200, owner="me"
    )

    def find(gateway: Any, name: str, namespace: str) -> None:
        raise JobError(f"job {name!r} belongs to bob")

    monkeypatch.setenv("MESHGATE_URL", "ws://127.0.0.1:1")
    monkeypatch.setenv("MESHGATE_TOKEN", "mine")
    monkeypatch.setattr(RemoteGateway, "list_jobs", lambda gateway, namespace="": [mine])
    monkeypatch.setattr(RemoteGateway, "end", lambda gateway, job, quiet: ended.append(job.name))
    monkeypatch.setattr(RemoteGateway, "find_job", find)
    return ended


def test_ls_also_shows_the_jobs_behind_a_provisioning_gateway(
    run: CliRunner, behind: list[str], jobs: list[LocalEntry]
) -> None:
    output = run.invoke(app, ["ls"]).output
    assert ["mine", "team", "workers=2", "2h", "me"] in [line.split() for line in output.splitlines()]
    assert "0f00d" in output
    assert [row["id"] for row in json.loads(run.invoke(app, ["ls", "-n", "team", "--json"]).output)["jobs"]] == ["mine"]


def test_ls_shows_the_jobs_of_this_machine_if_the_gateway_does_not_answer(
    run: CliRunner, jobs: list[LocalEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_URL", "ws://127.0.0.1:1")
    monkeypatch.setenv("MESHGATE_TOKEN", "mine")
    result = run.invoke(app, ["ls"])
    assert result.exit_code == 0
    assert "meshgate: the jobs behind MESHGATE_URL are not listed: cannot reach the gateway" in result.output
    assert "0f00d" in result.output


def test_kill_behind_a_provisioning_gateway(run: CliRunner, behind: list[str]) -> None:
    assert run.invoke(app, ["kill", "-n", "team", "mine"]).output == "ended team/mine\n"
    assert behind == ["mine"]
    result = run.invoke(app, ["kill", "-n", "team", "mine", "theirs"])
    assert (result.exit_code, "job 'theirs' belongs to bob" in result.output) == (1, True)
    assert behind == ["mine"]


@pytest.mark.parametrize(("arguments", "names"), [(["new"], ["new"]), (["--all"], ["old", "new"])])
def test_kill_ends_the_named_jobs_or_all(
    run: CliRunner, ended: list[str], arguments: list[str], names: list[str]
) -> None:
    assert run.invoke(app, ["kill", "-n", "team", *arguments]).output.splitlines() == [
        f"ended team/{name}" for name in names
    ]
    assert ended == names


@pytest.mark.parametrize(("names", "message", "code"), [(["new", "x"], "no job 'x'", 3), ([], "pass --all", 2)])
def test_kill_of_an_unknown_job_ends_nothing(
    run: CliRunner, ended: list[str], names: list[str], message: str, code: int
) -> None:
    result = run.invoke(app, ["kill", "-n", "team", *names])
    assert result.exit_code == code
    assert message in result.output
    assert ended == []


def test_a_user_who_may_not_list_the_cluster_is_advised_to_name_a_namespace(
    run: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> None:
        raise Forbidden("list", "configmaps", "", user="bob")

    monkeypatch.setattr(Api, "from_kubeconfig", lambda *path: Mock(context="c", host="https://cluster"))
    monkeypatch.setattr(lifecycle, "list_jobs", forbid)
    result = run.invoke(app, ["ls", "-A"])
    assert result.exit_code == 1
    assert "bob may not list configmaps in all namespaces; name one namespace with -n NAMESPACE" in result.output


def test_events_that_cannot_be_read_are_an_error_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Mock(**{"list_objects.side_effect": Unreachable("the API server did not answer")})
    monkeypatch.setattr(jobs_module, "behind_a_gateway", lambda namespace: False)
    monkeypatch.setattr(Api, "from_kubeconfig", lambda *path: api)
    with pytest.raises(JobError, match="the API server did not answer"):  # which the page of `meshgate ui` shows
        jobs_module.objects_and_events("train", "team")


def process(folder: Path, pid: int, command: str, **environment: str) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "cmdline").write_bytes(b"\0".join(part.encode() for part in command.split()) + b"\0")
    variables = (f"{name}={value}" for name, value in environment.items())
    (folder / str(pid) / "environ").write_bytes("\0".join(variables).encode())


@needs_proc
def test_processes_of_jobs_without_a_gateway_are_left_over(tmp_path: Path) -> None:
    process(tmp_path, 11, "python -m meshgate_gateway", MESHGATE_JOB="alive")
    process(tmp_path, 12, "python worker", MESHGATE_JOB="alive")
    process(tmp_path, 13, "python worker --x", A="b", MESHGATE_JOB="ended")
    process(tmp_path, 14, "python other", A="b")
    (tmp_path / "15").mkdir()  # of another user
    (tmp_path / "self").mkdir()
    assert [(found.job, found.pid, found.command) for found in find_leftovers(tmp_path)] == [
        ("ended", 13, "python worker --x")
    ]
    assert find_leftovers(tmp_path / "none") == []


@needs_proc
def test_leftovers_are_ended() -> None:
    job = uuid.uuid4().hex
    command, environment = [sys.executable, "-c", READY_UNTIL_INPUT_CLOSES], {**os.environ, "MESHGATE_JOB": job}
    with child_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        child.stdout.readline()  # before that, Linux may still show an empty environment
        leftovers = [each for each in find_leftovers() if each.job == job]
        assert [each.pid for each in leftovers] == [child.pid]
        end_leftovers(leftovers)
        assert child.wait(60)

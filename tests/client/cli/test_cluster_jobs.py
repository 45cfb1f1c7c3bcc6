"""``meshgate ls`` and ``meshgate kill`` in a cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli.app import app
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.jobs.lifecycle import ListedJob


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were ended, in a cluster with the jobs ``old`` and ``new``."""
    created = time.time() - 7200
    jobs = [
        ListedJob("old", "team", "1", None, created, "alice"),
        ListedJob("new", "team", "2", {"workers": 2}, created, ""),
    ]
    ended: list[str] = []
    monkeypatch.setattr(Api, "from_kubeconfig", lambda: None)
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

    monkeypatch.setattr(Api, "from_kubeconfig", lambda: None)
    monkeypatch.setattr(lifecycle, "list_jobs", forbid)
    result = run.invoke(app, ["ls", "-A"])
    assert result.exit_code == 1
    assert "bob may not list configmaps in all namespaces; name one namespace with -n NAMESPACE" in result.output

"""``meshgate ls`` and ``meshgate kill`` find and end the jobs of a cluster."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from meshgate import Compute, KubernetesJob
from meshgate.cli import app


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_a_forgotten_job_is_listed_and_ended(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run("ls", "-n", namespace) == (0, "no job runs there\n")
    KubernetesJob(compute=Compute(), name="forgotten", namespace=namespace).apply()
    code, told = run("ls", "-n", namespace)
    assert code == 0
    assert "forgotten" in told
    assert "workers=1" in told
    code, told = run("kill", "-n", namespace, "nobody")
    assert (code, "no job 'nobody' runs" in told) == (2, True)
    assert run("kill", "-n", namespace, "forgotten") == (0, f"ended {namespace}/forgotten\n")


def test_a_cluster_that_cannot_be_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("KUBECONFIG", "/no/such/file")
        code, told = run("ls", "-A")
    assert code == 1
    assert "/no/such/file cannot be used" in told

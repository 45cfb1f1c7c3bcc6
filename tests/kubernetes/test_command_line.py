"""``meshgate ls`` and ``meshgate kill`` in a cluster."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from meshgate import Compute, KubernetesJob
from meshgate.cli.app import app


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_a_job_is_listed_and_ended(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run("ls", "-n", namespace) == (0, f"no jobs in namespace {namespace!r}\n")
    KubernetesJob(compute=Compute(), name="forgotten", namespace=namespace).apply()
    code, output = run("ls", "-n", namespace)
    assert code == 0
    assert "forgotten" in output
    assert "workers=1" in output
    code, output = run("kill", "-n", namespace, "unknown")
    assert (code, "there is no job 'unknown'" in output) == (3, True)
    assert run("kill", "-n", namespace, "forgotten") == (0, f"ended {namespace}/forgotten\n")


def test_an_unusable_kubeconfig_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("KUBECONFIG", "/no/such/file")
        code, output = run("ls", "-A")
    assert code == 1
    assert "cannot use the kubeconfig /no/such/file" in output

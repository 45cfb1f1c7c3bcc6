from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from meshgate import Compute
from meshgate.cli import doctor
from meshgate.cli.app import app
from meshgate.doctor.checks import Finding, problem

OK = Finding(check="gateway", outcome="ok", text="answers")
BAD = problem("websocket", "no [upgrade]", "let the ingress forward websockets")


def test_problems_have_remedies_and_exit_with_1(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_findings", lambda *arguments, **options: iter([OK, BAD]))
    result = run.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output == "✓ gateway: answers\n✗ websocket: no [upgrade]\n    → let the ingress forward websockets\n"
    assert json.loads(run.invoke(app, ["doctor", "--json"]).output)["findings"][1]["outcome"] == "problem"


def test_findings_are_printed_as_they_are_found(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []

    def findings(*arguments: object, **options: object) -> Iterator[Finding]:
        yield OK
        printed.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[attr-defined]
        yield BAD

    monkeypatch.setattr(doctor, "_findings", findings)
    run.invoke(app, ["doctor"])
    run.invoke(app, ["doctor", "--json"])
    assert printed == ["✓ gateway: answers\n", ""]


def test_images_are_those_of_a_job_in_a_cluster(run: CliRunner) -> None:
    result = run.invoke(app, ["doctor", "--images"])
    assert (result.exit_code, "--images needs -n" in result.output) == (2, True), result.output


def test_images_are_pulled_with_the_secrets_of_the_job(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Compute] = []

    def check(kubeconfig: None, namespace: str, compute: Compute, *, images: bool) -> list[Finding]:
        asked.append(compute)
        return []

    monkeypatch.setattr(doctor, "check_cluster", check)
    secrets = ["--image-pull-secret", "registry", "--image-pull-secret", "mirror"]
    run.invoke(app, ["doctor", "-n", "team", "--images", *secrets])
    assert [each.worker.image_pull_secrets for each in asked] == [("registry", "mirror")]


def test_the_gateway_is_that_of_either_variable(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_URL", raising=False)
    monkeypatch.setenv("KT_API_URL", "ws://127.0.0.1:1")
    result = run.invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)["findings"][-1]
    assert (result.exit_code, found["check"], found["outcome"]) == (1, "gateway", "problem")


def test_a_cluster_problem_ends_the_checks(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/does/not/exist")
    monkeypatch.setenv("MESHGATE_URL", "ws://127.0.0.1:1")
    found = json.loads(run.invoke(app, ["doctor", "-n", "team", "--json"]).output)["findings"]
    assert found[-1]["check"] == "kubeconfig"
    found = json.loads(run.invoke(app, ["doctor", "--json"]).output)["findings"]
    assert (found[-1]["check"], found[-1]["outcome"]) == ("gateway", "problem")

"""``meshgate top`` of a job of this process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli.app import app
from meshgate.cli.top import command
from meshgate_wire.status import CallCounts, JobStatus
from tests.client.cli.top.looks import status


class Job:
    _hosts: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *counts: CallCounts) -> None:
        self.counts = list(counts)

    def _state(self) -> Job:
        return self

    def status(self) -> JobStatus:
        return status(self.counts.pop(0))

    def __repr__(self) -> str:
        return "the job"


def test_the_command_prints_one_look_or_an_object_on_each_line(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FIRST_INTERVAL", 0.0)
    job = Job(CallCounts(), CallCounts(ended=3, seconds=0.3))
    monkeypatch.setattr(command, "find_job", lambda name, namespace: job)
    text = run.invoke(app, ["top", "--once"]).output
    assert "trainers  abcdef01" in text
    assert "100.0ms" in text
    job.counts = [CallCounts(), CallCounts(ended=3, seconds=0.3)]
    (call,) = json.loads(run.invoke(app, ["top", "--once", "--json"]).output)["calls"]
    assert call["ended"] == 3
    job.counts = [CallCounts(ended=count) for count in (0, 1, 3)]
    result = run.invoke(app, ["top", "--interval", "0.5", "--json"])
    assert [json.loads(line)["calls"][0]["ended"] for line in result.output.splitlines()] == [1, 2]
    assert isinstance(result.exception, IndexError)  # the job of this test has no more to say

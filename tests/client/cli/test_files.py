"""``meshgate sync`` and ``meshgate pull``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import files
from meshgate.cli.app import app
from meshgate.code_sync.push import SyncReport
from meshgate.transfer.download import Pulled


class Job:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def _state(self) -> None:
        self.asked.append("state")

    def sync(self, **options: Any) -> SyncReport:
        self.asked.append(options)
        return SyncReport(version="cafe", files=2, nbytes=7, ready=2, hosts=2, seconds=0.5)

    def pull(self, *arguments: Any) -> Pulled:
        self.asked.append(arguments)
        return Pulled(files=1, size=5, travelled=3, left_out=("a.sock",))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    found = Job()
    monkeypatch.setattr(files, "find_job", lambda name, namespace: found)
    return found


def test_sync_pushes_directories_in_a_session_and_reports_it(run: CliRunner, job: Job) -> None:
    printed = json.loads(run.invoke(app, ["sync", "--dir", "a", "--dir", "b", "--json"]).output)
    assert job.asked == ["state", {"sync_dirs": ["a", "b"], "watch": False, "quiet": True}]
    assert printed == {"version": "cafe", "files": 2, "nbytes": 7, "ready": 2, "hosts": 2, "seconds": 0.5}


def test_pull_reports_what_it_left_out(run: CliRunner, job: Job) -> None:
    printed = json.loads(run.invoke(app, ["pull", "/there", "here", "--rank", "1", "--json"]).output)
    assert job.asked == [("/there", "here", [1], None)]
    assert printed == {"files": 1, "size": 5, "travelled": 3, "left_out": ["a.sock"]}

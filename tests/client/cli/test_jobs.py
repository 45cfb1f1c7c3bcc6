"""``meshgate ls`` and ``meshgate kill`` of either kind of job."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from meshgate.cli.app import app
from meshgate.jobs.registry import LocalEntry


def test_ls_prints_json(run: CliRunner, jobs: list[LocalEntry]) -> None:
    found = json.loads(run.invoke(app, ["ls", "--json"]).output)
    assert [(job["id"], job["meshes"], job["pid"]) for job in found["jobs"]] == [
        (entry.apply_id, {"workers": 2}, entry.pid) for entry in jobs
    ]
    ended = run.invoke(app, ["kill", "0f", "--json"]).output
    assert json.loads(ended) == {"ended": [jobs[0].apply_id]}

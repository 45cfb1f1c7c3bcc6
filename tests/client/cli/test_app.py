"""The commands and their help."""

from __future__ import annotations

import json
import subprocess
import sys
from inspect import signature

import pytest
from typer.testing import CliRunner

import meshgate
from meshgate.cli import leftovers
from meshgate.cli.app import app
from meshgate.cli.models import SCHEMAS, Leftover
from meshgate.jobs.registry import LocalEntry


def test_version_prints_the_version(run: CliRunner) -> None:
    for arguments in (["version"], ["--version"]):
        assert run.invoke(app, arguments).output == f"{meshgate.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Look into meshgate jobs and end them, on this machine or in a cluster."),
        (["ls"], "List running jobs."),
        (["kill"], "End jobs and all their processes or pods."),
        (["version"], "Print the version."),
    ],
)
def test_every_command_has_help(run: CliRunner, arguments: list[str], text: str) -> None:
    assert text in run.invoke(app, [*arguments, "--help"]).output


def test_every_schema_describes_each_field_of_its_command(run: CliRunner) -> None:
    for command in SCHEMAS:
        schema = json.loads(run.invoke(app, ["schema", command]).output)
        assert schema["type"] == "object"
        assert schema["properties"]
    unknown = run.invoke(app, ["schema", "version"])
    assert unknown.exit_code == 2
    assert "prints no JSON; commands that do: ls, kill" in unknown.output


def test_every_command_that_prints_json_has_a_schema() -> None:
    commands = {info.name for info in app.registered_commands if "as_json" in signature(info.callback).parameters}
    assert commands == set(SCHEMAS)


def test_ls_prints_json(run: CliRunner, jobs: list[LocalEntry]) -> None:
    found = json.loads(run.invoke(app, ["ls", "--json"]).output)
    assert [(job["id"], job["meshes"], job["pid"]) for job in found["jobs"]] == [
        (entry.apply_id, {"workers": 2}, entry.pid) for entry in jobs
    ]
    ended = run.invoke(app, ["kill", "0f", "--json"]).output
    assert json.loads(ended) == {"ended": [jobs[0].apply_id]}


def test_commands_without_a_job_exit_with_3(run: CliRunner) -> None:
    for command in (["status"], ["describe"], ["logs"], ["sync"], ["pull", "a", "b"]):
        result = run.invoke(app, command)
        assert (result.exit_code, "no job runs on this machine" in result.output) == (3, True)


def test_gc_asks_before_it_ends_anything(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Leftover] = []
    found = [Leftover(job="cafe", pid=7, command="python worker")]
    monkeypatch.setattr(leftovers, "find_leftovers", lambda: found)
    monkeypatch.setattr(leftovers, "end_leftovers", ended.extend)
    assert "not ended; pass --yes" in run.invoke(app, ["gc"]).output
    assert json.loads(run.invoke(app, ["gc", "--json"]).output)["ended"] is False
    assert ended == []
    assert run.invoke(app, ["gc", "--yes"]).output.endswith("ended\n")
    assert ended == found
    found.clear()
    assert run.invoke(app, ["gc"]).output == "nothing to end\n"


def test_importing_meshgate_loads_no_part_of_the_command_line() -> None:
    code = "import sys, meshgate; print([name for name in ('typer', 'rich', 'meshgate.cli') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

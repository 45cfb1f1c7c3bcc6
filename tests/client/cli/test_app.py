"""The commands and their help."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import meshgate
from meshgate.cli import jobs
from meshgate.cli.app import COMMANDS, app
from meshgate.cli.models import Leftover


def test_version_prints_the_version(run: CliRunner) -> None:
    for arguments in (["version"], ["--version"]):
        assert run.invoke(app, arguments).output == f"{meshgate.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Show and end meshgate jobs, on this machine or in a cluster."),
        (["ls"], "List running jobs."),
        (["kill"], "End jobs and all their processes or pods."),
        (["version"], "Print the version."),
    ],
)
def test_every_command_has_help(run: CliRunner, arguments: list[str], text: str) -> None:
    assert text in run.invoke(app, [*arguments, "--help"]).output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_begins_its_help_and_fits_a_terminal(run: CliRunner, name: str) -> None:
    summary = COMMANDS[name].summary
    assert (COMMANDS[name].load(name).help or "").splitlines()[0] == summary
    listed = run.invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert f"  {name:<8}  {summary}\n" in listed


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("stauts", "No such command 'stauts'. Did you mean 'status'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        ("--stauts", "No such option: --stauts"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_closest(run: CliRunner, command: str, text: str) -> None:
    result = run.invoke(app, [command])
    assert result.exit_code == 2
    assert text in result.output.splitlines()[-1]


def test_completion_after_a_misspelt_command_has_nothing_to_offer() -> None:
    group: Any = typer.main.get_command(app)
    with group.make_context("meshgate", ["stauts", ""], resilient_parsing=True) as context:
        assert group.resolve_command(context, ["stauts", ""])[1] is None


def test_the_package_runs_as_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "stauts"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("meshgate", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Usage: meshgate [OPTIONS] COMMAND")


SLOW_MODULES = [
    "pydantic",
    "rich.console",
    "asyncio",
    "websockets",
    "monarch",
    "kubernetes",
    "meshgate_wire",
    "meshgate.proxies",
    "meshgate.session",
    "meshgate.jobs.trait",
]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--version"], []),
        (["--help"], []),
        (["ls"], ["pydantic", "rich.console"]),  # in the order of SLOW_MODULES
        (["kill", "--help"], ["pydantic"]),
    ],
    ids="-".join,  # so no sets: xdist needs the same ids in each process
)
def test_what_needs_no_client_imports_none(arguments: list[str], needed: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from meshgate.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        f"finally: print('loaded', *(name for name in {SLOW_MODULES} if name in sys.modules))"
    )
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.splitlines()[-1].split()[1:] == needed


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("meshgate st", "status stop stacks"),
        ("meshgate logs --f", "--follow"),
        ("meshgate top --sort ", "rank cpu memory gpu"),
        ("meshgate x", ""),
    ],
)
def test_a_shell_completes_commands_options_and_values(typed: str, completed: str) -> None:
    words = typed.split(" ")
    environment = {"_MESHGATE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", "from meshgate.cli.app import app; app(prog_name='meshgate')"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert (ran.stdout.split(), ran.stderr) == (completed.split(), "")


@pytest.mark.parametrize(("arguments", "code"), [(["ls"], 0), (["ls", "--jsn"], 2), (["nothing"], 2), (["status"], 3)])
def test_the_exit_code_says_what_happened(run: CliRunner, arguments: list[str], code: int) -> None:
    assert run.invoke(app, arguments).exit_code == code


def test_commands_without_a_job_exit_with_3(run: CliRunner) -> None:
    for command in (["status"], ["describe"], ["logs"], ["sync"], ["pull", "a", "b"]):
        result = run.invoke(app, command)
        assert (result.exit_code, "no job runs on this machine" in result.output) == (3, True)


def test_gc_asks_before_it_ends_anything(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Leftover] = []
    found = [Leftover(job="cafe", pid=7, command="python worker")]
    monkeypatch.setattr(jobs, "find_leftovers", lambda: found)
    monkeypatch.setattr(jobs, "end_leftovers", ended.extend)
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

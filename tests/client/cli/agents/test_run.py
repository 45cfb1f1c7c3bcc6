from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from meshgate.cli.agents.run import Edit, apply_edits
from meshgate.cli.app import app
from tests.waiting import DEADLINE


def result_of(run: CliRunner, *arguments: str) -> dict[str, Any]:
    result = run.invoke(app, ["run", "--json", *arguments])
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == found["returncode"] % 256
    return found


def test_a_program_runs_as_python_runs_it(run: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 5\n")
    program = tmp_path / "program.py"
    program.write_text("import sys, beside\nprint(__name__, __file__, sys.argv[1:], beside.x)\nsys.exit(3)\n")
    found = result_of(run, str(program), "--flag", "a b")
    assert found["stdout"] == f"__main__ {program} ['--flag', 'a b'] 5\n"
    assert (found["returncode"], found["error"], found["stderr"]) == (3, None, "")


def test_the_exception_that_ends_a_program_is_data_and_is_printed(run: CliRunner) -> None:
    found = result_of(run, "--code", "def f():\n    raise KeyError('k')\nprint('before')\nf()\n")
    assert (found["returncode"], found["stdout"]) == (1, "before\n")
    assert (found["error"]["type"], found["error"]["message"]) == ("KeyError", "'k'")
    assert found["error"]["traceback"] == found["stderr"]
    assert found["stderr"].count("File ") == 2
    assert result_of(run, "--code", "def")["error"]["type"] == "SyntaxError"


def test_edits_are_made_before_the_program_runs(
    run: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    edit = json.dumps({"file": "made.py", "new": "x = 7\n"})
    assert result_of(run, "--edit", edit, "--code", "import made; print(made.x)")["stdout"] == "7\n"
    failed = run.invoke(app, ["run", "--json", "--edit", '{"file": "made.py"}', "--code", ""])
    assert (failed.exit_code, failed.stdout) == (2, "")
    unfit = run.invoke(app, ["run", "--json", "--edit", '{"file": "made.py", "old": "q", "new": ""}', "--code", ""])
    assert (unfit.exit_code, "occurs 0 times" in unfit.stderr) == (1, True)


def test_a_program_that_takes_too_long_is_ended(run: CliRunner) -> None:
    result = run.invoke(app, ["run", "--json", "--timeout", "0.1", "--code", "import time; time.sleep(600)"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["returncode"]) == (143, -15)
    assert found["error"]["type"] == "TimeoutError"
    text = run.invoke(app, ["run", "--timeout", "0.1", "--code", "import time; time.sleep(600)"])
    assert (text.exit_code, text.stdout) == (143, "")
    assert text.stderr == "meshgate: the program was ended after 0.1 s\n"


PROGRAM = """
import os, pathlib, signal, sys, time
def handle(number, frame):
    if number == signal.SIGINT:
        time.sleep(1)  # longer than subprocess waits for a process after Ctrl-C
        print("interrupted", flush=True)
        sys.exit(7)
    print("terminated", flush=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handle)
print(os.getpid(), flush=True)
while True:
    time.sleep(600)
"""


@pytest.fixture
def command() -> Iterator[Callable[[float], tuple[subprocess.Popen[str], int]]]:
    """Starts ``meshgate run`` with the program above, which has the time to end; returns it and the program's pid."""
    pids: list[int] = []

    def start(end_timeout: float) -> tuple[subprocess.Popen[str], int]:
        code = f"from meshgate.cli.agents import run; run.END_TIMEOUT = {end_timeout}; "
        arguments = [sys.executable, "-c", f"{code}from meshgate.cli.app import app; app()", "run", "--code", PROGRAM]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        pids.append(process.pid)
        return process, int(process.stdout.readline())

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # else it has left the program running
            os.killpg(pid, signal.SIGKILL)


Command: TypeAlias = "Callable[[float], tuple[subprocess.Popen[str], int]]"


def test_a_second_sigterm_kills_the_program(command: Command) -> None:
    process, program = command(600.0)
    with process:
        assert process.stdout is not None
        process.terminate()
        assert process.stdout.readline() == "terminated\n"
        process.terminate()
        assert process.wait(DEADLINE) == 143
    assert not Path("/proc", str(program)).exists()


def test_a_ctrl_c_that_does_not_reach_the_program_ends_it_after_a_while(command: Command) -> None:
    process, program = command(0.2)
    with process:
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130
        assert process.stdout is not None
        assert "interrupted" not in process.stdout.read()
    assert not Path("/proc", str(program)).exists()


def test_after_a_ctrl_c_in_a_terminal_the_program_has_time_to_end(command: Command) -> None:
    process, program = command(600.0)
    with process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE) == 130
        assert process.stdout is not None
        assert process.stdout.read() == "interrupted\n"
    assert not Path("/proc", str(program)).exists()


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["x" * 300], ["a.py", "--code", "b"]])
def test_one_program_is_named(run: CliRunner, arguments: list[str]) -> None:
    assert run.invoke(app, ["run", *arguments]).exit_code == 2


def test_edits_apply_in_order_and_keep_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    apply_edits(
        [
            Edit(file="a.py", old="x = 1", new="x = 3"),
            Edit(file="a.py", old="x = 3", new="x = 4"),
            Edit(file="new/b.py", new="z = 0\n"),
        ],
        tmp_path,
    )
    assert (tmp_path / "a.py").read_bytes() == b"x = 4\r\ny = 2\r\n"
    assert (tmp_path / "new" / "b.py").read_bytes() == b"z = 0\n"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit(file="a.py", old="x", new="z"), "occurs 2 times in a.py"),
        (Edit(file="a.py", old="q", new="z"), "occurs 0 times in a.py"),
        (Edit(file="b.py", old="x", new="z"), "cannot read b.py"),
        (Edit(file="../b.py", new="z"), "is outside"),
    ],
)
def test_no_file_changes_if_an_edit_does_not_fit(edit: Edit, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = x\n")
    with pytest.raises(ValueError, match=message):
        apply_edits([Edit(file="a.py", new="changed"), edit][edit.file == "a.py" :], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
    assert (tmp_path / "a.py").read_text() == "x = x\n"


def test_no_file_changes_if_one_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "folder").mkdir()
    edits = [Edit(file="new/b.py", new=""), Edit(file="a.py", old="1", new="2"), Edit(file="folder", new="")]
    with pytest.raises(ValueError, match=r"cannot write folder: Is a directory\. No file was changed"):
        apply_edits(edits, tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.py"]


def test_edits_keep_the_mode_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "a.py").chmod(0o750)
    apply_edits([Edit(file="a.py", old="1", new="2")], tmp_path)
    assert ((tmp_path / "a.py").read_text(), (tmp_path / "a.py").stat().st_mode & 0o777) == ("x = 2\n", 0o750)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


SETTINGS = "import meshgate, sys\ns = meshgate.ClientSettings.load()\nprint(s.output, s.log_dir, sys.argv[1:])\n"


def test_options_before_the_program_say_where_output_goes_and_those_after_it_are_its_own(
    run: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(SETTINGS)
    found = result_of(run, "--quiet", "--log-dir", "logs", str(program), "--log-dir", "its own")
    assert found["stdout"] == f"False {tmp_path}/logs ['--log-dir', 'its own']\n"
    assert result_of(run, str(program), "-q")["stdout"] == "True None ['-q']\n"

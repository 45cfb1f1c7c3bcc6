"""How commands print and fail."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from meshgate.cli.console import CommandGroup, age_text, console, emit, new_table
from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs import signals
from meshgate.progress import new_console
from meshgate_sync.errors import TreeError


class Result(BaseModel):
    count: int


app = typer.Typer(cls=CommandGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def mark() -> None:
    console().print("\u2713 done")


@app.command()
def work(what: str) -> None:
    errors: dict[str, BaseException] = {
        "ended": JobNotRunning("the job has ended"),
        "failed": JobError("it failed"),
        "link": TreeError("links that lead out of the tree: a"),
        "rank": ValueError("ranks=9: the mesh has ranks 0 to 1"),
        "interrupt": KeyboardInterrupt(),
        "full": OSError(errno.ENOSPC, "No space left on device"),
    }
    if what in errors:
        raise errors[what]
    emit(Result(count=2), what == "json", lambda console: console.print("two"))


@app.command()
def stop_oneself(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.sigtimedwait([], 10)  # the handler raises here at the latest


@app.command()
def other() -> None:
    """Without a second command there would be no group."""


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("ended", 3, "meshgate: the job has ended\n"),
        ("failed", 1, "meshgate: it failed\n"),
        ("link", 1, "meshgate: links that lead out of the tree: a\n"),
        ("rank", 1, "meshgate: ranks=9: the mesh has ranks 0 to 1\n"),
        ("interrupt", 130, ""),
        ("full", 1, "meshgate: cannot write the output: No space left on device\n"),
        ("json", 0, '{\n  "count": 2\n}\n'),
        ("text", 0, "two\n"),
    ],
)
def test_the_exit_code_says_what_happened(what: str, code: int, text: str) -> None:
    result = CliRunner().invoke(app, ["work", what])
    assert (result.exit_code, result.output) == (code, text)


@pytest.mark.parametrize("asked", ["", "full"])
@pytest.mark.parametrize("arguments", [(errno.EACCES, "no access", "a file"), (errno.ECHILD, "a bug")])
def test_an_error_keeps_its_traceback_unless_it_names_a_file(
    arguments: tuple[Any, ...], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(*arguments)
    monkeypatch.setenv("MESHGATE_TRACEBACK", asked)
    monkeypatch.setattr("tests.client.cli.test_console.emit", Mock(side_effect=error))
    result = CliRunner().invoke(app, ["work", "text"])
    if error.filename and not asked:
        assert (result.exit_code, result.output) == (1, "meshgate: a file: no access\n")
    else:
        assert result.exception is error


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"]])
def test_help_on_a_full_disk_is_a_failure_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "meshgate", *arguments]
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "meshgate: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_command_lets_it_clean_up(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_blocks", 0)  # fixtures of other modules may hold a job in a with block
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert CliRunner().invoke(app, ["stop-oneself", str(int(number))]).exit_code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_table_on_a_pipe_is_as_wide_as_what_it_contains(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("NAME", "REASON")
    table.add_row("a" * 100, "why " * 100)
    console().print(table)
    assert ["a" * 100, *["why"] * 100] == capsys.readouterr().out.splitlines()[1].split()


def test_a_narrow_terminal_cuts_the_first_column_last() -> None:
    table = new_table("ID", "MESHES", "DIRECTORY")
    table.add_row("c48b1a2e", "workers=2 loaders=16", "/home/user/a/long/path")
    narrow = new_console(file=io.StringIO(), width=30)
    narrow.print(table)
    assert "c48b1a2e " in narrow.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599.9, "59m59s"),
        (5400, "1h30m"),
        (7259, "2h"),
        (86400 * 1.5, "1d12h"),
        (86400 * 3, "3d"),
    ],
)
def test_an_age_has_at_most_two_units_and_is_rounded_down(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def test_characters_that_the_encoding_does_not_have_are_escaped() -> None:
    done = CliRunner(charset="ascii").invoke(app, ["mark"])
    assert (done.exit_code, done.stdout_bytes) == (0, b"\\u2713 done\n")

"""``meshgate run``: runs a program on this machine; with ``--json``, its output and its exception as data."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate.cli.agents.program import BOOTSTRAP
from meshgate.cli.console import AsJson, emit
from meshgate.cli.models import ErrorReport, Ran

MOST_OUTPUT = 64 * 1024  # bytes of each stream, the last ones
END_TIMEOUT = 15.0  # seconds for a program that has run too long to end its job
M = TypeVar("M", bound=BaseModel)

Edits = Annotated[
    list[str] | None,
    typer.Option("--edit", metavar="JSON", help='Edit first: {"file": …, "old": …, "new": …}; may be repeated.'),
]


LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="DIR", help="Also write what each rank prints to DIR/MESH/RANK.log."),
]


def run_command(
    program: Annotated[str | None, typer.Argument(metavar="PROGRAM", help="A Python file.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Its arguments.")] = None,
    code: Annotated[str | None, typer.Option("--code", help="The program itself, instead of a file.")] = None,
    edits: Edits = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds after which the program is ended.")
    ] = None,
    log_dir: LogDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what the ranks print.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a Python program here, and exit with its exit code.

    With --json, prints its output and the exception that ended it, with what each rank raised.
    """
    if (program is None) == (code is None):
        raise typer.BadParameter("name a program, or pass --code")
    make_edits(edits)
    with tempfile.TemporaryDirectory(prefix="meshgate-run-") as directory:
        path = Path(directory, "program.py") if program is None else Path(program)
        if code is not None:
            path.write_text(code, encoding="utf-8")
        elif not os.path.isfile(path):
            raise typer.BadParameter(f"there is no file {program}")
        modules = os.getcwd() if program is None else str(path.resolve().parent)
        variables = {"MESHGATE_LOG_DIR": os.path.abspath(log_dir)} if log_dir is not None else {}
        variables |= {"MESHGATE_OUTPUT": "off"} if quiet else {}
        ran = run_program(
            path, arguments or (), modules, Path(directory), timeout, capture=as_json, variables=variables
        )
    emit(ran, as_json, lambda console: None)
    raise typer.Exit(ran.returncode if ran.returncode >= 0 else 128 - ran.returncode)


def make_edits(edits: Sequence[str] | None) -> None:
    """Makes the edits, each in JSON, in the working directory."""
    try:
        apply_edits([Edit.model_validate_json(text) for text in edits or ()], Path.cwd())
    except ValidationError as error:
        raise typer.BadParameter(f"--edit: {error.errors()[0]['msg']}") from None


def run_program(
    program: Path,
    arguments: Sequence[str],
    modules: str,
    directory: Path,
    timeout: float | None,
    *,
    capture: bool,
    variables: Mapping[str, str],
) -> Ran:
    """Runs ``program``, which finds modules in ``modules`` and has ``variables`` in its environment.

    Its error and output are kept in ``directory`` meanwhile: in files, since what the program leaves running may keep
    its streams open.
    """
    report, out, err = (directory / name for name in ("error.json", "stdout", "stderr"))
    command = [sys.executable, "-c", BOOTSTRAP, str(report), modules, str(program), *arguments]
    started = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr} if capture else {}
        process = subprocess.Popen(command, env={**os.environ, **variables}, **streams)  # type: ignore[call-overload]
        in_time = _wait(process, timeout)
    seconds = round(time.monotonic() - started, 3)
    error = ErrorReport.model_validate_json(report.read_bytes()) if report.exists() else None
    if not in_time:
        error = ErrorReport(type="TimeoutError", message=f"the program was ended after {timeout:g} s")
        if not capture:
            typer.echo(f"meshgate: {error.message}", err=True)
    return Ran(returncode=process.returncode, stdout=_tail(out), stderr=_tail(err), error=error, seconds=seconds)


def _wait(process: subprocess.Popen[bytes], timeout: float | None) -> bool:
    """Whether the process has ended by itself. Otherwise it was ended, as by SIGTERM, which raises SystemExit. Ctrl-C
    in a terminal reaches both, so the process has time to end by itself. Another signal meanwhile kills it."""
    try:
        process.wait(timeout)
        return True
    except subprocess.TimeoutExpired:
        _end(process)
        return False
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT)
        _end(process)
        raise
    except SystemExit:
        _end(process)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_OUTPUT))
        return file.read().decode(errors="replace")


# Either all are made, or none.


class Edit(BaseModel):
    """``old`` is replaced by ``new`` in ``file``; without ``old``, ``new`` is the file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(min_length=1, description="relative to the directory of the command")
    old: str | None = Field(default=None, min_length=1, description="occurs exactly once; absent: the file is written")
    new: str


def apply_edits(edits: Sequence[Edit], directory: Path) -> None:
    """Writes the files below ``directory``. Raises ValueError, and changes no file, if an edit does not fit or a file
    cannot be written."""
    contents: dict[Path, str] = {}
    for edit in edits:
        path = (directory / edit.file).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise ValueError(f"{edit.file} is outside {directory}")
        contents[path] = edit.new if edit.old is None else _replaced(edit, edit.old, path, contents)
    with contextlib.ExitStack() as drafts:
        for path, content in contents.items():
            try:
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                drafts.callback(_draft(path).unlink, missing_ok=True)
                _write_draft(path, content)
            except OSError as error:
                name = path.relative_to(directory.resolve())
                raise ValueError(f"cannot write {name}: {error.strerror}. No file was changed") from error
        for path in contents:
            _draft(path).replace(path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.meshgate-edit")


def _write_draft(path: Path, content: str) -> None:
    if path.exists():
        path.open("r+b").close()  # raises if the file may not be written, though its directory may be
    path.parent.mkdir(parents=True, exist_ok=True)
    with _draft(path).open("w", encoding="utf-8", newline="") as file:
        file.write(content)
    if path.exists():
        shutil.copymode(path, _draft(path))


def _replaced(edit: Edit, old: str, path: Path, contents: dict[Path, str]) -> str:
    if path in contents:
        content = contents[path]
    else:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                content = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {edit.file}: {error}") from error
    if (count := content.count(old)) != 1:
        raise ValueError(
            f"the text to replace occurs {count} times in {edit.file}; it must occur once. No file was changed"
        )
    return content.replace(old, edit.new)

"""How commands print and fail: JSON, text or tables on stdout, errors on stderr, and what each exit code means."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from meshgate.caller import TRACEBACK
from meshgate.errors import JobNotRunning, MeshgateError
from meshgate.jobs.signals import catch_end_signals, restore_signals
from meshgate.progress import new_console
from meshgate_sync.errors import TreeError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

    from meshgate_wire.status import JobStatus


FAILED = 1
NO_JOB = 3
INTERRUPTED = 130
UNLIMITED_WIDTH = 10_000  # columns
OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})  # click handles the end of a pipe


Job = Annotated[
    str | None, typer.Argument(metavar="JOB", help="An id that `meshgate ls` lists, a job file, or with -n a name.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="The job is in this namespace of a Kubernetes cluster.")
]
Mesh = Annotated[str | None, typer.Option("--mesh", help="The host mesh; the default is the only one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; `meshgate schema COMMAND` prints its schema.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="A variable to set, as NAME=VALUE.")]
Workdir = Annotated[str | None, typer.Option("--workdir", help="The directory in which it runs.")]


class CommandGroup(TyperGroup):
    """The group of all commands: turns meshgate's errors into a message and an exit code.

    SIGTERM, and the SIGHUP of a terminal that is closed, end a command as Ctrl-C does: it closes its session, and with
    it ends what it runs on the hosts. Characters that the terminal's encoding does not have are escaped.
    """

    def make_context(self, *args: Any, **options: Any) -> Any:  # prints the help and the version
        try:
            return super().make_context(*args, **options)
        except OSError as error:
            _fail_if_of_file(error)

    def invoke(self, ctx: Any) -> Any:  # of click, or of the copy that typer brings
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        signals_caught = catch_end_signals()
        try:
            return super().invoke(ctx)
        except JobNotRunning as error:
            fail(str(error), NO_JOB)
        except (MeshgateError, TreeError, ValueError, TimeoutError) as error:
            fail(str(error))
        except OSError as error:
            _fail_if_of_file(error)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:
            if signals_caught:
                restore_signals()


def _fail_if_of_file(error: OSError) -> NoReturn:
    """Exits if ``error`` names a file or comes from a write to stdout; raises it if not. ``MESHGATE_TRACEBACK=full``
    shows where a file was used."""
    if error.filename is not None and os.environ.get(TRACEBACK) != "full":
        fail(f"{error.filename}: {error.strerror}")
    if error.filename is not None or error.errno not in OUTPUT_ERRORS:
        raise error
    fail(f"cannot write the output: {error.strerror}")


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Prints ``message`` on stderr and exits with ``code``."""
    typer.echo(f"meshgate: {message}", err=True)
    raise typer.Exit(code) from None


def emit(result: BaseModel, as_json: bool, render: Callable[[Console], object]) -> None:
    """Prints ``result`` as JSON, or as ``render`` prints it."""
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        render(console())


def console() -> Console:
    """On a terminal, tables fit its width; elsewhere they have the width of what they contain, and cut nothing."""
    found = new_console(soft_wrap=True)
    if not found.is_terminal:
        found.width = UNLIMITED_WIDTH
    return found


def new_table(*columns: str) -> Table:
    """A table as kubectl prints them. A narrow terminal cuts the first column, of names or IDs, last."""
    from rich.table import Column, Table  # noqa: PLC0415

    headings = (Column(name, no_wrap=number == 0) for number, name in enumerate(columns))
    return Table(*headings, box=None, pad_edge=False, header_style="bold")


def meshes_text(meshes: Mapping[str, int] | None) -> str:
    """``workers=2 loaders=1``. None: the job is another version's."""
    if meshes is None:
        return "(another meshgate version)"
    return " ".join(f"{name}={count}" for name, count in meshes.items())


def kept_bytes(status: JobStatus) -> dict[str, int]:
    """Roughly what stays in processes, by the name of their mesh; without meshes that keep nothing."""
    found: dict[str, int] = {}
    for mesh in (mesh for session in status.sessions for mesh in session.meshes if mesh.kept):
        found[mesh.name] = found.get(mesh.name, 0) + mesh.kept
    return found


def kept_text(kept: Mapping[str, int]) -> str:
    """``procs 4.0 MB, loaders 1.2 MB``."""
    return ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in kept.items())


def duration_text(seconds: float) -> str:
    """``25.0ms``, ``1.2s``."""
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"


def age_text(seconds: float | None) -> str:
    """``5s``, ``12m30s``, ``3h``, ``2d1h``: two units at most, rounded down; empty if it is not known."""
    if seconds is None:
        return ""
    for unit, length, part, size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= length:
            rest = int(seconds % length // size)
            return f"{seconds // length:.0f}{unit}" + (f"{rest}{part}" if rest else "")
    return f"{int(seconds)}s"

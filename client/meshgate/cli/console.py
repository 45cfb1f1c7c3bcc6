"""How commands print and fail: JSON or text on stdout, errors on stderr, and what each exit code means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console
from typer.core import TyperGroup

from meshgate.errors import JobNotRunning, MeshgateError

__all__ = ["Commands", "console", "emit", "fail"]

FAILED = 1
NO_JOB = 3
INTERRUPTED = 130
UNLIMITED_WIDTH = 10_000  # columns


class Commands(TyperGroup):
    """The group of all commands: turns meshgate's errors into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:  # of click, or of the copy that typer brings
        try:
            return super().invoke(ctx)
        except JobNotRunning as error:
            fail(str(error), NO_JOB)
        except (MeshgateError, ValueError, TimeoutError) as error:
            fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


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
    found = Console(highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = UNLIMITED_WIDTH
    return found

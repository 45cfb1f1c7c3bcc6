"""The command line: what runs here, and the end of it."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import meshgate
from meshgate.jobs import registry
from meshgate.jobs.gateway_process import end_gateway

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Jobs of meshgate that run on this machine.")


@app.command("ls")
def list_jobs() -> None:
    """Lists the running jobs: id, kind, hosts of each mesh, process of the gateway, age, where it was started."""
    table = Table("ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY", box=None, pad_edge=False, header_style="bold")
    for entry in registry.entries():
        meshes = " ".join(f"{name}={count}" for name, count in entry.meshes.items())
        age = _age(time.time() - entry.created)
        table.add_row(entry.apply_id[:8], entry.kind, meshes, str(entry.pid), age, _short(entry.directory))
    Console().print(table if table.row_count else "no job runs here", soft_wrap=True)


@app.command("kill")
def kill_jobs(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="ids, or how they begin")] = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="every job of yours on this machine")] = False,
) -> None:
    """Ends jobs, with every process of theirs."""
    running = list(registry.entries())
    if not ids and not all_jobs:
        raise typer.BadParameter("name the jobs to end, or say --all; meshgate ls lists them")
    chosen = running if all_jobs else [_the_one(running, prefix) for prefix in ids or []]
    for entry in chosen:
        end_gateway(entry.process, entry.apply_id)
        registry.unregister(entry.apply_id)
        typer.echo(f"ended {entry.apply_id[:8]} ({entry.kind}, pid {entry.pid})")


@app.command("version")
def show_version() -> None:
    """Prints the version."""
    typer.echo(meshgate.__version__)


def _the_one(running: list[registry.LocalEntry], prefix: str) -> registry.LocalEntry:
    found = [entry for entry in running if entry.apply_id.startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} jobs begin with" if found else "no running job begins with"
        raise typer.BadParameter(f"{what} {prefix!r}; meshgate ls lists them")
    return found[0]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _short(directory: str) -> str:
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if directory == home or directory.startswith(f"{home}/") else directory

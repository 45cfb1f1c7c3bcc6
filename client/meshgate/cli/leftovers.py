"""``meshgate gc``: processes on this machine of jobs whose gateway is gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshgate.cli.console import emit
from meshgate.cli.models import Leftover, Leftovers
from meshgate.cli.options import AsJson
from meshgate.jobs.this_machine.local_gateway import JOB_VARIABLE
from meshgate_processes.marks import end_processes

GATEWAY_MODULE = b"meshgate_gateway"


def find_leftovers(proc: Path = Path("/proc")) -> list[Leftover]:
    """This user's processes that have a job's mark, if none of that job is its gateway. Empty without ``/proc``."""
    jobs: dict[str, list[tuple[int, list[bytes]]]] = {}
    for entry in proc.iterdir() if proc.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:  # has ended, or belongs to another user
            continue
        for variable in environment:
            name, _, job = variable.partition(b"=")
            if name == JOB_VARIABLE.encode() and job and command != [b""]:
                jobs.setdefault(job.decode(errors="replace"), []).append((int(entry.name), command))
    return [
        Leftover(job=job, pid=pid, command=b" ".join(command).decode(errors="replace")[:200])
        for job, processes in sorted(jobs.items())
        if not any(GATEWAY_MODULE in command[1:] for _, command in processes)
        for pid, command in processes
    ]


def end_leftovers(leftovers: list[Leftover]) -> None:
    for job in {leftover.job for leftover in leftovers}:
        end_processes(f"{JOB_VARIABLE}={job}")


def collect_garbage(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End them without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """End processes on this machine of jobs whose gateway is gone."""
    found = find_leftovers()
    if not as_json:
        for leftover in found:
            typer.echo(f"{leftover.pid:>8}  job {leftover.job[:8]}  {leftover.command}")
        if not found:
            typer.echo("nothing to end")
    ended = bool(found) and (yes or (not as_json and sys.stdin.isatty() and typer.confirm("End these processes?")))
    if ended:
        end_leftovers(found)
    result = Leftovers(processes=found, ended=ended)
    outcome = "ended" if ended else "not ended; pass --yes to end them"
    emit(result, as_json, lambda console: console.print(outcome) if found else None)

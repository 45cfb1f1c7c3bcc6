"""``meshgate logs``: what the actors of a job's sessions printed, as their gateway keeps it."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from meshgate.cli.console import AsJson, Job, Namespace, fail
from meshgate.errors import ranks_text
from meshgate.jobs.find import find_job
from meshgate.jobs.trait import JobTrait
from meshgate.session.output.printer import kind_of, write_text
from meshgate.session.output.screen import Screen
from meshgate_wire.messages import OutputLine
from meshgate_wire.status import JobStatus, OutputPage, PrintedLine

POLL_INTERVAL = 0.5  # seconds between two requests while following


class LogLine(PrintedLine):
    """``meshgate logs``: one such object on each line"""

    session: str


def show_logs(
    job: Job = None,
    namespace: Namespace = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only lines of this rank.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only the last so many lines of each session.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what the actors of all sessions printed.

    The gateway keeps the last 4 MB of each session.
    """
    found = find_job(job, namespace)
    if follow and rank is not None and (unknown := unknown_rank(found.status(), rank)):
        typer.echo(f"meshgate: {unknown} so far", err=True)
    lines = follow_lines(found, tail) if follow else printed_lines(found._output, tail)
    shown = show(lines, rank, as_json=as_json)
    if not shown and rank is not None and (unknown := unknown_rank(found.status(), rank)):
        fail(unknown)


def unknown_rank(status: JobStatus, rank: int) -> str:
    """That no process has ``rank``, and which ranks there are; "" if one has it, or if an engine did not answer."""
    if any(session.problem for session in status.sessions):
        return ""
    counts = {mesh.name: math.prod(mesh.sizes.values()) for session in status.sessions for mesh in session.meshes}
    if any(count > rank for count in counts.values()):
        return ""
    known = ", ".join(f"{name} has {ranks_text(range(count))}" for name, count in counts.items())
    return f"no process of this job has rank {rank}: {known or 'it has none'}"


def printed_lines(read: Callable[[dict[str, int]], OutputPage], tail: int | None) -> Iterator[LogLine]:
    """All lines that the gateway has, then, each time it is resumed at the end of a batch, later ones.

    Yields no line twice. ``tail``: the number of latest lines of each session to begin with; None: all lines.
    """
    seen: dict[str, int] = {}
    page = read(seen)
    if tail is not None:
        seen = {each.session: max(0, each.last - tail) for each in page.sessions}
        page = read(seen)
    while any(each.lines for each in page.sessions):
        for session in page.sessions:
            for line in session.lines:
                seen[session.session] = line.number
                yield LogLine(session=session.session, **line.model_dump())
        page = read(seen)


def follow_lines(job: JobTrait, tail: int | None) -> Iterator[LogLine]:
    """Lines as they are printed, until interrupted."""
    seen: dict[str, int] = {}
    first = True
    while True:
        for line in printed_lines(lambda after: job._output({**seen, **after}), tail if first else None):
            seen[line.session] = line.number
            yield line
        first = False
        time.sleep(POLL_INTERVAL)


def show(lines: Iterator[LogLine], rank: int | None, *, as_json: bool) -> bool:
    """Prints the lines of ``rank`` (None: of all), as they come. Returns whether there were any."""
    shown = False
    screen = Screen(kind_of(sys.stdout))
    if screen.kind == "terminal":
        screen.columns, screen.rows = shutil.get_terminal_size()
    for line in lines:
        if rank is not None and rank not in line.ranks:
            continue
        shown = True
        if as_json:
            text = line.model_dump_json() + "\n"
        else:
            text = screen.show([OutputLine.model_validate(line.model_dump(exclude={"number", "session"}))])
        write_text(sys.stdout, text)
    if not as_json:
        write_text(sys.stdout, screen.finish())
    return shown

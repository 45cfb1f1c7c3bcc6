"""``meshgate logs``: what the actors of a job's sessions printed, as their gateway keeps it."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshgate.cli.console import FAILED, AsJson, Job, Namespace, fail
from meshgate.errors import ConnectionFailedError, JobNotRunning, MeshgateError, ranks_text
from meshgate.jobs.find import find_job
from meshgate.jobs.output import OutputReader, Printed
from meshgate.jobs.runs import Answer, Args, Run, patiently
from meshgate.jobs.trait import JobTrait
from meshgate.session.output.log_files import LogFiles, folder_name
from meshgate.session.output.printer import kind_of, write_text
from meshgate.session.output.screen import Screen
from meshgate_wire.messages import OutputLine
from meshgate_wire.status import JobStatus, PrintedLine

POLL_INTERVAL = 0.5  # seconds between two requests while following


class LogLine(PrintedLine):
    """``meshgate logs``: one such object on each line"""

    session: str


def show_logs(
    job: Job = None,
    namespace: Namespace = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until interrupted.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only lines of this rank.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only this number of lines at the end of each session.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only lines of the last TIME, such as 90s, 10m or 2h.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")
    ] = None,
    diff: Annotated[
        int | None, typer.Option("--diff", metavar="RANK", min=0, help="Compare what --rank and RANK printed.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="The output of this submitted program instead.")
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir", metavar="DIR", help="Also write lines to DIR/SESSION/MESH/RANK.log; DIR is new or empty."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what the actors of all sessions printed.

    The gateway keeps the last 4 MB of each session, and the last 64 MB of each run.
    """
    age, pattern = _seconds(since), _pattern(grep)
    if log_dir is not None and os.path.isdir(log_dir) and any(log_dir.iterdir()):
        reason = "is not empty, and lines in it would be written twice: name a new directory"
        raise typer.BadParameter(f"{log_dir} {reason}", param_hint="--log-dir")
    if diff is not None and (rank in (None, diff) or follow or as_json or log_dir is not None):
        reason = "needs another rank in --rank, and cannot be combined with --follow, --json or --log-dir"
        raise typer.BadParameter(reason, param_hint="--diff")
    found = find_job(job, namespace)
    if run is not None:
        if as_json or rank is not None or since is not None or log_dir is not None:
            reason = "cannot be combined with --json, --rank, --since or --log-dir"
            raise typer.BadParameter(reason, param_hint="--run")
        show_run(found.run(run), pattern, tail, follow=follow)
        return
    if follow and rank is not None and (unknown := unknown_rank(found.status(), rank)):
        typer.echo(f"meshgate: {unknown} so far", err=True)
    files = SessionFiles(log_dir) if log_dir is not None else None
    reader = OutputReader(found._output, tail, age)
    lines = lines_of(follow_output(found, tail, age) if follow else reader.fresh(), files)
    if diff is not None and rank is not None:
        show_differences(found, list(lines), rank, diff, pattern)
        shown = True
    else:
        shown = show(lines, rank, pattern, files, as_json=as_json)
    if not reader.complete:  # lines_of has said what is missing
        raise typer.Exit(FAILED)
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


def _seconds(since: str | None) -> float:
    if since is None:
        return math.inf
    from meshgate.jobs.kubernetes.compute import duration  # noqa: PLC0415 - few need it, and it takes 0.1 s

    try:
        return duration(since)
    except ValueError as error:
        raise typer.BadParameter(f"{since!r}: {error}", param_hint="--since") from None


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise typer.BadParameter(f"{grep!r} is not a regular expression: {error}", param_hint="--grep") from None


def ask_patiently(job: JobTrait, ask: Callable[Args, Answer], *args: Args.args, **options: Args.kwargs) -> Answer:
    """What ``ask`` returns, which asks the gateway of ``job``: again for two minutes if that cannot be reached, as for
    a run. Raises JobNotRunning at once if the job has ended."""

    def attempt() -> Answer:
        try:
            return ask(*args, **options)
        except ConnectionFailedError as error:
            if _has_ended(job):
                raise JobNotRunning(f"{job!r} has ended") from error
            raise

    return patiently(attempt)


def _has_ended(job: JobTrait) -> bool:
    running = job._running
    try:
        return running is None or running._has_ended()
    except MeshgateError:  # the cluster cannot be reached either, so it is not known
        return False


def follow_output(job: JobTrait, tail: int | None, since: float = math.inf) -> Iterator[Printed]:
    """Lines as they are printed, until interrupted."""
    reader = OutputReader(lambda after: ask_patiently(job, job._output, after), tail, since)
    while True:
        yield from reader.fresh()
        time.sleep(POLL_INTERVAL)


def lines_of(output: Iterable[Printed], files: SessionFiles | None = None) -> Iterator[LogLine]:
    """The lines of ``output``. What else it says is printed on stderr, and written to ``files``."""
    for session, printed in output:
        if isinstance(printed, str):
            typer.echo(f"meshgate: session {session[:8]}: {printed}", err=True)
            if files is not None:
                files.note(session, printed)
        else:
            yield LogLine(session=session, **printed.model_dump())


def show_run(run: Run, pattern: re.Pattern[str] | None, tail: int | None, *, follow: bool) -> None:
    """Prints what a run printed: all of it, or of the lines that are there now only the last ``tail``."""
    position = [0]
    lines = run._lines(position, follow=False)
    if tail is not None:
        lines = iter(deque(lines, maxlen=tail))
    for line in itertools.chain(lines, run._lines(position, follow=True) if follow else ()):
        if pattern is None or pattern.search(line):
            write_text(sys.stdout, line)


def show_differences(
    job: JobTrait, lines: Sequence[LogLine], rank: int, other: int, pattern: re.Pattern[str] | None
) -> None:
    printed = {each for line in lines for each in output_of(line).every_rank()}
    for each in (rank, other):
        if each not in printed and (unknown := unknown_rank(job.status(), each)):
            fail(unknown)
    for text in differences(lines, rank, other, pattern):
        write_text(sys.stdout, text + "\n")


def output_of(line: LogLine) -> OutputLine:
    return OutputLine.model_validate(line.model_dump(include=set(OutputLine.model_fields)))


def differences(
    lines: Iterable[LogLine], rank: int, other: int, pattern: re.Pattern[str] | None = None
) -> Iterator[str]:
    """What two ranks of a mesh printed otherwise, for each mesh of each session, as a unified diff. Only lines in which
    ``pattern`` is found are compared, and none of progress bars."""
    printed: dict[tuple[str, str], dict[int, list[str]]] = {}
    for line in lines:
        if line.end != "\r" and (pattern is None or pattern.search(line.text)):
            by_rank = printed.setdefault((line.session, line.mesh), {rank: [], other: []})
            for each in by_rank.keys() & set(output_of(line).every_rank()):
                by_rank[each].append(line.text)
    several = len({session for session, _ in printed}) > 1
    for (session, mesh), by_rank in printed.items():
        mine, others = by_rank[rank], by_rank[other]
        of = f" of session {session}" if several else ""
        if mine != others:
            names = f"{mesh} rank {rank}{of}", f"{mesh} rank {other}{of}"
            yield from difflib.unified_diff(mine, others, names[0], names[1], n=2, lineterm="")
        elif mine:
            yield f"{mesh}{of}: ranks {rank} and {other} printed the same lines ({len(mine)})"


class SessionFiles:
    """A folder for each session, with a file for each rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sessions: dict[str, LogFiles] = {}

    def write(self, session: str, line: OutputLine) -> None:
        for notice in self._of(session).write([line]):
            typer.echo(f"meshgate: {notice.text}", err=True)

    def note(self, session: str, text: str) -> None:
        self._of(session).note(text)

    def _of(self, session: str) -> LogFiles:
        if (files := self._sessions.get(session)) is None:
            files = self._sessions[session] = LogFiles(str(self._directory / folder_name(session)))
        return files


def show(
    lines: Iterator[LogLine],
    rank: int | None,
    pattern: re.Pattern[str] | None = None,
    files: SessionFiles | None = None,
    *,
    as_json: bool,
) -> bool:
    """Prints the lines of ``rank`` (None: of all) in which ``pattern`` is found, as they come, and writes them to
    ``files``. Returns whether the rank printed any."""
    shown = False
    screen = Screen(kind_of(sys.stdout))
    if screen.kind == "terminal":
        screen.columns, screen.rows = shutil.get_terminal_size()
    for line in lines:
        printed = output_of(line)
        if rank is not None and rank not in printed.every_rank():
            continue
        shown = True
        if pattern is not None and not pattern.search(line.text):
            continue
        if files is not None:
            own = {"ranks": (rank,), "more_ranks": (), "count": 1} if rank is not None else {}
            files.write(line.session, printed.model_copy(update=own))
        text = line.model_dump_json() + "\n" if as_json else screen.show([printed])
        write_text(sys.stdout, text)
    if not as_json:
        write_text(sys.stdout, screen.finish())
    return shown

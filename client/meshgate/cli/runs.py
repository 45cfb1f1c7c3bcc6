"""``meshgate submit``, ``runs`` and ``stop``: programs that run beside a job's gateway."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from meshgate.cli.console import AsJson, Job, Namespace, Variables, age_text, emit, new_table
from meshgate.cli.logs import show_run
from meshgate.cli.ranks import parse_variables
from meshgate.errors import JobNotRunning
from meshgate.jobs.find import find_job
from meshgate.jobs.runs import STOP_GRACE
from meshgate_wire.status import Runs, RunStatus

RunName = Annotated[str, typer.Option("--run", help="The name of the run.")]


def submit_program(
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id, a job file, or with -n a name.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The program and its arguments.")],
    name: Annotated[str | None, typer.Option("--name", help="The name of the run; the default is generated.")] = None,
    env: Variables = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often to start the program again if it fails.")
    ] = 0,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The most memory of all its processes, such as 8Gi.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="The most processes of the program.")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option("--disk", metavar="SIZE", help="The most disk space of its directory and output, such as 20Gi."),
    ] = None,
    directories: Annotated[
        list[Path] | None, typer.Option("--dir", help="A directory to sync; the default is the project.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print its output; exit with its exit code.")] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Run a program beside the job's gateway, and return at once.

    The program runs independently of this machine, with the current code of this directory. Ctrl-C while following
    leaves it running. What it prints is deleted with the job, which ends after its idle timeout.
    """
    try:
        found = find_job(job, namespace)
    except JobNotRunning as error:
        if shutil.which(job) is None:
            raise
        hint = f"the job comes before the command: meshgate submit JOB -- {shlex.join([job, *command])}"
        raise JobNotRunning(f"{error}; {hint}") from None
    run = found.submit(
        command,
        name,
        env=parse_variables(env),
        restarts=restarts,
        memory=_bytes(memory, "--memory"),
        processes=processes,
        disk=_bytes(disk, "--disk"),
        sync_dirs=[str(path) for path in directories] if directories else None,
    )
    where = f"{job} -n {namespace}" if namespace else job
    hint = (
        f"submitted {run.name}; `meshgate logs {where} --run {run.name} -f` shows what it prints. Once the run has "
        "ended, that stays until the job ends, after its idle timeout"
    )
    emit(run.status(), as_json, lambda console: console.print(hint))
    if follow:
        show_run(run, None, None, follow=True)
        raise typer.Exit(exit_status(run.wait()))


def list_runs(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """List the programs that were submitted to a job.

    Shows how they ended, and marks those that have ended since they were last listed with a star.
    """
    found = find_job(job, namespace)
    runs = Runs(runs=tuple(run.status() if run._last is None else run._last for run in found.runs()))
    emit(runs, as_json, lambda console: console.print(_table(runs.runs)))


def stop_run(
    run: RunName,
    job: Job = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds that it has to end after SIGTERM; then it is killed.")
    ] = STOP_GRACE,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """End a submitted program, and give it time to save.

    Sends SIGTERM, and SIGKILL if it does not end in time. Waits until it has ended.
    """
    found = find_job(job, namespace).run(run)
    found.stop(grace)
    found.wait()
    status = found.status()
    emit(status, as_json, lambda console: console.print(f"{status.name} {status.state}: {status.reason}"))


def exit_status(code: int | None) -> int:
    """The exit code of a shell for a program that ended with ``code``."""
    return 1 if code is None else code if code >= 0 else 128 - code


def _table(runs: tuple[RunStatus, ...]) -> object:
    """What a terminal shows."""
    if not runs:
        return "no runs"
    found = new_table("NAME", "STATE", "EXIT", "AGE", "RAN", "RESTARTS", "COMMAND", "WHY")
    for run in runs:
        name = f"{run.name} *" if run.news else run.name
        code = "" if run.exit_code is None or run.live else str(run.exit_code)
        restarts = f"{run.restarts} of {run.max_restarts}" if run.max_restarts else ""
        plain = run.reason if run.reason != f"exited with code {run.exit_code}" else ""
        found.add_row(
            name, run.state, code, age_text(run.age), age_text(run.seconds), restarts, " ".join(run.command), plain
        )
    return found


def _bytes(size: str | None, option: str) -> int | None:
    """``8Gi``, ``500M`` or a number of bytes."""
    if size is None:
        return None
    units = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = size.rstrip("kKMGTi")
    unit = size[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):  # the last of inf
        raise typer.BadParameter(f"{size!r} is not a size such as 8Gi or 500M", param_hint=option) from None

"""``meshgate ls`` and ``meshgate kill`` for the jobs of this machine, and for those of job files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import typer

from meshgate.cli.console import age_text, meshes_text, new_table
from meshgate.cli.models import Ended, JobRow, Jobs
from meshgate.errors import JobNotRunning
from meshgate.jobs import registry


def list_jobs() -> Jobs:
    return Jobs(jobs=[row_of(entry) for entry in registry.entries()])


def row_of(entry: registry.LocalEntry) -> JobRow:
    return JobRow(
        id=entry.apply_id,
        kind=entry.kind,
        meshes=entry.meshes,
        age=round(time.time() - entry.created, 1),
        pid=entry.pid,
        machine=entry.place,
        directory=entry.directory,
    )


def table(jobs: Jobs) -> object:
    """What a terminal shows."""
    if not jobs.jobs:
        return "no jobs on this machine"
    found = new_table("ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY")
    for job in jobs.jobs:
        age = age_text(job.age)
        pid = f"{job.pid} on {job.machine}" if job.machine else str(job.pid)
        found.add_row(job.id[:8], job.kind, meshes_text(job.meshes), pid, age, _with_tilde(job.directory))
    return found


def kill(ids: list[str], *, all_jobs: bool, report: Callable[[str], object]) -> Ended:
    """Calls ``report`` with a line for each job that was ended."""
    # They take half a second, which `meshgate ls` does not need.
    from meshgate.jobs.cached import remove_job_file  # noqa: PLC0415
    from meshgate.jobs.find import find_job  # noqa: PLC0415
    from meshgate.jobs.this_machine.local_gateway import stop_gateway  # noqa: PLC0415

    running = list(registry.entries())
    if not ids and not all_jobs:
        raise typer.BadParameter("name the jobs to end, or pass --all; run `meshgate ls` to list them")
    files = [] if all_jobs else [name for name in ids if os.sep in name or os.path.exists(name)]
    saved = [(path, find_job(path)) for path in files]
    here = [entry for entry in running if not entry.place]
    found = here if all_jobs else [_find(running, prefix) for prefix in ids if prefix not in files]
    ended = []
    for path, job in saved:
        name, apply_id = repr(job), job.apply_id or ""
        job.kill()
        remove_job_file(path, apply_id)
        ended.append(apply_id)
        report(f"ended {name}")
    for entry in found:
        stop_gateway(entry.process, entry.apply_id, entry.temporary)
        registry.unregister(entry.apply_id)
        ended.append(entry.apply_id)
        report(f"ended {entry.apply_id[:8]} ({entry.kind}, pid {entry.pid})")
    return Ended(ended=ended)


def _find(running: list[registry.LocalEntry], prefix: str) -> registry.LocalEntry:
    matching = [entry for entry in running if entry.apply_id.startswith(prefix)]
    if not matching:
        raise JobNotRunning(f"no job id begins with {prefix!r}; run `meshgate ls` to list them")
    if len(matching) > 1:
        raise typer.BadParameter(f"{len(matching)} job ids begin with {prefix!r}; run `meshgate ls` to list them")
    matching[0].require_here()
    return matching[0]


def _with_tilde(directory: str) -> str:
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if directory == home or directory.startswith(f"{home}/") else directory

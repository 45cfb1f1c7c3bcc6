"""``meshgate sync`` and ``meshgate pull``: code to the hosts of a job, and files from them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from meshgate.cli.console import AsJson, Job, Mesh, Namespace, console, emit
from meshgate.cli.models import Pull, Sync
from meshgate.jobs.find import find_job


def sync_code(
    job: Job = None,
    directories: Annotated[
        list[Path] | None, typer.Option("--dir", help="A directory to sync; the default is the project.")
    ] = None,
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("--watch", help="Push again on every save, until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push the code of this directory to the job's hosts.

    The next program finds it there.
    """
    found = find_job(job, namespace)
    found._state()
    paths = [str(path) for path in directories] if directories else None
    report = found.sync(sync_dirs=paths, watch=watch, quiet=as_json)
    result = Sync(
        version=report.version,
        files=report.files,
        nbytes=report.nbytes,
        ready=report.ready,
        hosts=report.hosts,
        seconds=report.seconds,
    )
    emit(result, as_json, lambda console: None)
    if watch:
        console().print("watching; Ctrl-C ends it")
        signal.pause()


def pull_files(
    remote: Annotated[str, typer.Argument(metavar="REMOTE", help="A file or directory on the hosts.")],
    local: Annotated[str, typer.Argument(metavar="LOCAL", help="Where to put it.")],
    job: Annotated[str | None, typer.Option("--job", "-j", help="An id, a job file, or with -n a name.")] = None,
    ranks: Annotated[list[int] | None, typer.Option("--rank", help="Hosts to pull from; the default is all.")] = None,
    mesh: Mesh = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Copy a file or directory from the hosts."""
    pulled = find_job(job, namespace).pull(remote, local, ranks, mesh)
    result = Pull(files=pulled.files, size=pulled.size, travelled=pulled.travelled, left_out=list(pulled.left_out))
    emit(result, as_json, lambda console: None)

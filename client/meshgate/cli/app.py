"""The commands of ``meshgate``, their options and help."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshgate.cli import cluster_jobs, doctor, leftovers, local_jobs, ranks, sessions, ui
from meshgate.cli import logs as log_lines
from meshgate.cli import status as statuses
from meshgate.cli.agents import call, mcp, run
from meshgate.cli.console import Commands, console, emit, fail
from meshgate.cli.models import SCHEMAS, Leftovers, Pull, Sync
from meshgate.cli.options import AsJson, Job, Mesh, Namespace
from meshgate.cli.top import command as top
from meshgate.jobs.find import find_job
from meshgate_wire.version import SOFTWARE_VERSION

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Look into meshgate jobs and end them, on this machine or in a cluster.

    JOB is the beginning of a job's id, a job file, or with -n the name of a job in that namespace. Without it, commands
    use the job saved in this directory, or the only one on this machine.

    Exit codes: 0 success, 1 failure, 2 invalid arguments, 3 no such job, 130 interrupted.""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(SOFTWARE_VERSION)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("ls")
def list_jobs(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Jobs in this namespace of a Kubernetes cluster.")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs in all namespaces of a Kubernetes cluster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List running jobs.

    Shows the jobs of this machine or, with a namespace, those of the cluster that KUBECONFIG names.
    """
    if namespace is not None or all_namespaces:
        searched = "" if all_namespaces else namespace or ""
        jobs = cluster_jobs.list_jobs(searched)
        emit(jobs, as_json, lambda console: console.print(cluster_jobs.table(jobs, searched)))
    else:
        jobs = local_jobs.list_jobs()
        emit(jobs, as_json, lambda console: console.print(local_jobs.table(jobs)))


@app.command("kill")
def kill_jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB...", help="Ids or unique prefixes, or job files; in a cluster, names."),
    ] = None,
    all_jobs: Annotated[
        bool, typer.Option("--all", help="All your jobs on this machine, or all jobs in the namespace.")
    ] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """End jobs and all their processes or pods."""
    report = (lambda line: None) if as_json else typer.echo
    if namespace is not None:
        ended = cluster_jobs.kill(ids or [], namespace, all_jobs=all_jobs, report=report)
    else:
        ended = local_jobs.kill(ids or [], all_jobs=all_jobs, report=report)
    emit(ended, as_json, lambda console: None)


@app.command("status")
def show_status(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show hosts, code versions, sessions and calls in flight."""
    status = find_job(job, namespace).status()
    emit(status, as_json, lambda console: statuses.show_status(status, console))


@app.command("sessions")
def list_sessions(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """List the sessions of a job: name, age, meshes, calls, code version, and the process that holds each."""
    found = sessions.list_sessions(find_job(job, namespace))
    emit(found, as_json, lambda console: sessions.show_sessions(found, console))


@app.command("describe")
def describe_job(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show everything about a job; in a cluster also its objects and events."""
    found = statuses.describe(find_job(job, namespace), namespace)
    emit(found, as_json, lambda console: statuses.show_description(found, console))


@app.command("logs")
def show_logs(
    job: Job = None,
    namespace: Namespace = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only lines of this rank.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", help="Only the last so many lines of each session.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what the actors of all sessions printed.

    The gateway keeps the last 4 MB of each session.
    """
    found = find_job(job, namespace)
    lines = log_lines.follow(found, tail) if follow else log_lines.printed_lines(found._output, tail)
    log_lines.show(lines, rank, as_json=as_json)


@app.command("sync")
def sync_code(
    job: Job = None,
    directories: Annotated[
        list[Path] | None, typer.Option("--dir", help="A directory to sync; the default is the git root.")
    ] = None,
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("--watch", help="Push again on every save, until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Push the code of this directory to the job's hosts, so that the next program finds it there."""
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
        _wait_for_interrupt()


@app.command("pull")
def pull_files(
    remote: Annotated[str, typer.Argument(help="A file or directory on the hosts.")],
    local: Annotated[str, typer.Argument(help="Where to put it.")],
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


app.command("exec", context_settings={"ignore_unknown_options": True})(ranks.run_command)
app.command("shell")(ranks.open_shell)
app.command("debug")(ranks.debug_actors)
app.command("forward")(ranks.forward_port)
app.command("stacks")(ranks.show_stacks)
app.command("why")(ranks.explain)
app.command("top")(top.show_top)
app.command("ui")(ui.open_page)
app.command("doctor")(doctor.diagnose)
app.command("call")(call.call_endpoint)
app.command("run", context_settings={"ignore_unknown_options": True})(run.run_command)
app.command("mcp")(mcp.serve_tools)


@app.command("gc")
def collect_garbage(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End them without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """End processes on this machine of jobs whose gateway is gone."""
    found = leftovers.find_leftovers()
    if not as_json:
        for leftover in found:
            typer.echo(f"{leftover.pid:>8}  job {leftover.job[:8]}  {leftover.command}")
        if not found:
            typer.echo("nothing to end")
    ended = bool(found) and (yes or (not as_json and sys.stdin.isatty() and typer.confirm("End these processes?")))
    if ended:
        leftovers.end_leftovers(found)
    result = Leftovers(processes=found, ended=ended)
    outcome = "ended" if ended else "not ended; pass --yes to end them"
    emit(result, as_json, lambda console: console.print(outcome) if found else None)


@app.command("schema")
def show_schema(command: Annotated[str, typer.Argument(help="The command whose --json output is described.")]) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    model = SCHEMAS.get(command)
    if model is None:
        fail(f"{command!r} prints no JSON; commands that do: {', '.join(SCHEMAS)}", 2)
    typer.echo(json.dumps(model.model_json_schema(), indent=2))


@app.command("version")
def show_version() -> None:
    """Print the version."""
    typer.echo(SOFTWARE_VERSION)


def _wait_for_interrupt() -> None:
    console().print("watching; Ctrl-C ends it")
    import signal  # noqa: PLC0415

    signal.pause()

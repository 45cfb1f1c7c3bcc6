"""``meshgate exec``, ``shell``, ``debug``, ``forward``, ``stacks`` and ``why``: a way into the hosts of a job.

``meshgate sync`` and ``pull`` bring code to them, and files from them.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.console import Console

from meshgate.cli.console import (
    FAILED,
    AsJson,
    Job,
    Mesh,
    Namespace,
    Variables,
    Workdir,
    age_text,
    console,
    duration_text,
    emit,
    fail,
    kept_bytes,
    kept_text,
)
from meshgate.cli.models import (
    KEPT,
    CommandOutcome,
    CommandOutcomes,
    LateRank,
    ProcessReport,
    Pull,
    Result,
    StackGroups,
    Sync,
)
from meshgate.cli.status import call_text, late_ranks, waiting_text
from meshgate.jobs.find import find_job
from meshgate.ranks import OWN_MESHES, problem_lines
from meshgate.ranks.stacks import ProcessStacks, Stacks, places_text
from meshgate_wire.messages import waiting_ranks
from meshgate_wire.status import CallStatus, CallTimeline, JobStatus, MeshStatus

RANKS_EXPLAINED = 4
END_INTERVAL = 0.5  # seconds between two looks at whether a session has ended
BAR = 24  # characters of the bar of a rank
FEWEST_COMPARED = 4  # calls that say something about which rank is late
Rank = Annotated[int, typer.Option("--rank", help="The host, by its rank in the host mesh.")]


def sync_code(
    job: Job = None,
    directories: Annotated[
        list[Path] | None, typer.Option("--dir", help="A directory to sync; the default is the project.")
    ] = None,
    namespace: Namespace = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Push again on every save, until interrupted or the job has ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Push the code of this directory to the job's hosts.

    The next program finds it there.
    """
    from meshgate.code_sync.session_sync import sync_for  # noqa: PLC0415 - the other commands sync nothing

    found = find_job(job, namespace)
    found._state()
    client = found._open_client("sync()")
    sync = sync_for(client, [str(path) for path in directories] if directories else None)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()  # this thread prints them: it ends with a closed pipe
    sync.push_and_wait(watch=watch, quiet=False, show=reports.put if as_json else None)
    if watch:
        typer.echo("watching; Ctrl-C ends it", err=True)
    while not reports.empty() or (watch and sync.watching and client.error is None):
        with contextlib.suppress(queue.Empty):
            typer.echo(Sync.model_validate(reports.get(timeout=END_INTERVAL)).model_dump_json())
    if watch:
        raise client.error or typer.Exit(FAILED)  # watching has failed, which the sync has reported


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
    left_out = [name.encode(errors="backslashreplace").decode() for name in pulled.left_out]  # names may be any bytes
    result = Pull(files=pulled.files, size=pulled.size, travelled=pulled.travelled, left_out=left_out)
    emit(result, as_json, lambda console: None)


class CallReport(Result):
    """A call in flight and the first processes that it waits for."""

    session: str
    call: CallStatus
    places: str = Field(default="", description="which ranks of a training script are where")
    processes: list[ProcessReport]


class RecentCall(Result):
    """A call to several ranks, in flight or not, and when they replied."""

    session: str
    timeline: CallTimeline


class Why(Result):
    """``meshgate why``"""

    calls: list[CallReport] = Field(description="the oldest first")
    stragglers: list[LateRank] = Field(default=[], description="those that are late too often to be so by chance")
    kept: dict[str, int] = Field(default={}, description=KEPT)
    problems: dict[str, str] = Field(default={}, description="why the processes on a host could not be read")
    recent: list[RecentCall] | None = Field(
        default=None,
        description="those in flight, then the last that have ended; null: without --timelines",
    )


def run_command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="An id, a job file, or with -n a name.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command and its arguments.")],
    ranks: Annotated[list[int] | None, typer.Option("--rank", help="Hosts to run it on; the default is all.")] = None,
    mesh: Mesh = None,
    env: Variables = None,
    workdir: Workdir = None,
    interactive: Annotated[bool, typer.Option("--stdin", "-i", help="Send the input of this command to it.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds after which the command is ended.")
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Run a command on the hosts, and exit with its exit code.

    If hosts differ, with the highest.
    """
    found = find_job(job, namespace)
    found._state()
    executed = found.exec(
        command,
        ranks,
        mesh,
        env=parse_variables(env),
        workdir=workdir,
        capture_output=as_json,
        stdin=sys.stdin.buffer if interactive else None,
        timeout=timeout,
    )
    results = [CommandOutcome.model_validate(result, from_attributes=True) for result in executed]
    emit(CommandOutcomes(returncode=executed.returncode, results=results), as_json, lambda console: None)
    raise typer.Exit(executed.returncode)


def open_shell(
    job: Job = None,
    rank: Rank = 0,
    mesh: Mesh = None,
    env: Variables = None,
    workdir: Workdir = None,
    namespace: Namespace = None,
) -> None:
    """Open a terminal on a host, and exit with its shell's exit code."""
    found = find_job(job, namespace)
    found._state()
    raise typer.Exit(found.shell(rank, mesh, env=parse_variables(env), workdir=workdir))


def debug_actors(
    job: Job = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Start debugpy in the process of this rank.")] = None,
    procs: Annotated[str | None, typer.Option("--procs", help="Its proc mesh; the default is the only one.")] = None,
    mesh: Mesh = None,
    namespace: Namespace = None,
) -> None:
    """Debug actors at breakpoint(), or let an editor attach.

    With --rank, starts debugpy in the process of that rank, and forwards its port.
    """
    found = find_job(job, namespace)
    found._state()
    attached = found.debug(rank, procs, mesh)
    if attached is not None:
        with attached:
            typer.echo(attached)
            console().print("VS Code attaches with this entry of launch.json; Ctrl-C ends it")
            attached.forwarded.wait()


def forward_port(
    port: Annotated[int, typer.Argument(metavar="PORT", min=0, max=65535, help="The port on the host.")],
    job: Annotated[str | None, typer.Option("--job", "-j", help="An id, a job file, or with -n a name.")] = None,
    rank: Rank = 0,
    mesh: Mesh = None,
    local_port: Annotated[
        int | None, typer.Option("--local-port", min=0, max=65535, help="The port on this machine.")
    ] = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="Make the port of this machine available on the host.")
    ] = False,
    namespace: Namespace = None,
) -> None:
    """Make a port of a host available here, until interrupted.

    With --reverse, makes a port of this machine available on the host.
    """
    found = find_job(job, namespace)
    found._state()
    chosen = port if local_port is None and not reverse else local_port
    with found.forward(port, rank, mesh, local_port=chosen, reverse=reverse) as forwarded:
        where = f"rank {rank}" if reverse else "this machine"
        there = f"port {forwarded.target} of " + ("this machine" if reverse else f"rank {rank}")
        console().print(f"127.0.0.1:{forwarded.port} on {where} is {there}; Ctrl-C ends it")
        forwarded.wait()


def show_stacks(
    job: Job = None,
    ranks: Annotated[list[int] | None, typer.Option("--rank", help="Only processes with this rank.")] = None,
    mesh: Mesh = None,
    all_threads: Annotated[bool, typer.Option("--all-threads", help="Also show idle threads and all frames.")] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show the Python stacks of all processes, equal stacks only once."""
    found = find_job(job, namespace)
    found._state()
    stacks = found.stacks(ranks, mesh)
    text = "\n\n".join(stacks.texts(all_threads=all_threads))
    emit(_groups(stacks), as_json, lambda console: console.print(text or "no processes"))
    _require_processes(stacks)


def explain(
    job: Job = None,
    timelines: Annotated[
        bool, typer.Option("--timelines", help="Also show when each rank replied in recent calls.")
    ] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show calls in flight, and what they wait for.

    With the stacks of the first ranks that have not answered.
    """
    found = find_job(job, namespace)
    status = found.status()
    stacks = Stacks(())
    if any(session.calls for session in status.sessions):
        found._state()
        stacks = found.stacks()
    result = why(status, stacks, timelines=timelines)
    emit(result, as_json, lambda console: _show(result, console, timelines=timelines))
    _require_processes(stacks)


def _require_processes(stacks: Stacks) -> None:
    """Exits as a failure if hosts could not be asked, and the others have no process."""
    if stacks.problems and not stacks.processes:
        fail(f"no process could be read: {problem_lines(stacks.problems)[0]}")


def _recent_calls(status: JobStatus) -> list[RecentCall]:
    """Those in flight, the oldest first, and then those that have ended, the last one first."""

    def order(recent: RecentCall) -> tuple[bool, float]:
        seconds, age = recent.timeline.seconds, recent.timeline.age
        return seconds is not None, -age if seconds is None else age - seconds

    calls = [
        RecentCall(session=session.session, timeline=timeline)
        for session in status.sessions
        for timeline in session.timelines
        if timeline.mesh not in OWN_MESHES
    ]
    return sorted(calls, key=order)


def why(status: JobStatus, stacks: Stacks, *, timelines: bool = False) -> Why:
    """The calls in flight, the oldest first, each with what the first ranks run that have not answered."""
    calls = [(session.session, call) for session in status.sessions for call in session.calls]
    calls.sort(key=lambda each: -each[1].age)
    return Why(
        calls=[_report(session, call, stacks) for session, call in calls],
        stragglers=[
            late
            for session in status.sessions
            for mesh in session.meshes
            for late in late_ranks(session, mesh)
            if late.compared >= FEWEST_COMPARED and late.calls >= _often(mesh) * late.compared
        ],
        kept=kept_bytes(status),
        problems=stacks.problems,
        recent=_recent_calls(status) if timelines else None,
    )


def _often(mesh: MeshStatus) -> float:
    """The share of calls in which a rank is late too often for chance, by which each would be the last in its turn."""
    return max(0.25, min(0.75, 2 / prod(mesh.sizes.values())))


def _report(session: str, call: CallStatus, stacks: Iterable[ProcessStacks]) -> CallReport:
    """Of a training script, one rank for each place."""
    # Another session may have a mesh of the same name on the same hosts.
    mesh = [each for each in stacks if (each.session, each.mesh) == (session, call.procs)]
    scripts = [each for each in mesh if each.script]
    wanted = list(call.processes.values())[:RANKS_EXPLAINED]
    first_at = {each.place: each for each in reversed(scripts)}
    waiting = sorted(first_at.values(), key=lambda each: each.rank) or [each for each in mesh if each.rank in wanted]
    places = places_text(scripts, call.total)
    return CallReport(
        session=session, call=call, places=places, processes=[_process(each) for each in waiting[:RANKS_EXPLAINED]]
    )


def _process(process: ProcessStacks) -> ProcessReport:
    return ProcessReport(
        host=process.host,
        mesh=process.mesh,
        rank=process.rank,
        pid=process.pid,
        stack=process.text(),
        problem=process.problem,
    )


def _groups(stacks: Stacks) -> StackGroups:
    return StackGroups(processes=[_process(process) for process in stacks], problems=stacks.problems)


def _show(result: Why, console: Console, *, timelines: bool) -> None:
    several = len({report.session for report in result.calls}) > 1
    for report in result.calls:
        call = report.call
        answered = f"{call.answered} of {call.total} ranks answered"
        title = f"session {report.session[:8]}: " if several else ""
        title += f"{call_text(call)}, called {age_text(call.age)} ago: {answered}"
        console.print(f"{title}; waits for {waiting_text(call)}")
        if report.places:
            console.print(f"  {report.places}")
        for process in report.processes:
            console.print(f"  rank {process.rank} on {process.host}, pid {process.pid}:")
            console.print("\n".join(f"  {line}" for line in process.stack.splitlines()))
        console.print()
    for line in problem_lines(result.problems):
        console.print(line)
    if not result.calls:
        console.print("no call is in flight")
    for late in result.stragglers:
        where = f"{late.mesh}.{late.endpoint} waits for {waiting_ranks({late.rank: late.host}, 1)}"
        often = f"it replied last in {late.calls} of the last {late.compared} calls"
        after = f"on average {duration_text(late.seconds)} after half of the ranks"
        console.print(f"{where}: {often}, {after}")
    if result.kept:
        console.print(f"values that stay in processes: {kept_text(result.kept)}")
    if timelines and not result.recent:
        console.print("no recent call went to several ranks")
    several = len({recent.session for recent in result.recent or ()}) > 1
    for recent in result.recent or ():
        console.print()
        title = f"session {recent.session[:8]}: " if several else ""
        for line in _timeline_lines(recent.timeline):
            console.print(title + line)
            title = ""


def _timeline_lines(call: CallTimeline) -> Iterator[str]:
    outcome = "in flight" if call.seconds is None else f"took {duration_text(call.seconds)}"
    outcome += ", cancelled" if call.cancelled else ", failed" if call.failed else ""
    half = f", half of them after {duration_text(call.half)}" if call.half is not None else ""
    answered = f"{call.answered} of {call.total} ranks replied{half}"
    yield f"{call.mesh}.{call.endpoint}, called {age_text(call.age)} ago, {outcome}: {answered}"
    most = max(call.age if call.seconds is None else call.seconds, 1e-6)
    missing = "no reply before it failed" if call.failed else "no reply"
    rows = [(rank, host, most, missing) for rank, host in call.missing.items()]
    for reply in call.replies:
        marks = [" raised"] * reply.raised + [" straggler"] * (reply.rank == call.straggler)
        rows.append((reply.rank, reply.host, reply.seconds, duration_text(reply.seconds) + "".join(marks)))
    places = [waiting_ranks({rank: host}, 1) for rank, host, *_ in rows]
    width = max(map(len, places), default=0)
    for place, (*_, seconds, text) in zip(places, rows, strict=True):
        bar = ("·" if text == missing else "█") * max(1, round(BAR * min(1, seconds / most)))
        yield f"  {place:{width}}  {bar:{BAR}}  {text}"
    if (more := call.total - call.answered - len(call.missing)) > 0:
        yield f"  and {more} more without a reply"
    if (more := call.answered - len(call.replies)) > 0:
        yield f"  and {more} more that replied earlier"


def parse_variables(settings: list[str] | None) -> dict[str, str]:
    if wrong := [setting for setting in settings or () if "=" not in setting]:
        raise typer.BadParameter(f"--env {wrong[0]}: expected NAME=VALUE")
    return dict(setting.split("=", 1) for setting in settings or ())

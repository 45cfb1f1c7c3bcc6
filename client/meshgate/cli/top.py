"""``meshgate top``: the calls of each mesh of actors, and what each rank uses, live; it never changes the job.

It looks at the job every few seconds, computes what happened since, and shows it in two tables that fit a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshgate.cli.console import (
    AsJson,
    Job,
    Namespace,
    age_text,
    console,
    duration_text,
    kept_bytes,
    kept_text,
    new_table,
)
from meshgate.cli.logs import ask_patiently
from meshgate.cli.models import CallRate, GpuUsage, LateRank, RankUsage, Top
from meshgate.cli.status import late_ranks, lost_lines, lost_ranks
from meshgate.jobs.find import find_job
from meshgate.jobs.trait import JobTrait
from meshgate.progress import new_console
from meshgate.ranks import OWN_MESHES
from meshgate.ranks.usage import ProcessUsage, Usage, UsageMeter
from meshgate_wire.status import CallCounts, CallStatus, JobStatus, MeshStatus, SessionStatus

FIRST_INTERVAL = 1.0  # seconds; the first look shows something soon
_NONE = CallCounts()
Order: TypeAlias = Literal["rank", "cpu", "memory", "gpu"]
_KEYS: dict[Order, Callable[[RankUsage], float]] = {
    "rank": lambda rank: 0.0,
    "cpu": lambda rank: -(rank.cpu or 0.0),
    "memory": lambda rank: -rank.memory,
    "gpu": lambda rank: -(rank.gpu or 0.0),
}
NARROW = 80  # columns; below, a table leaves out what matters least
WIDE = 110  # columns; from here on, a table has what is good to know
HEADS = 3  # lines of a table besides its rows: the heading, what is left out, and an empty line
MAX_LOST = 3  # rows
CALL_SHARE = 3  # calls get at most this part of the lines, unless the ranks need less


def show_top(
    job: Job = None,
    interval: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between two measurements.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one measurement and exit.")] = False,
    order: Annotated[Order, typer.Option("--sort", help="The order of the ranks.")] = "rank",
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show calls per second, latency, CPU, memory and GPUs, live.

    On a pipe, prints the measurements one below the other; with --json, one object per line.
    """
    found = find_job(job, namespace)
    with UsageMeter(found._state()._hosts) as meter:
        looks = look(found, meter, min(interval, FIRST_INTERVAL), interval)
        if once:
            looks = iter([next(looks)])
        show(looks, repr(found), once=once, order=order, as_json=as_json)


class Counted(NamedTuple):
    """The calls of a session's actors at a time, by the number of their mesh."""

    at: float
    calls: Mapping[int, CallCounts]


def look(job: JobTrait, meter: UsageMeter, first: float, interval: float) -> Iterator[Top]:
    """What happened in each interval, without end."""
    meter.read()
    status, since = job.status(), time.monotonic()
    before = count(status, since, {})
    due = since + first
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        usage, status, at = meter.read(), ask_patiently(job, job.status), time.monotonic()
        yield compare(before, status, since, at, usage)
        before, since = count(status, at, before), at
        due = max(due + interval, at)


def show(looks: Iterator[Top], title: str, *, once: bool, order: Order, as_json: bool) -> None:
    screen = new_console()
    if as_json:
        for top in looks:
            typer.echo(top.model_dump_json(indent=2 if once else None))
    elif once or not screen.is_terminal or screen.is_dumb_terminal:
        plain = console()
        for top in looks:
            plain.print(render(top, title, width=plain.width, order=order))
            sys.stdout.flush()
    else:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            for top in looks:
                shown = render(top, title, width=screen.width, height=screen.height, order=order)
                live.update(shown, refresh=True)


# Pure.


def count(status: JobStatus, at: float, before: Mapping[str, Counted | None]) -> dict[str, Counted | None]:
    """The calls of each session at ``at``; of one whose engine has not answered those ``before``, None if that never
    has."""
    return {
        session.session: before.get(session.session)
        if session.problem
        else Counted(at, {mesh.number: mesh.calls or _NONE for mesh in _actors(session)})
        for session in status.sessions
    }


def compare(before: Mapping[str, Counted | None], now: JobStatus, since: float, at: float, usage: Usage) -> Top:
    """What happened from ``since`` to ``at``, the times of the last two looks, and before in sessions whose engines had
    not answered. ``usage`` is that of the job's processes now."""
    calls = [
        _rate(session, mesh, before.get(session.session, Counted(since, {})), at)
        for session in now.sessions
        for mesh in _actors(session)
    ]
    kept = _kept_by_rank(now)
    problems = {f"session {session.session[:8]}": session.problem for session in now.sessions if session.problem}
    return Top(
        seconds=at - since,
        calls=sorted(calls, key=lambda each: (each.session, each.mesh)),
        ranks=[rank_usage(process, usage, kept) for process in usage.processes],
        gpus=[GpuUsage.model_validate(gpu) for gpu in usage.gpus],
        kept=kept_bytes(now),
        problems={**problems, **usage.problems},
        lost=[lost for session in now.sessions for lost in lost_ranks(session)],
    )


def _actors(session: SessionStatus) -> Iterator[MeshStatus]:
    return (mesh for mesh in session.meshes if mesh.kind == "actors" and mesh.name not in OWN_MESHES)


def _rate(session: SessionStatus, mesh: MeshStatus, counted: Counted | None, at: float) -> CallRate:
    """``counted`` is None if the engine answers for the first time: it is not known since when it has counted."""
    now = mesh.calls or _NONE
    since, before = (0.0, now) if counted is None else (counted.at, counted.calls.get(mesh.number, _NONE))
    ended, casts = now.ended - before.ended, now.casts - before.casts
    return CallRate(
        session=session.session,
        mesh=mesh.name,
        class_name=mesh.class_name,
        ranks=prod(mesh.sizes.values()),
        ended=ended,
        failed=now.failed - before.failed,
        rate=(ended + casts) / (at - since),
        latency=(now.seconds - before.seconds) / ended if ended else None,
        casts=casts,
        in_flight=now.in_flight,
        oldest=max((call.age for call in session.calls if _is_on(call, mesh)), default=None),
        straggler=max(late_ranks(session, mesh), key=lambda late: late.calls * late.seconds, default=None),
    )


def _is_on(call: CallStatus, mesh: MeshStatus) -> bool:
    """A gateway of an earlier version reports no numbers."""
    return call.mesh_number == mesh.number if call.mesh_number else call.mesh == mesh.name


def _kept_by_rank(status: JobStatus) -> dict[str, Mapping[int, int] | None]:
    """What each rank keeps, by the name of its mesh: hosts do not know of which session a process is. None: several
    meshes of this name have processes."""
    found: dict[str, Mapping[int, int] | None] = {}
    for mesh in (mesh for session in status.sessions for mesh in session.meshes if mesh.kind == "procs"):
        if sum(1 for group in mesh.ended for _ in group.each()) < prod(mesh.sizes.values()):
            found[mesh.name] = mesh.kept_by_rank if mesh.name not in found else None
    return found


def rank_usage(process: ProcessUsage, usage: Usage, kept: Mapping[str, Mapping[int, int] | None]) -> RankUsage:
    used = [gpu for gpu in usage.gpus if gpu.host == process.host and gpu.index in process.gpus]
    busy = [gpu.utilization for gpu in used if gpu.utilization is not None]
    memory = [gpu.memory for gpu in used if gpu.memory is not None]
    kept_here = kept.get(process.mesh, {})
    return RankUsage(
        mesh=process.mesh,
        rank=process.rank,
        host=process.host,
        pid=process.pid,
        cpu=process.cpu,
        memory=process.memory,
        gpus=process.gpus,
        gpu=fmean(busy) if busy else None,
        gpu_memory=process.gpu_memory if process.gpu_memory is not None else sum(memory) if memory else None,
        kept=kept_here.get(process.rank, 0) if kept_here is not None else None,
    )


def render(top: Top, title: str, *, width: int, height: int | None = None, order: Order = "rank") -> RenderableType:
    """``height``: leaves out the rows that do not fit into this number of lines; None: shows all."""
    ranks = sorted(top.ranks, key=_KEYS[order])
    notes = [Text(line, no_wrap=True, overflow="ellipsis") for line in lost_lines(top.lost, MAX_LOST)]
    notes += [Text(f"{name}: {problem.splitlines()[0]}") for name, problem in top.problems.items()]
    if top.kept:
        notes.insert(
            0, Text(f"values that stay in processes: {kept_text(top.kept)}", no_wrap=True, overflow="ellipsis")
        )
    calls_shown, ranks_shown = len(top.calls), len(ranks)
    if height is not None:
        free = max(2, height - 2 * HEADS - 1 - len(notes))
        calls_shown = min(len(top.calls), max(free // CALL_SHARE, free - len(ranks)))
        ranks_shown = min(len(ranks), free - calls_shown)
    parts: list[RenderableType] = [Text(title, no_wrap=True, overflow="ellipsis")]
    if top.calls:
        parts += [_calls(top.calls[:calls_shown], width=width), _rest(len(top.calls) - calls_shown, "meshes")]
    if ranks:
        shown = ranks[:ranks_shown]
        parts += [_ranks(shown, top.gpus, wide=width >= NARROW), _rest(len(ranks) - ranks_shown, "ranks")]
    if not top.calls and not ranks:
        parts.append(Text("no session has processes"))
    return Group(*parts, *notes)


def _rest(count: int, what: str) -> Text:
    return Text(f"… and {count:,} more {what}" if count > 0 else "")


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = new_table()
    for name in left:
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=4)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _calls(calls: Sequence[CallRate], *, width: int) -> Table:
    wide = width >= NARROW
    late = width >= WIDE and any(call.straggler is not None for call in calls)
    right = ["CALLS/S", "LATENCY", "FAILED", "IN FLIGHT", "OLDEST", *(["STRAGGLER"] if late else [])]
    table = _table(["ACTORS", "SESSION"] if wide else ["ACTORS"], right)
    for call in calls:
        table.add_row(
            *((call.mesh, call.session[:8]) if wide else (call.mesh,)),
            f"{call.rate:,.1f}" if call.rate < 100 else f"{call.rate:,.0f}",
            duration_text(call.latency) if call.latency is not None else "-",
            Text(str(call.failed), style="red" if call.failed else ""),
            str(call.in_flight),
            age_text(call.oldest) if call.oldest is not None else "-",
            *([_straggler(call.straggler)] if late else []),
        )
    return table


def _straggler(late: LateRank | None) -> str:
    """``rank 5 43% +812.0ms``: how often it was the last, and how late."""
    return (
        f"rank {late.rank} {late.calls / late.compared:.0%} +{duration_text(late.seconds)}" if late is not None else "-"
    )


def _ranks(ranks: Sequence[RankUsage], gpus: Sequence[GpuUsage], *, wide: bool) -> Table:
    """GPU columns only if a host has GPUs, and one of what stays in the processes only if something does."""
    keeps = any(rank.kept for rank in ranks)
    left, right = ["PROCS", "HOST"], ["RANK", "CPU", "MEMORY", *(["KEPT"] if keeps else [])]
    if wide:
        right.insert(1, "PID")
    if gpus:
        right += ["GPUS", "GPU", "GPU MEMORY"] if wide else ["GPU", "GPU MEM"]
    table = _table(left, right)
    for rank in ranks:
        row = [rank.mesh, rank.host, str(rank.rank), *([str(rank.pid)] if wide else [])]
        row += [_percent(rank.cpu), _size(rank.memory), *([_size(rank.kept)] if keeps else [])]
        if gpus:
            row += [",".join(map(str, rank.gpus)) or "-"] if wide else []
            row += [_percent(rank.gpu), _size(rank.gpu_memory)]
        table.add_row(*row)
    return table


def _percent(value: float | None) -> str:
    return f"{value:.0f}%" if value is not None else "-"


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    for unit, length in (("Gi", 2**30), ("Mi", 2**20)):
        if size >= length:
            return f"{size / length:.1f}{unit}" if unit == "Gi" else f"{size / length:.0f}{unit}"
    return f"{size / 1024:.0f}Ki"

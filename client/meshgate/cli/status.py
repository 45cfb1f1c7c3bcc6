"""``meshgate status``, ``describe`` and ``sessions``: a job as its gateway, and the cluster, see it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field
from rich.console import Console
from rich.text import Text

from meshgate.cli import jobs
from meshgate.cli.console import AsJson, Job, Namespace, age_text, emit, meshes_text, new_table
from meshgate.cli.models import ClusterEvent, JobRow, LateRank, LostRanks, Result
from meshgate.errors import ranks_text
from meshgate.jobs import registry
from meshgate.jobs.find import find_job
from meshgate.jobs.sessions import EndedSession, SessionInfo
from meshgate.jobs.trait import JobTrait
from meshgate.ranks import OWN_MESHES
from meshgate_wire.messages import waiting_ranks
from meshgate_wire.status import (
    CallStatus,
    HostStatus,
    JobStatus,
    MeshStatus,
    RunStatus,
    SessionStatus,
    SlurmAllocation,
)

MAX_LOST = 8  # rows
UNNAMED = "an endpoint's mesh"
SEQUENCES_NAMED = 8  # of ranks
VERSION_SHOWN = 12
NAMES_SHOWN = 4
ENDED_SHOWN = 10


class Description(Result):
    """``meshgate describe``"""

    job: JobRow
    gateway: str = Field(description="how the gateway is reached")
    log: str = Field(default="", description="the file of the gateway's log, on this machine")
    objects: list[str] = Field(default=[], description="kind/name of each object, in a cluster")
    events: list[ClusterEvent] = Field(default=[], description="recent events, in a cluster")
    status: JobStatus


def report_status(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show hosts, code versions, sessions and calls in flight."""
    status = find_job(job, namespace).status()
    emit(status, as_json, lambda console: show_status(status, console))


def describe_job(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show everything about a job, in a cluster also its events."""
    found = describe(find_job(job, namespace), namespace)
    emit(found, as_json, lambda console: show_description(found, console))


def show_status(status: JobStatus, console: Console, reached: str = "") -> None:
    """``reached``: how the gateway is reached, if that is known."""
    gateway = ", ".join(filter(None, [reached, f"meshgate {status.gateway_version}, Python {status.python}"]))
    console.print(f"meshes    {meshes_text(status.meshes) or '(none)'}")
    console.print(f"gateway   {gateway}")
    if status.slurm is not None:
        console.print(f"slurm     {_allocation(status.slurm)}")
    console.print(f"sessions  {len(status.sessions)}")
    _show_runs(status.runs, console)
    if not status.sessions:
        _show_hosts(status.hosts, console)
    for session in status.sessions:
        _show_session(session, console)


def _allocation(slurm: SlurmAllocation) -> str:
    """``job 4711 RUNNING, partition gpu, account physics, qos normal, 12m of 1h left``."""
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    parts = [f"job {slurm.job_id} {slurm.state}", *(f"{name} {value}" for name, value in named.items() if value)]
    limit = "" if slurm.time_limit is None else age_text(slurm.time_limit)
    if slurm.seconds_left is not None:
        parts.append(f"{age_text(slurm.seconds_left)}{limit and f' of {limit}'} left")
    elif limit:
        parts.append(f"time limit {limit}")
    return ", ".join(parts)


def _show_runs(runs: Sequence[RunStatus], console: Console) -> None:
    """Those that have not ended, and those that `meshgate runs` has not listed since they ended."""
    shown = [run for run in runs if run.live or run.news]
    if not shown:
        return
    table = new_table("  RUN", "STATE", "EXIT", "AGE", "WHY")
    for run in shown:
        code = "" if run.live or run.exit_code is None else str(run.exit_code)
        table.add_row(f"  {run.name}{' *' if run.news else ''}", run.state, code, age_text(run.age), run.reason)
    live = sum(run.live for run in shown)
    console.print(f"runs      {live} active, {len(shown) - live} ended since `meshgate runs` was last called")
    console.print(table)


def _show_session(session: SessionStatus, console: Console) -> None:
    connected = "connected" if session.connected else "disconnected"
    name = session.session[:8] if session.name in ("", session.session[:8]) else f"{session.session[:8]} {session.name}"
    version = f", code {session.version[:VERSION_SHOWN]}" if session.version else ""
    console.print(Text.assemble("\n", (f"session {name}", "bold"), f"  {session.owner}, {connected}{version}"))
    if session.problem:
        console.print(f"  {session.problem}")
    _show_hosts(session.hosts, console)
    if session.meshes:
        table = new_table("  MESH", "KIND", "SHAPE", "CODE", "STATE")
        for mesh in session.meshes:
            table.add_row(f"  {mesh.name}", mesh.kind, _shape(mesh), mesh.version[:VERSION_SHOWN], _state(mesh))
        console.print(table)
    for line in lost_lines(lost_ranks(session), MAX_LOST):
        console.print(f"  {line}")
    if session.calls_in_flight:
        console.print(f"  {session.calls_in_flight} call{'' if session.calls_in_flight == 1 else 's'} in flight")
        table = new_table("  CALL", "AGE", "ANSWERED", "WAITING FOR")
        for call in session.calls:
            table.add_row(
                f"  {call_text(call)}", age_text(call.age), f"{call.answered}/{call.total}", waiting_text(call)
            )
        console.print(table)


def late_ranks(session: SessionStatus, mesh: MeshStatus) -> list[LateRank]:
    """The stragglers of each endpoint of ``mesh``, first the one that others have waited for longest. None if meshgate
    itself has spawned it."""
    return [
        LateRank(
            session=session.session,
            mesh=mesh.name,
            endpoint=endpoint,
            rank=straggler.rank,
            host=straggler.host,
            calls=straggler.calls,
            compared=counts.compared,
            seconds=straggler.seconds / straggler.calls,
        )
        for endpoint, counts in mesh.endpoints.items()
        if mesh.name not in OWN_MESHES
        for straggler in counts.stragglers
    ]


def lost_ranks(session: SessionStatus) -> list[LostRanks]:
    """The ranks that the session has lost, by mesh and reason; each once, if its actors ended with its process."""
    processes = {mesh.number: _ended(mesh, stopped=False) for mesh in session.meshes if mesh.kind == "procs"}
    found = []
    for mesh in sorted(session.meshes, key=lambda mesh: mesh.kind == "actors"):
        with_process = processes.get(mesh.procs, frozenset()) if mesh.kind == "actors" else frozenset()
        for group in mesh.ended:
            ranks = [rank for rank in group.each() if rank not in with_process]
            if ranks and not group.stopped and mesh.name not in OWN_MESHES:
                facts = group.model_dump(exclude={"ranks", "stopped"})
                found.append(LostRanks(session=session.session, mesh=mesh.name, ranks=ranks, **facts))
    return found


def lost_lines(lost: Sequence[LostRanks], most: int) -> list[str]:
    """``lost: procs ranks 3, 5-7: killed by SIGKILL (out of memory?), 2m ago``: the last lost first, at most
    ``most`` lines and one more."""
    newest = sorted(lost, key=lambda each: math.inf if each.last_age is None else each.last_age)
    lines = [
        f"lost: {each.mesh or UNNAMED} {ranks_text(each.ranks, SEQUENCES_NAMED)}: {each.reason}{_ago(each)}"
        for each in newest[:most]
    ]
    if rest := sum(len(each.ranks) for each in newest[most:]):
        lines.append(f"and {rest:,} more lost rank{'' if rest == 1 else 's'}")
    return lines


def _ago(lost: LostRanks) -> str:
    if lost.age is None or lost.last_age is None:
        return ""
    first, last = age_text(lost.age), age_text(lost.last_age)
    together = first == last or lost.age - lost.last_age < lost.age / 10
    return f", {last} ago" if together else f", first {first} ago, last {last} ago"


def call_text(call: CallStatus) -> str:
    return f"{call.mesh}.{call.endpoint}" + (" (cancelled)" if call.cancelled else "")


def waiting_text(call: CallStatus) -> str:
    return waiting_ranks(call.waiting, call.total - call.answered)


def _show_hosts(hosts: Sequence[HostStatus], console: Console) -> None:
    if not hosts:
        return
    table = new_table("  HOST", "MESH", "RANK", "STATE", "CODE")
    for host in hosts:
        state = host.state if host.seconds_left is None else f"ends in {host.seconds_left:.0f} s"
        state = f"{state}: {host.reason}" if host.reason else state
        table.add_row(f"  {host.name}", host.mesh, str(host.rank), state, host.version[:VERSION_SHOWN])
    console.print(table)


def _ended(mesh: MeshStatus, *, stopped: bool) -> frozenset[int]:
    """The ranks that the program has stopped, or the lost ones."""
    return frozenset(rank for group in mesh.ended if group.stopped == stopped for rank in group.each())


def _shape(mesh: MeshStatus) -> str:
    return " ".join(f"{label}={size}" for label, size in mesh.sizes.items())


def _state(mesh: MeshStatus) -> str:
    state = "up"
    counts = {name: len(_ended(mesh, stopped=name == "stopped")) for name in ("lost", "stopped")}
    if any(counts.values()):
        state = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{state}; keeps {mesh.kept / 1e6:,.1f} MB" if mesh.kept else state


def describe(job: JobTrait, namespace: str | None) -> Description:
    status = job.status()
    gateway = str(job._dialer())
    if namespace is not None:
        name = str(getattr(job, "name", ""))
        row = next(row for row in jobs.cluster_jobs(namespace).jobs if row.id == name)
        objects, events = jobs.objects_and_events(name, namespace)
        return Description(job=row, gateway=gateway, objects=objects, events=events, status=status)
    apply_id = job.apply_id or ""
    for entry in registry.entries():
        if entry.apply_id == apply_id:
            log = str(registry.log_file(apply_id))
            return Description(job=jobs.row_of(entry), gateway=gateway, log=log, status=status)
    row = JobRow(id=apply_id, kind=type(job).__name__, meshes=status.meshes, age=None)
    return Description(job=row, gateway=gateway, status=status)


def show_description(found: Description, console: Console) -> None:
    job = found.job
    facts = {
        "id": job.id,
        "kind": job.kind,
        "namespace": job.namespace,
        "owner": job.owner,
        "age": age_text(job.age),
        "pid": job.pid or "",
        "directory": job.directory,
        "log": found.log,
    }
    for name, value in facts.items():
        if value:
            console.print(f"{name:<9} {value}")
    show_status(found.status, console, found.gateway)
    if found.objects:
        console.print("\nobjects", style="bold")
        for each in found.objects:
            console.print(f"  {each}")
    if found.events:
        table = new_table("  OBJECT", "REASON", "COUNT", "MESSAGE")
        for event in found.events:
            table.add_row(f"  {event.object}", event.reason, str(event.count), event.message)
        console.print("\nevents", style="bold")
        console.print(table)


class Sessions(Result):
    """``meshgate sessions``"""

    sessions: list[SessionInfo]
    ended: list[EndedSession] = Field(default=[], description="those that were detached, or did not end in order")


def list_sessions(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """List the sessions of a job.

    Each with its age, meshes, calls and code version, and the process that holds it. Then those that have ended, with
    the reason, if they were detached or did not end in order.
    """
    known = find_job(job, namespace)._list_sessions(None)
    found = Sessions(sessions=known.sessions, ended=known.ended)
    emit(found, as_json, lambda console: show_sessions(found, console))


def show_sessions(found: Sessions, console: Console) -> None:
    table = new_table("NAME", "ID", "STATE", "AGE", "MESHES", "IN FLIGHT", "FINISHED", "UNREAD LINES", "CODE", "HOLDER")
    for info in found.sessions:
        table.add_row(
            info.name or "-",
            info.id[:8],
            info.error or _held(info),
            age_text(info.age),
            _shortened((*info.actors, *info.procs)) or "-",
            str(info.calls_in_flight),
            str(info.calls_finished),
            str(info.unread_lines),
            (info.code_version or "-")[:VERSION_SHOWN],
            info.holder or "-",
        )
    console.print(table if found.sessions else "the job has no sessions")
    for ended in found.ended[-ENDED_SHOWN:]:
        console.print(str(ended))


def _held(info: SessionInfo) -> str:
    held = "held" if info.connected else "left"
    return f"{held}, detached" if info.detached else held


def _shortened(names: tuple[str, ...]) -> str:
    shown = ",".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown},… ({len(names)})"

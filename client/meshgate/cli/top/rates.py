"""From two looks at a job to what happened between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from statistics import fmean

from meshgate.cli.models import CallRate, GpuUsage, RankUsage, Top
from meshgate.ranks import OWN_MESHES
from meshgate.ranks.usage.meter import ProcessUsage, Usage
from meshgate_wire.status import CallCounts, JobStatus, MeshStatus, SessionStatus

_NONE = CallCounts()


def compare(before: JobStatus, now: JobStatus, seconds: float, usage: Usage) -> Top:
    """What happened in the ``seconds`` between two states of a job. ``usage`` is that of its processes now."""
    counted = {(session.session, mesh.number): mesh.calls for session, mesh in _actors(before)}
    calls = [
        _rate(session, mesh, counted.get((session.session, mesh.number)) or _NONE, seconds)
        for session, mesh in _actors(now)
    ]
    problems = {f"session {session.session[:8]}": session.problem for session in now.sessions if session.problem}
    return Top(
        seconds=seconds,
        calls=sorted(calls, key=lambda each: (each.session, each.mesh)),
        ranks=[_rank(process, usage) for process in usage.processes],
        gpus=[GpuUsage.model_validate(gpu) for gpu in usage.gpus],
        problems={**problems, **usage.problems},
    )


def _actors(status: JobStatus) -> Iterator[tuple[SessionStatus, MeshStatus]]:
    for session in status.sessions:
        for mesh in session.meshes:
            if mesh.kind == "actors" and mesh.name not in OWN_MESHES:
                yield session, mesh


def _rate(session: SessionStatus, mesh: MeshStatus, before: CallCounts, seconds: float) -> CallRate:
    now = mesh.calls or _NONE
    ended, casts = now.ended - before.ended, now.casts - before.casts
    return CallRate(
        session=session.session,
        mesh=mesh.name,
        class_name=mesh.class_name,
        ranks=prod(mesh.sizes.values()),
        ended=ended,
        failed=now.failed - before.failed,
        rate=(ended + casts) / seconds,
        latency=(now.seconds - before.seconds) / ended if ended else None,
        casts=casts,
        in_flight=now.in_flight,
        oldest=max((call.age for call in session.calls if call.mesh == mesh.name), default=None),
    )


def _rank(process: ProcessUsage, usage: Usage) -> RankUsage:
    used = [gpu for gpu in usage.gpus if gpu.host == process.host and gpu.index in process.gpus]
    busy = [gpu.utilization for gpu in used if gpu.utilization is not None]
    memory = [gpu.memory for gpu in used if gpu.memory is not None]
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
    )

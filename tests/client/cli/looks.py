"""Looks at a job, made up."""

from __future__ import annotations

from typing import Any

from meshgate.cli import top as module
from meshgate.cli.models import Top
from meshgate.ranks.usage import ProcessUsage, Usage
from meshgate_wire.status import CallCounts, CallStatus, JobStatus, MeshStatus, SessionStatus

GIB = 2**30
LIKE_MARKUP = ["[/x]", "[a,b]", "[bold]", ":x:"]  # for rich, which must take it for text


def status(
    counts: CallCounts | None, *, age: float = 3.0, problem: str = "", kept: int = 0, **actors: Any
) -> JobStatus:
    by_rank = {1: kept} if kept else {}
    meshes = (
        MeshStatus(kind="procs", name="procs", sizes={"hosts": 2}, number=1, kept=kept, kept_by_rank=by_rank),
        MeshStatus(kind="actors", name="trainers", sizes={"hosts": 2}, number=2, procs=1, calls=counts, **actors),
        MeshStatus(kind="actors", name="meshgate_top", sizes={"hosts": 2}, number=4, calls=counts),
    )
    call = CallStatus(mesh="trainers", endpoint="step", age=age, total=2, answered=0)
    session = SessionStatus(
        session="abcdef0123456789", owner="me", connected=True, pid=1, meshes=meshes, calls=(call,), problem=problem
    )
    return JobStatus(gateway_version="1", python="3.11", meshes={"workers": 2}, sessions=(session,))


def process(rank: int, cpu: float | None = 50.0, **facts: Any) -> ProcessUsage:
    values: dict[str, Any] = {"memory": 3 * GIB, "gpus": (), "gpu_memory": None, **facts}
    return ProcessUsage("procs", rank, f"workers-{rank}", 100 + rank, cpu, **values)


def compare(before: JobStatus, now: JobStatus, seconds: float, usage: Usage) -> Top:
    return module.compare(module.count(before, 0.0, {}), now, 0.0, seconds, usage)


def top(ranks: int = 2, **facts: Any) -> Top:
    before, now = CallCounts(ended=10, seconds=1.0), CallCounts(ended=30, failed=4, seconds=1.5, casts=8, in_flight=3)
    return compare(status(before), status(now), 4.0, Usage([process(rank) for rank in range(ranks)], **facts))

"""What an engine reports about its session: its meshes, hosts and calls in flight, and the lines that were printed.

Only reads what the other parts know; nothing here changes them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshgate_gateway.control import Inspect, Inspected
from meshgate_gateway.engine.calls.calling import Calling
from meshgate_gateway.engine.code.code_sync import CodeSync
from meshgate_gateway.engine.meshes.host_watch import HostWatch
from meshgate_gateway.engine.meshes.supervision import HOST_LOST, PROCESS_ENDED
from meshgate_gateway.engine.monarch.interface import exit_code
from meshgate_gateway.engine.objects.records import (
    OTHER_ENDPOINTS,
    ActorMesh,
    CallTotals,
    Deaths,
    HostMesh,
    ProcMesh,
    Timeline,
)
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_processes.identity import exit_text
from meshgate_wire.fields import exception_line, shorten, spans_of
from meshgate_wire.messages import OutputLine, Region
from meshgate_wire.status import (
    CallCounts,
    CallTimeline,
    EndedRanks,
    EngineStatus,
    HostStatus,
    MeshStatus,
    PrintedLine,
    RankReply,
    SessionOutput,
    Straggler,
)

MAX_KEPT = 4 * 2**20  # characters of output that are kept
MAX_PAGE = 2**20  # characters of output in one answer
MAX_CALLS = 256
MAX_PART = 32_000  # characters of JSON in a control message, which takes up to four bytes for each
MAX_REASON = 4096
MAX_STRAGGLERS = 8  # of an endpoint
MAX_REASONS = 32  # for which ranks of a mesh ended
MAX_SHORT_REASON = 512
STOPPED = "stopped by the program"
MAX_TIMELINES_IN_FLIGHT, MAX_TIMELINES_ENDED = 8, 16
_RANK = re.compile(r" ?\{'[^{}]*': \d+/\d+\}")  # in the name of an actor
LINE_COST = 256  # characters that a line counts for besides its text


class PrintedLines:
    """The last lines of the session's output, numbered from 1."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, OutputLine]] = deque()  # each with the time at which it came
        self._size = 0
        self._last = 0  # number of the newest line

    def add(self, lines: Iterable[OutputLine]) -> None:
        now = time.time()
        for line in lines:
            self._last += 1
            self._lines.append((now, line))
            self._size += LINE_COST + len(line.text)
        while self._size > MAX_KEPT:
            self._size -= LINE_COST + len(self._lines.popleft()[1].text)

    def after(self, number: int) -> SessionOutput:
        """The lines after ``number``, oldest first, as many as fit into one answer."""
        page: list[PrintedLine] = []
        size = 0
        first = self._last - len(self._lines) + 1
        for index in range(max(0, number + 1 - first), len(self._lines)):
            printed, line = self._lines[index]
            size += LINE_COST + len(line.text)
            if size > MAX_PAGE and page:
                break
            page.append(PrintedLine(number=first + index, time=printed, **line.model_dump()))
        dropped = max(0, first - 1 - number)
        return SessionOutput(now=time.time(), lines=tuple(page), last=self._last, dropped=dropped)


class _Group(NamedTuple):
    """Ranks that ended for the same reason, without their ages; when the first and the last of them ended."""

    ended: EndedRanks
    first: float
    last: float


class _KnownGroups(NamedTuple):
    """The groups of a mesh after so many ``changes`` to what is known of its ends."""

    mesh: ProcMesh | ActorMesh
    changes: tuple[int, int]
    groups: tuple[_Group, ...]


class Inspection:
    """``kept_bytes()``: of the values that stay in processes, by the id of the mesh's record, and by rank.
    ``describe()`` is what the list of sessions says of this one."""

    def __init__(
        self,
        objects: ObjectTable,
        calls: Calling,
        code: CodeSync,
        hosts: HostWatch,
        kept_bytes: Callable[[], Mapping[int, Mapping[int, int]]],
        session_name: Callable[[], str],
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._session_name, self._describe = session_name, describe
        self._objects, self._calls, self._code, self._watch, self._kept_bytes = objects, calls, code, hosts, kept_bytes
        self._grouped: dict[int, _KnownGroups] = {}  # by the number of the mesh, as of the last status
        self.output = PrintedLines()

    def answer(self, request: Inspect) -> Iterator[Inspected]:
        """The answer, in parts that each fit into a control message."""
        if request.what == "session":
            body = json.dumps(self._describe())
        else:
            found = self.status() if request.what == "status" else self.output.after(request.after)
            body = found.model_dump_json()
        parts = [body[start : start + MAX_PART] for start in range(0, len(body), MAX_PART)]
        for index, part in enumerate(parts):
            yield Inspected(request=request.request, body=part, more=index + 1 < len(parts))

    def status(self) -> EngineStatus:
        numbers = {id(mesh): number for number, mesh in self._objects.items()}
        calls, total = self._calls.statuses(MAX_CALLS, numbers)
        # Of meshes of the same name the newest: the job may have been scaled.
        attached = {
            (mesh.name, number > 0): mesh for number, mesh in self._objects.items() if isinstance(mesh, HostMesh)
        }
        return EngineStatus(
            name=self._session_name(),
            version=self._code.current_version,
            hosts=tuple(status for mesh in attached.values() for status in self._hosts(mesh)),
            meshes=self._meshes(numbers),
            calls=tuple(calls),
            calls_in_flight=total,
            timelines=self._timelines(),
        )

    def _timelines(self) -> tuple[CallTimeline, ...]:
        meshes = [mesh for mesh in self._objects.values() if isinstance(mesh, ActorMesh)]
        ended = ((each, mesh) for mesh in meshes for totals in mesh.totals.values() for each in totals.timelines)
        newest = heapq.nlargest(MAX_TIMELINES_ENDED, ended, key=lambda each: each[0].ended or 0.0)
        now = time.monotonic()
        return tuple(
            _timeline(each, mesh, now) for each, mesh in (*self._calls.timelines(MAX_TIMELINES_IN_FLIGHT), *newest)
        )

    def _meshes(self, numbers: Mapping[int, int]) -> tuple[MeshStatus, ...]:
        items = [(number, mesh) for number, mesh in self._objects.items() if isinstance(mesh, (ProcMesh, ActorMesh))]
        in_flight = self._calls.in_flight()
        kept = self._kept_bytes()
        self._grouped = {number: self._groups_of(number, mesh) for number, mesh in items}
        return tuple(
            _mesh(mesh, number, numbers, in_flight, kept.get(id(mesh), {}), self._grouped[number].groups)
            for number, mesh in items
        )

    def _groups_of(self, number: int, mesh: ProcMesh | ActorMesh) -> _KnownGroups:
        """Each status has every mesh that the session ever spawned, so what has not changed is not grouped again."""
        changes = (mesh.dead.changes, _deaths_of_processes(mesh).changes)
        known = self._grouped.get(number)
        if known is None or known.mesh is not mesh or known.changes != changes:
            known = _KnownGroups(mesh, changes, _grouped(mesh))
        return known

    def _hosts(self, mesh: HostMesh) -> Iterator[HostStatus]:
        for rank, name in enumerate(mesh.names):
            missing = mesh.missing.get(name)
            version = self._code.current_version if self._code.has_version(name) else ""
            if missing is not None:
                reason = shorten(str(missing), MAX_REASON)
                yield HostStatus(mesh=mesh.name, rank=rank, name=name, state="missing", reason=reason)
                continue
            end = self._watch.end_of(name)
            yield HostStatus(
                mesh=mesh.name,
                rank=rank,
                name=name,
                reason="" if end is None else shorten(end[0], MAX_REASON),
                seconds_left=None if end is None else end[1],
                version=version,
                parent=self._code.parent_of(name),
            )


def _mesh(
    mesh: ProcMesh | ActorMesh,
    number: int,
    numbers: Mapping[int, int],
    in_flight: Mapping[tuple[int, str], int],
    kept: Mapping[int, int],
    groups: Iterable[_Group],
) -> MeshStatus:
    """``numbers`` are those of the known meshes by the ids of their records; ``in_flight`` has these ids, too.
    ``kept``: the bytes of values that stay in its processes, by rank; ``groups``: its ranks that ended."""
    common: dict[str, Any] = {
        "name": mesh.name,
        "number": number,
        "sizes": _sizes(mesh.region),
        "dead": {rank: shorten(reason, MAX_REASON) for rank, reason in itertools.islice(mesh.dead.items(), 64)},
        "ended": _aged(groups),
    }
    if isinstance(mesh, ActorMesh):
        waiting: Counter[str] = Counter()
        for (found, endpoint), count in in_flight.items():
            if found == id(mesh):
                waiting[endpoint if endpoint in mesh.totals else OTHER_ENDPOINTS] += count
        return MeshStatus(
            kind="actors",
            class_name=mesh.class_name,
            procs=numbers.get(id(mesh.procs), 0),
            calls=_counts(mesh, mesh.totals.values(), sum(waiting.values())),
            endpoints={name: _counts(mesh, [totals], waiting[name]) for name, totals in mesh.totals.items()},
            **common,
        )
    common |= {"kept": sum(kept.values()), "kept_by_rank": dict(kept)}
    return MeshStatus(kind="procs", version=mesh.version or "", hosts=mesh.host_names, **common)


def _deaths_of_processes(mesh: ProcMesh | ActorMesh) -> Deaths:
    procs = mesh if isinstance(mesh, ProcMesh) else mesh.procs
    return mesh.dead if procs is None else procs.dead


def _grouped(mesh: ProcMesh | ActorMesh) -> tuple[_Group, ...]:
    """The ranks that ended, by reason: those that the program has stopped, then the most frequent reason."""
    of_procs = _deaths_of_processes(mesh)
    groups: dict[tuple[bool, str, int | None], dict[int, float]] = {}
    for rank, report in mesh.dead.items():
        stopped = rank in mesh.dead.stopped
        with_process = rank in of_procs and rank not in of_procs.stopped
        deaths = of_procs if with_process else mesh.dead  # an actor ends with its process
        reason, code = STOPPED, None
        if not stopped:
            if with_process or exit_code(report) is not None:  # Monarch may know of the end before its connection
                code = of_procs.exit_codes.get(rank)
            reason = _reason(deaths[rank], code, deaths.host_reasons.get(rank, ""))
        groups.setdefault((stopped, reason, code), {})[rank] = deaths.times[rank]
    ordered = sorted(groups.items(), key=lambda group: (not group[0][0], -len(group[1])))
    if len(ordered) > MAX_REASONS:
        others = {rank: at for _, times in ordered[MAX_REASONS - 1 :] for rank, at in times.items()}
        reason = f"{len(ordered) - MAX_REASONS + 1} other reasons"
        ordered[MAX_REASONS - 1 :] = [((False, reason, None), others)]
    return tuple(
        _Group(
            EndedRanks(ranks=tuple(spans_of(sorted(times))), reason=reason, exit_code=code, stopped=stopped),
            min(times.values()),
            max(times.values()),
        )
        for (stopped, reason, code), times in ordered
    )


def _aged(groups: Iterable[_Group]) -> tuple[EndedRanks, ...]:
    now = time.monotonic()
    return tuple(
        group.ended.model_copy(update={"age": now - group.first, "last_age": now - group.last}) for group in groups
    )


def _reason(report: str, code: int | None, host_reason: str) -> str:
    """``report`` in short, without what differs among ranks."""
    if report.startswith(HOST_LOST):
        return _one_line(f"its host is lost: {host_reason}".removesuffix(": "))
    if code is not None:
        reason = exit_text(code, exited="exited with code").removeprefix("was ")
        reason += " (out of memory?)" if code == -signal.SIGKILL and not host_reason else ""
    elif PROCESS_ENDED.match(report):
        reason = "its process ended (exit code unknown)"
    else:
        lines = _RANK.sub("", report).strip().split("\n")
        reason = " ".join(lines) if len(lines) < 3 else exception_line(report) or lines[-1].strip()
    return _one_line(reason if not host_reason or host_reason in reason else f"{reason}; its host: {host_reason}")


def _one_line(text: str) -> str:
    return " ".join(shorten(text, MAX_SHORT_REASON).split())


def _counts(mesh: ActorMesh, totals: Collection[CallTotals], in_flight: int) -> CallCounts:
    late: dict[int, list[float]] = {}
    for rank, seconds in (last for each in totals for last in each.last_ranks):
        if seconds:
            late.setdefault(rank, []).append(seconds)
    stragglers = [
        Straggler(rank=rank, host=mesh.host_of(rank), calls=len(each), seconds=sum(each)) for rank, each in late.items()
    ]
    return CallCounts(
        ended=sum(each.ended for each in totals),
        failed=sum(each.failed for each in totals),
        seconds=sum(each.seconds for each in totals),
        casts=sum(each.casts for each in totals),
        in_flight=in_flight,
        compared=sum(len(each.last_ranks) for each in totals),
        stragglers=tuple(heapq.nlargest(MAX_STRAGGLERS, stragglers, key=lambda each: each.seconds)),
    )


def _timeline(timeline: Timeline, mesh: ActorMesh, now: float) -> CallTimeline:
    """``now`` is a time of ``time.monotonic``."""

    def after(at: float) -> float:
        return round(at - timeline.started, 6)

    ranks = timeline.ranks
    raised = {at for at, _ in timeline.raised}
    replies = sorted({*timeline.last, *timeline.raised}, key=lambda each: -each[1])
    return CallTimeline(
        call=timeline.call,
        mesh=mesh.name,
        endpoint=timeline.endpoint,
        age=round(now - timeline.started, 3),
        seconds=None if timeline.ended is None else after(timeline.ended),
        failed=timeline.failed,
        cancelled=timeline.cancelled,
        total=len(ranks),
        answered=timeline.answered,
        first=None if timeline.first is None else after(timeline.first),
        half=None if timeline.half is None else after(timeline.half),
        replies=tuple(
            RankReply(rank=ranks[at], host=mesh.host_of(ranks[at]), seconds=after(arrived), raised=at in raised)
            for at, arrived in replies
            if at < len(ranks)  # others are of a rank that was not called
        ),
        missing={ranks[at]: mesh.host_of(ranks[at]) for at in timeline.missing},
        straggler=timeline.compared[0] if timeline.compared is not None and timeline.compared[1] else None,
    )


def _sizes(region: Region) -> dict[str, int]:
    labels: Sequence[str] = region.labels
    return dict(zip(labels, region.sizes, strict=True))

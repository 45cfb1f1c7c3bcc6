"""What an engine reports about its session: its meshes, hosts and calls in flight, and the lines that were printed.

Only reads what the other parts know; nothing here changes them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from meshgate_gateway.control.messages import Inspect, Inspected
from meshgate_gateway.engine.objects.records import OTHER_ENDPOINTS, ActorMesh, CallTotals, HostMesh, ProcMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import OutputLine, Region
from meshgate_wire.models.fields import shorten
from meshgate_wire.status import (
    CallCounts,
    CallStatus,
    EngineStatus,
    HostStatus,
    MeshStatus,
    PrintedLine,
    SessionOutput,
)

MAX_KEPT = 4 * 2**20  # characters of output that are kept
MAX_PAGE = 2**20  # characters of output in one answer
MAX_CALLS = 256
MAX_PART = 32_000  # characters of JSON in a control message, which takes up to four bytes for each
MAX_REASON = 4096
LINE_COST = 256  # characters that a line counts for besides its text


class Code(Protocol):
    """What inspection needs to know of the code sync."""

    @property
    def current_version(self) -> str: ...

    def has_version(self, host: str) -> bool: ...

    def parent_of(self, host: str) -> str: ...


class CallsInFlight(Protocol):
    def statuses(self, limit: int) -> tuple[list[CallStatus], int]:
        """The oldest calls in flight, and how many there are."""

    def in_flight(self) -> Mapping[tuple[int, str], int]:
        """The number of calls in flight by the id of their mesh's record, and their endpoint."""


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


class Inspection:
    """``kept_bytes()``: of the values that stay in processes, by the id of the mesh's record, and by rank."""

    def __init__(
        self,
        objects: ObjectTable,
        calls: CallsInFlight,
        code: Code,
        kept_bytes: Callable[[], Mapping[int, Mapping[int, int]]],
    ) -> None:
        self._objects, self._calls, self._code, self._kept_bytes = objects, calls, code, kept_bytes
        self.output = PrintedLines()

    def answer(self, request: Inspect) -> Iterator[Inspected]:
        """The answer, in parts that each fit into a control message."""
        found = self.status() if request.what == "status" else self.output.after(request.after)
        body = found.model_dump_json()
        parts = [body[start : start + MAX_PART] for start in range(0, len(body), MAX_PART)]
        for index, part in enumerate(parts):
            yield Inspected(request=request.request, body=part, more=index + 1 < len(parts))

    def status(self) -> EngineStatus:
        calls, total = self._calls.statuses(MAX_CALLS)
        known = self._objects.values()
        return EngineStatus(
            version=self._code.current_version,
            hosts=tuple(status for mesh in known if isinstance(mesh, HostMesh) for status in self._hosts(mesh)),
            meshes=self._meshes(),
            calls=tuple(calls),
            calls_in_flight=total,
        )

    def _meshes(self) -> tuple[MeshStatus, ...]:
        items = [(number, mesh) for number, mesh in self._objects.items() if isinstance(mesh, (ProcMesh, ActorMesh))]
        numbers = {id(mesh): number for number, mesh in items}
        in_flight = self._calls.in_flight()
        kept = self._kept_bytes()
        return tuple(_mesh(mesh, number, numbers, in_flight, kept.get(id(mesh), {})) for number, mesh in items)

    def _hosts(self, mesh: HostMesh) -> Iterator[HostStatus]:
        for rank, name in enumerate(mesh.names):
            missing = mesh.missing.get(name)
            version = self._code.current_version if self._code.has_version(name) else ""
            if missing is None:
                parent = self._code.parent_of(name)
                yield HostStatus(mesh=mesh.name, rank=rank, name=name, version=version, parent=parent)
            else:
                reason = shorten(str(missing), MAX_REASON)
                yield HostStatus(mesh=mesh.name, rank=rank, name=name, state="missing", reason=reason)


def _mesh(
    mesh: ProcMesh | ActorMesh,
    number: int,
    numbers: Mapping[int, int],
    in_flight: Mapping[tuple[int, str], int],
    kept: Mapping[int, int],
) -> MeshStatus:
    """``numbers`` are those of the known meshes by the ids of their records; ``in_flight`` has these ids, too.
    ``kept``: the bytes of values that stay in its processes, by rank."""
    common: dict[str, Any] = {
        "name": mesh.name,
        "number": number,
        "sizes": _sizes(mesh.region),
        "dead": {rank: shorten(reason, MAX_REASON) for rank, reason in list(mesh.dead.items())[:64]},
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
            calls=_counts(mesh.totals.values(), sum(waiting.values())),
            endpoints={name: _counts([totals], waiting[name]) for name, totals in mesh.totals.items()},
            **common,
        )
    common |= {"kept": sum(kept.values()), "kept_by_rank": dict(kept)}
    return MeshStatus(kind="procs", version=mesh.version or "", hosts=mesh.host_names, **common)


def _counts(totals: Collection[CallTotals], in_flight: int) -> CallCounts:
    return CallCounts(
        ended=sum(each.ended for each in totals),
        failed=sum(each.failed for each in totals),
        seconds=sum(each.seconds for each in totals),
        casts=sum(each.casts for each in totals),
        in_flight=in_flight,
    )


def _sizes(region: Region) -> dict[str, int]:
    labels: Sequence[str] = region.labels
    return dict(zip(labels, region.sizes, strict=True))

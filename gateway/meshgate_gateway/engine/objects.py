"""The objects a session names: meshes and ports, each there, still on its way, or failed for a reason.

A message may refer to an object whose creation is on another stream and has not arrived; ``Objects.when`` waits for
it. An object that depends on a failed one fails with that step named.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshgate_wire.messages import MAX_DIMENSIONS, Failure, Host, Region

SLICES_KEPT = 512
GONE_KEPT = 65_536
MAX_RANKS = 2**18  # of one mesh: a request that names more is refused before anything is made of it


class RequestFailed(Exception):
    """A request cannot be done, for the reason that ``failure`` tells."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(message: str) -> RequestFailed:
    return RequestFailed(Failure(kind="invalid", message=message))


def require_reasonable(region: Region) -> None:
    """Raises RequestFailed for a region that no mesh can have; its sizes may be anything that fits the wire."""
    last = region.offset + sum(max(size - 1, 0) * step for size, step in zip(region.sizes, region.strides, strict=True))
    if extent_of(region) > MAX_RANKS or last >= MAX_RANKS:
        raise invalid(f"a mesh has {MAX_RANKS} ranks at most, and {_told(region)} is asked for")


def ranks_of(region: Region) -> list[int]:
    """The base ranks of a region, in its own row-major order. Raises RequestFailed as ``require_reasonable``."""
    require_reasonable(region)
    ranks = [region.offset]
    for size, stride in zip(region.sizes, region.strides, strict=True):
        ranks = [rank + step * stride for rank in ranks for step in range(size)]
    return ranks


def ranks_within(region: Region, whole: Region, name: str) -> list[int]:
    """The base ranks of ``region``. Raises RequestFailed where it is not a part of ``whole``, the mesh ``name``."""
    ranks = ranks_of(region)
    if not set(ranks) <= set(ranks_of(whole)):
        raise invalid(f"{_told(region)} is not part of mesh {name!r}, which has {_told(whole)}")
    return ranks


def _told(region: Region) -> str:
    sizes = ", ".join(f"{label}: {size}" for label, size in zip(region.labels[:8], region.sizes, strict=False))
    return f"{{{sizes}}}" + (f" from rank {region.offset} on" if region.offset else "")


def extent_of(region: Region) -> int:
    return math.prod(region.sizes)


@dataclass(slots=True, eq=False)
class Hosts:
    """Attached hosts, in base rank order; of a mesh that an endpoint returned they are not known."""

    mesh: Any
    name: str
    hosts: tuple[Host, ...]
    region: Region
    lost: dict[str, str] = field(default_factory=dict)  # name to why, of hosts that have ended
    moved: bool = False  # they were stopped, or some have come back: ``mesh`` does not reach them
    parts: dict[Region, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(host.address for host in self.hosts)


@dataclass(slots=True, eq=False)
class Procs:
    """A proc mesh; ``host_of(rank)`` names the host of a base rank."""

    mesh: Any
    name: str
    region: Region
    host_names: tuple[str, ...]  # of the hosts it was spawned on, in their rank order
    hosts: Hosts | None = None
    version: str | None = None  # of the code they were started from
    moved: dict[int, str | int] = field(default_factory=dict)  # base rank to the version it was brought to, or the move
    stopping: bool = False
    up: asyncio.Future[None] | None = None
    alive: dict[int, int] = field(default_factory=dict)  # base rank to pid
    dead: dict[int, str] = field(default_factory=dict)  # base rank to why
    moves: int = 0
    parts: dict[Region, Any] = field(default_factory=dict)

    def run(self, version: str, ranks: Iterable[int]) -> bool:
        """Whether all these ranks are known to run ``version`` of the code."""
        return all(self.moved.get(rank, self.version) == version for rank in ranks)

    def leave(self, ranks: Iterable[int]) -> int:
        """These ranks are being brought to another version: until ``arrive`` nobody knows what they run."""
        self.moves += 1
        self.moved.update(dict.fromkeys(ranks, self.moves))
        return self.moves

    def arrive(self, move: int, ranks: Iterable[int], version: str) -> None:
        """All these ranks run ``version`` now, but for those that have left again meanwhile."""
        self.moved.update({rank: version for rank in ranks if self.moved[rank] == move})

    def host_of(self, rank: int) -> str:
        each = extent_of(self.region) // len(self.host_names) if self.host_names else 0
        return self.host_names[rank // each] if each and rank // each < len(self.host_names) else ""


@dataclass(slots=True, eq=False)
class Actors:
    """An actor mesh. ``inner`` is Monarch's reference; ``unique`` its name there, once it is up."""

    inner: Any
    name: str
    class_name: str
    class_data: Sequence[bytes | memoryview]
    region: Region
    procs: Procs | None
    procs_part: Any = None  # the mesh object the actors were spawned on
    unique: str = ""
    stopping: bool = False
    failed: Failure | None = None  # the whole mesh: its constructor raised
    dead: dict[int, str] = field(default_factory=dict)  # base rank to why
    parts: dict[Region, Any] = field(default_factory=dict)

    def host_of(self, rank: int) -> str:
        return self.procs.host_of(rank) if self.procs is not None else ""


@dataclass(slots=True, eq=False)
class Channel:
    """An open channel: ``port`` is sent along, ``receiver`` is read by a task."""

    port: Any
    receiver: Any
    reading: asyncio.Task[None] | None = None


Object: TypeAlias = Hosts | Procs | Actors | Channel


class Objects:
    """The table. Ids come from the laptop; references that arrive from workers get negative ones."""

    def __init__(self) -> None:
        self._known: dict[int, Object | Failure] = {}
        self._gone: dict[int, None] = {}  # released, the latest of them: messages of other streams may come yet
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self._arrived: dict[int, Any] = {}
        self._next_arrived = -1

    def add(self, number: int, made: Object | Failure) -> None:
        """Defines ``number``, once. Whoever waits for it goes on."""
        if isinstance(made, Failure):
            if number in self._gone:
                return  # nobody asks any more
        elif number in self._known or number in self._gone:
            raise invalid(f"object {number} exists already")
        self._known[number] = made
        self._wake(number)

    def _wake(self, number: int) -> None:
        waiting = self._awaited.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def now(self, number: int) -> Object | None:
        """The object if it is there; None if it is on its way. Raises RequestFailed if its creation failed, or it was
        released."""
        known = self._known.get(number)
        if known is None and number in self._gone:
            raise invalid(f"object {number} was released before a message that needs it came")
        if isinstance(known, Failure):
            raise RequestFailed(_as_step(known))
        return known

    def known(self, number: int) -> Object | None:
        """The object if it is there and has not failed."""
        known = self._known.get(number)
        return None if isinstance(known, Failure) else known

    async def when(self, number: int) -> Object:
        known = self.now(number)
        while known is None:
            waiting = self._awaited.get(number)
            if waiting is None:
                waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiting)
            known = self.now(number)
        return known

    def arrived(self, reference: Any) -> int:
        """A number for a mesh reference that a worker sent; ``adopt`` says later what it is."""
        number = self._next_arrived
        self._next_arrived -= 1
        self._arrived[number] = reference
        return number

    def adopt(self, number: int) -> Any:
        try:
            return self._arrived[number]
        except KeyError:
            raise invalid(f"object {number} did not arrive from a worker, or was released") from None

    def release(self, number: int) -> Object | None:
        self._arrived.pop(number, None)
        released = self._known.pop(number, None)
        self._gone[number] = None
        if len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        self._wake(number)
        return None if isinstance(released, Failure) else released

    def each(self) -> list[Object]:
        return [known for known in self._known.values() if not isinstance(known, Failure)]

    def items(self) -> list[tuple[int, Object]]:
        return [(number, known) for number, known in self._known.items() if not isinstance(known, Failure)]


def _as_step(failure: Failure) -> Failure:
    if failure.kind == "step":
        return failure
    return failure.model_copy(update={"kind": "step", "step": failure.step or failure.mesh})


def cached(parts: dict[Region, Any], region: Region, make: Any) -> Any:
    """``make(region)``, remembered; the oldest is forgotten past ``SLICES_KEPT``."""
    part = parts.get(region)
    if part is None:
        if len(parts) >= SLICES_KEPT:
            parts.pop(next(iter(parts)))
        part = parts[region] = make(region)
    return part


def hosts_region(count: int) -> Region:
    return Region(labels=("hosts",), offset=0, sizes=(count,), strides=(1,))


def attached(mesh: Any, name: str, hosts: Sequence[Host]) -> Hosts:
    """The object of hosts that ``mesh`` is attached to."""
    return Hosts(mesh, name, tuple(hosts), hosts_region(len(hosts)))


def procs_region(hosts: Region, per_host: dict[str, int]) -> Region:
    """The dense region of the processes: Monarch numbers them anew, hosts first. Raises RequestFailed past bounds."""
    sizes = (*hosts.sizes, *per_host.values())
    if math.prod(sizes) > MAX_RANKS or len(sizes) > MAX_DIMENSIONS:
        raise invalid(f"a mesh has {MAX_RANKS} ranks in {MAX_DIMENSIONS} dimensions at most, and {per_host} makes more")
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return Region(labels=(*hosts.labels, *per_host), offset=0, sizes=sizes, strides=tuple(reversed(strides)))

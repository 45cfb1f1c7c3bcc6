"""The records of a session's objects: what the engine knows about each host, mesh and channel."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from meshgate_gateway.engine.objects.regions import extent_of, hosts_region, ranks_within
from meshgate_wire.messages import Failure, Host, Region

MAX_SLICES = 512  # per mesh
MAX_ENDPOINTS = 64  # of a mesh whose calls are counted by endpoint
OTHER_ENDPOINTS = "…"
MAX_COMPARED = 100  # calls of an endpoint of which is known which rank replied last
MAX_TIMELINES = 8  # calls of an endpoint of which is known when ranks replied
FORGETTING = 0.75  # of the time that a call is expected to take, with each later call

S = TypeVar("S")


# The health of a host in an attached mesh: its states, the transitions between them, and what users read about each.
#
# ::
#
#     AVAILABLE ── lost, a replacement is expected ──> RETURNING ── at a new address ──> RESTARTED
#         │                                                │                                │
#         └───────── lost for good ──> GONE                └── at its old address ──> UNREACHABLE
#
# A host can be lost in any state, and restart in any. When no host of a mesh is missing any more, the mesh is attached
# to again and its hosts are AVAILABLE: Monarch attaches to all hosts of a mesh or to none.


class HostState(enum.Enum):
    AVAILABLE = "available"
    RETURNING = "returning"  # it ended, and is expected to restart
    GONE = "gone"  # it ended for good
    RESTARTED = "restarted"  # usable once the mesh is attached to again
    UNREACHABLE = "unreachable"  # restarted at its old address, which Monarch in this process cannot use again


_SENTENCES = {
    HostState.RESTARTED: "the host has restarted; its mesh is usable again once all hosts are back",
    HostState.UNREACHABLE: "the host has restarted at its old address; start a new session to use it",
}


@dataclass(frozen=True, slots=True)
class HostHealth:
    """``reason`` is why the host ended, in the words of the host provider."""

    state: HostState
    reason: str = ""

    def lost(self, reason: str, *, returns: bool) -> HostHealth:
        """The host has ended. ``returns``: its provider restarts or replaces it."""
        return HostHealth(HostState.RETURNING if returns else HostState.GONE, reason)

    def restarted(self, *, same_address: bool) -> HostHealth:
        """The host, or another in its place, is up. ``same_address``: this process has used its address before."""
        return HostHealth(HostState.UNREACHABLE if same_address else HostState.RESTARTED)

    @property
    def available(self) -> bool:
        return self.state is HostState.AVAILABLE

    @property
    def ready_to_attach(self) -> bool:
        """Whether the host does not keep its mesh from being attached to again."""
        return self.state in (HostState.AVAILABLE, HostState.RESTARTED)

    @property
    def permanent(self) -> bool:
        """Whether waiting is pointless: the mesh does not become usable in this session."""
        return self.state in (HostState.GONE, HostState.UNREACHABLE)

    def __str__(self) -> str:
        return _SENTENCES.get(self.state, self.reason)


AVAILABLE = HostHealth(HostState.AVAILABLE)
_WAIT = "Wait for them with hosts.initialized.get(timeout=...)"


def answered(attaching: asyncio.Future[None]) -> bool:
    """Whether all hosts that were attached to have answered."""
    return attaching.done() and not attaching.cancelled() and attaching.exception() is None


@dataclass(slots=True, eq=False)
class HostMesh:
    """Attached hosts, in base rank order. If an endpoint returned the mesh, their names and addresses are empty."""

    mesh: Any
    name: str
    hosts: tuple[Host, ...]
    region: Region
    missing: dict[str, HostHealth] = field(default_factory=dict)  # by name, of hosts that are not available
    refused: str = ""  # why it can never be attached to: a host does not accept this gateway
    waits: dict[asyncio.Future[None], None] = field(default_factory=dict)  # in order, for all hosts to answer
    must_attach: bool = False  # ``mesh`` no longer reaches the hosts: they were stopped, or some have restarted
    attaching: asyncio.Future[None] | None = None  # until all hosts of ``mesh`` have answered Monarch once
    apart: bool = False  # hosts were missing when it was attached to, so each part is attached to by itself
    cut_short: bool = False  # a host was lost before they had: Monarch waits for it, whatever part of ``mesh`` is used
    slices: dict[Region, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(host.address for host in self.hosts)

    def health(self, name: str) -> HostHealth:
        return self.missing.get(name, AVAILABLE)

    def host_lost(self, name: str, reason: str, *, returns: bool) -> None:
        self.missing[name] = self.health(name).lost(reason, returns=returns)
        if self.attaching is not None and not answered(self.attaching):
            self.cut_short = True
            self.give_up_waiting()

    def give_up_waiting(self) -> None:
        """Ends the waits for hosts to answer Monarch, of which one is lost or refuses to."""
        for wait in (*self.waits, self.attaching):
            if wait is not None:
                wait.cancel()

    def host_restarted(self, rank: int, host: Host, *, same_address: bool) -> bool:
        """Puts ``host`` in its place. Returns whether the mesh is complete again, and so must be attached to again."""
        health = self.health(self.hosts[rank].name)
        self.missing.pop(self.hosts[rank].name, None)
        self.hosts = (*self.hosts[:rank], host, *self.hosts[rank + 1 :])
        self.missing[host.name] = health.restarted(same_address=same_address)
        if not all(health.ready_to_attach for health in self.missing.values()):
            return False
        self.missing.clear()
        self.must_attach, self.cut_short = True, False
        return True

    def missing_among(self, names: Iterable[str]) -> str:
        """Which of the hosts ``names`` cannot be used, why, and what to do. Empty if all can be used."""
        if self.refused:
            return self.refused
        if self.cut_short:
            names = self.names
        missing = {name: self.missing[name] for name in names if name in self.missing}
        if not missing:
            return ""
        found = "; ".join(f"{name}: {health}" for name, health in missing.items())
        lost = f"mesh {self.name!r} has lost hosts ({found})"
        permanent = any(health.permanent for health in missing.values())
        if self.cut_short:
            lost += " before the gateway had reached all of them, so none can be used"
            return f"{lost} in this session" if permanent else f"{lost} until they are replaced. {_WAIT}"
        if permanent:
            return f"{lost}. Spawn on a slice of the remaining hosts"
        return f"{lost}, which are being replaced. {_WAIT}, or spawn on a slice of the remaining hosts"


def attached_hosts(mesh: Any, name: str, hosts: Sequence[Host]) -> HostMesh:
    """The record of the hosts that ``mesh`` is attached to."""
    return HostMesh(mesh, name, tuple(hosts), hosts_region(len(hosts)))


class Deaths(dict[int, str]):
    """The ranks of a mesh that ended: base rank to the report. Knows more about them than the reports say.

    A dict, whose reads enter no Python code: each call asks ``if mesh.dead``. Of the methods that write, only those
    below may be used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0  # grows with each
        self.times: dict[int, float] = {}  # of ``time.monotonic``
        self.host_reasons: dict[int, str] = {}  # why the host of a rank had ended, or was about to, at its end
        self.exit_codes: dict[int, int] = {}  # of processes, as far as Monarch reports them
        self.stopped: set[int] = set()  # by the program

    def __setitem__(self, rank: int, report: str) -> None:
        self.changes += 1
        super().__setitem__(rank, report)
        self.times.setdefault(rank, time.monotonic())

    def __delitem__(self, rank: int) -> None:
        self.changes += 1
        super().__delitem__(rank)
        del self.times[rank]
        self.host_reasons.pop(rank, None)
        self.stopped.discard(rank)

    def update(self, reports: Mapping[int, str], *, stopped: bool = False) -> None:  # type: ignore[override]
        """``stopped``: the program has stopped these ranks."""
        for rank, report in reports.items():
            self[rank] = report
        if stopped:
            self.stopped.update(reports)

    def pop(self, rank: int, default: str | None = None) -> str | None:  # type: ignore[override]
        report = self.get(rank, default)
        if rank in self:
            del self[rank]
        return report

    def add_from(self, ends: Deaths, ranks: Iterable[int]) -> None:
        """Those of ``ranks`` that ended in another mesh have ended here for the same reason."""
        reports = {rank: ends[rank] for rank in ranks if rank in ends}
        self.update(reports)
        self.stopped.update(ends.stopped.intersection(reports))

    def explain(self, rank: int, host_reason: str) -> None:
        self.changes += 1
        self.host_reasons[rank] = host_reason

    def exited(self, ranks: Iterable[int], code: int) -> None:
        """The processes of ``ranks`` have exited with ``code``, which may be known before their end."""
        self.changes += 1
        self.exit_codes.update(dict.fromkeys(ranks, code))


@dataclass(slots=True, eq=False)
class ProcMesh:
    """A proc mesh. ``host_names`` are the hosts it was spawned on, in their rank order.

    A rank's version of the code is unknown while the rank is being reloaded, and afterwards if that failed.
    """

    mesh: Any
    name: str
    region: Region
    host_names: tuple[str, ...]
    hosts: HostMesh | None = None
    version: str | None = None  # of the code that the processes started from
    reloaded: dict[int, str | int] = field(default_factory=dict)  # base rank to its version, or the reload under way
    reloads: int = 0
    stopping: bool = False
    initialized: asyncio.Future[None] | None = None  # cancelled when a host is lost or refuses
    given_up: str = ""  # which host was lost before ``initialized``, and why; another may have its place already
    up: asyncio.Future[None] | None = None  # is done once the outcome of ``initialized`` is reported
    dead: Deaths = field(default_factory=Deaths)
    terminated: dict[int, str] = field(default_factory=dict)  # base rank to the report that SIGTERM ended it
    lost_hosts: set[str] = field(default_factory=set)  # by name, also if another host has taken their place
    slices: dict[Region, Any] = field(default_factory=dict)
    number: int = 0  # by which its processes name the mesh in their connections; 0: they have none

    def runs(self, version: str, ranks: Iterable[int]) -> bool:
        """Whether all these ranks are known to run ``version`` of the code."""
        return all(self.reloaded.get(rank, self.version) == version for rank in ranks)

    def reload_started(self, ranks: Iterable[int]) -> int:
        """Returns a number for ``reload_finished``. Until then these ranks run no known version."""
        self.reloads += 1
        self.reloaded.update(dict.fromkeys(ranks, self.reloads))
        return self.reloads

    def reload_finished(self, reload: int, ranks: Iterable[int], version: str) -> None:
        """These ranks run ``version`` now, except for those that another reload has started on since."""
        self.reloaded.update({rank: version for rank in ranks if self.reloaded[rank] == reload})

    def host_lost(self, name: str) -> None:
        """Gives up the processes if they are coming up: Monarch would wait for the host, half a minute or longer."""
        if name in self.host_names:
            self.lost_hosts.add(name)
        if self.initialized is None or self.initialized.done() or self.hosts is None:
            return
        if missing := self.hosts.missing_among(self.host_names):
            self.given_up = missing
            self.initialized.cancel()

    def host_of(self, rank: int) -> str:
        """The name of the host of a base rank, or an empty string if it is unknown."""
        per_host = extent_of(self.region) // len(self.host_names) if self.host_names else 0
        return self.host_names[rank // per_host] if per_host and rank // per_host < len(self.host_names) else ""


class Timeline(NamedTuple):
    """When ranks have replied to a call to several, on the clock of ``time.monotonic``. It has only the replies that
    tell the most. ``compared``: if all have returned, the base rank that replied last, and how many seconds late."""

    call: int
    endpoint: str
    ranks: Sequence[int]  # base ranks; what follows has positions in these
    started: float
    ended: float | None  # None: it is in flight
    failed: bool
    cancelled: bool
    answered: int
    first: float | None  # when the first rank had replied; None: none has
    half: float | None  # when half of the ranks had
    last: tuple[tuple[int, float], ...]  # the ranks that replied last, the last one first
    raised: tuple[tuple[int, float], ...]  # the first ranks that raised
    missing: tuple[int, ...]  # the first ranks without a reply
    compared: tuple[int, float] | None


@dataclass(slots=True, eq=False)
class CallTotals:
    """The calls of an endpoint that have ended, and the seconds that they took together."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0
    casts: int = 0  # calls without replies that were sent
    expected: float | None = None  # seconds that a call is expected to run; None: unknown
    last_ranks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_COMPARED))
    """Of the last calls to several ranks: the base rank that replied last, and how many seconds late."""
    timelines: deque[Timeline] = field(default_factory=lambda: deque(maxlen=MAX_TIMELINES))

    def took(self, seconds: float) -> None:
        """A call has run for ``seconds``. What is expected is an average, in which the last calls count most."""
        if self.expected is None:
            self.expected = seconds
        else:
            self.expected = self.expected * FORGETTING + seconds * (1 - FORGETTING)

    def sent_alone(self) -> None:
        """A long call was sent that is not measured; after some of them, one is measured again."""
        if self.expected is not None:
            self.expected *= FORGETTING


class ActorSlice(NamedTuple):
    """A part of an actor mesh: Monarch's reference to it, and its base ranks."""

    actors: Any
    ranks: Sequence[int]


@dataclass(slots=True, eq=False)
class ActorMesh:
    """An actor mesh. ``actors`` is Monarch's reference, ``unique_name`` Monarch's name for it, once it is up.

    If an endpoint ``returned`` it, it has another owner, to which Monarch reports its faults.
    """

    actors: Any
    name: str
    class_name: str
    class_data: Sequence[bytes | memoryview]
    region: Region
    procs: ProcMesh | None
    procs_mesh: Any = None  # Monarch's mesh, or slice of one, that the actors were spawned on
    unique_name: str = ""
    returned: bool = False
    stopping: bool = False
    up: asyncio.Future[None] | None = None  # is done once it is reported whether the actors could be spawned
    failed: Failure | None = None  # the whole mesh failed: a constructor raised
    dead: Deaths = field(default_factory=Deaths)
    slices: dict[Region, ActorSlice] = field(default_factory=dict)
    whole: ActorSlice | None = None  # the slice of all, which most calls go to
    totals: dict[str, CallTotals] = field(default_factory=dict)  # by endpoint

    @property
    def untried(self) -> bool:
        """Whether no call has ended yet, so that constructors may still run: Monarch reports the mesh up before."""
        return not any(totals.ended for totals in self.totals.values())

    def host_of(self, rank: int) -> str:
        """The name of the host of a base rank, or an empty string if it is unknown."""
        return self.procs.host_of(rank) if self.procs is not None else ""

    def totals_of(self, endpoint: str) -> CallTotals:
        """To count calls of ``endpoint`` in. Above ``MAX_ENDPOINTS``, the others are counted together, as ``…``."""
        name = endpoint if endpoint in self.totals or len(self.totals) < MAX_ENDPOINTS else OTHER_ENDPOINTS
        return self.totals.setdefault(name, CallTotals())

    def forget_timelines(self) -> None:
        """Called when the mesh has been stopped, so that a session that spawns again and again needs no more memory."""
        for totals in self.totals.values():
            totals.timelines.clear()


@dataclass(slots=True, eq=False)
class Channel:
    """An open channel. ``port`` is sent to actors; ``reader`` is the task that reads its receiver."""

    port: Any
    reader: asyncio.Task[None] | None = None

    def stop_reading(self) -> None:
        if self.reader is not None:
            self.reader.cancel()


@dataclass(slots=True, eq=False)
class KeptMesh:
    """Values that stay in processes, as ``region`` of their mesh: those of a call ``label``.

    ``ranks`` are the base ranks, by position in the call. ``done``: None once the values are there, or the failure of
    the call and its buffers.
    """

    number: int
    label: str
    servers: Any  # ``calls.kept_servers.Servers``: the actors that serve them; None before the call is sent
    region: Region
    ranks: tuple[int, ...]
    done: asyncio.Future[tuple[Failure, Sequence[Any]] | None]
    sizes: tuple[int, ...] = ()  # bytes, by position
    uses: int = 0  # calls that are getting the values
    holders: int = 0  # processes with references to them, and meshes whose constructors have got some
    released: bool = False
    at_once: bool = False  # in spite of its holders

    def positions(self, region: Region) -> tuple[int, ...]:
        """The positions of a part, in its order; empty if it is the whole."""
        ranks = tuple(ranks_within(region, self.region, self.label))
        if ranks == self.ranks:
            return ()
        known = {rank: position for position, rank in enumerate(self.ranks)}
        return tuple(known[rank] for rank in ranks)


SessionObject: TypeAlias = HostMesh | ProcMesh | ActorMesh | Channel | KeptMesh


def remember(slices: dict[Region, S], region: Region, made: S) -> S:
    """Stores ``made``, a slice, and evicts the oldest above ``MAX_SLICES``."""
    if len(slices) >= MAX_SLICES:
        slices.pop(next(iter(slices)))
    slices[region] = made
    return made

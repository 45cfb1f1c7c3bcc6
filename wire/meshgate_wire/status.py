"""What a gateway says about its job and its runs: the models behind ``/v1/status``, ``/v1/output`` and ``/v1/runs``.

They are the documented schema of ``meshgate status --json`` as well, so a field keeps its name and meaning. Times are
durations in seconds, because clocks of different machines differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from .fields import Spans

HostState: TypeAlias = Literal["ready", "missing"]
RunState: TypeAlias = Literal["starting", "running", "restarting", "stopping", "succeeded", "failed", "stopped", "lost"]
LIVE_STATES = frozenset({"starting", "running", "restarting", "stopping"})
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
MAX_SUBMISSION = 48 * 1024  # bytes of JSON
MAX_GRACE = 86_400  # seconds that a program may have to end
NAME_REUSED = (
    "the run {0} has ended; another run has this name now: job.run({0!r}) returns that one, and "
    "`meshgate logs --run {0}` shows what it prints"
)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CallStatus(_Model):
    """A call without its last reply. ``waiting`` maps the first ranks that have not answered to their hosts."""

    mesh: str
    endpoint: str
    age: float = Field(description="seconds since the engine sent it to the actors")
    total: int = Field(description="ranks that were called")
    answered: int
    waiting: dict[int, str] = Field(default={}, description="host by rank, for the first ranks without an answer")
    procs: str = Field(default="", description="the proc mesh of the actors")
    processes: dict[int, int] = Field(
        default={}, description="the rank in that mesh of each rank in `waiting`: the same"
    )
    cancelled: bool = Field(default=False, description="the program has cancelled it, and ranks have not ended it yet")
    mesh_number: int = Field(default=0, description="of the mesh within its session; 0: it is not known")


class Straggler(_Model):
    """A rank that replied last, and after half of the ranks by more than 10 ms and a tenth of what the call took."""

    rank: int
    host: str = ""
    calls: int = Field(description="in which it was")
    seconds: float = Field(description="that it replied later than half of the ranks, in these calls together")


class RankReply(_Model):
    """The reply of a rank to a call."""

    rank: int
    host: str = ""
    seconds: float = Field(description="from the engine's sending of the call to the reply")
    raised: bool = Field(default=False, description="it is an exception")


class CallTimeline(_Model):
    """When each rank has replied to a call to several. Of many ranks, only those that tell the most are listed."""

    call: int = Field(description="its number within the session")
    mesh: str
    endpoint: str
    age: float = Field(description="seconds since the engine sent it to the actors")
    seconds: float | None = Field(description="that it took; null: it is in flight")
    failed: bool = Field(default=False, description="with an exception, the loss of a rank, or a fault")
    cancelled: bool = Field(default=False, description="the program has cancelled it")
    total: int = Field(description="ranks that were called")
    answered: int
    first: float | None = Field(default=None, description="seconds until the first reply")
    half: float | None = Field(default=None, description="seconds until half of the ranks had replied")
    replies: tuple[RankReply, ...] = Field(
        default=(), description="the last 16, and the first 16 that are exceptions; the last one first"
    )
    missing: dict[int, str] = Field(default={}, description="host by rank, for the first 16 ranks without a reply")
    straggler: int | None = Field(default=None, description="the rank, if the last reply came late; null: it did not")


class CallCounts(_Model):
    """The calls of a mesh of actors, or of one of its endpoints, since it was spawned.

    Two of these give the rate and latency between them.
    """

    ended: int = Field(default=0, description="calls that have their last reply, or failed")
    failed: int = Field(default=0, description="of those that ended")
    seconds: float = Field(default=0.0, description="that those that ended took together, in the gateway")
    casts: int = Field(default=0, description="calls without a reply (broadcast) that were sent")
    in_flight: int = 0
    compared: int = Field(default=0, description="the last calls to several ranks, at most 100 of an endpoint")
    stragglers: tuple[Straggler, ...] = Field(
        default=(),
        description="of the calls that were compared, at most 8, first the one that others waited for longest",
    )


class EndedRanks(_Model):
    """Ranks of a mesh that ended for the same reason."""

    ranks: tuple[tuple[int, int], ...] = Field(description="the first and the last of each sequence, ascending")
    reason: str = Field(description="in short, such as `killed by SIGKILL (out of memory?)`")
    exit_code: int | None = Field(
        default=None, description="of their processes, negative for a signal; null: it is not known, or they run on"
    )
    age: float | None = Field(default=None, description="seconds since the first of them ended; null: not known")
    last_age: float | None = Field(default=None, description="seconds since the last of them ended; null: not known")
    stopped: bool = Field(default=False, description="the program has stopped them, so they are not lost")

    def each(self) -> Iterator[int]:
        return (rank for first, last in self.ranks for rank in range(first, last + 1))


class MeshStatus(_Model):
    """Processes or actors of a session."""

    kind: Literal["procs", "actors"]
    name: str
    sizes: dict[str, int] = Field(description="size by dimension")
    class_name: str = Field(default="", description="of actors")
    version: str = Field(default="", description="of the code that the processes started from; empty: none was synced")
    dead: dict[int, str] = Field(default={}, description="report by rank, for the first 64 ranks that ended")
    ended: tuple[EndedRanks, ...] = Field(default=(), description="all ranks that ended, at most 32 reasons")
    number: int = Field(default=0, description="names the mesh within its session")
    procs: int = Field(default=0, description="of actors: the number of their proc mesh")
    calls: CallCounts | None = Field(default=None, description="of actors")
    endpoints: dict[str, CallCounts] = Field(default={}, description="of actors: the calls by endpoint that was called")
    hosts: tuple[str, ...] = Field(default=(), description="of procs, which are divided evenly among them, in order")
    kept: int = Field(default=0, description="of procs: roughly the bytes of the values that stay in them")
    kept_by_rank: dict[int, int] = Field(default={}, description="the same, by rank")

    def hosts_in_use(self) -> set[str]:
        """The hosts on which processes of this mesh run; none for actors."""
        ended = {rank for group in self.ended for rank in group.each()}
        per_host = math.prod(self.sizes.values()) // max(1, len(self.hosts))
        ranks = range(per_host * len(self.hosts))
        return {self.hosts[rank // per_host] for rank in ranks if rank not in ended}


class HostStatus(_Model):
    """A host of the job's mesh ``mesh``."""

    mesh: str
    rank: int
    name: str
    state: HostState = "ready"
    reason: str = Field(default="", description="why it is missing, or will end")
    seconds_left: float | None = Field(default=None, description="until the cluster ends it; null: no end is known")
    version: str = Field(default="", description="of the session's newest code, if the host has it")
    parent: str = Field(
        default="",
        description="the host, or gateway, that it hears of code from; empty: none was synced, or it is missing",
    )


class EngineStatus(_Model):
    """What an engine knows about its session."""

    name: str = Field(default="", description="of a detached session; empty for others")
    version: str = Field(default="", description="digest of the newest code that the client synced")
    hosts: tuple[HostStatus, ...] = ()
    meshes: tuple[MeshStatus, ...] = ()
    calls: tuple[CallStatus, ...] = Field(default=(), description="the oldest first, at most 256")
    calls_in_flight: int = 0
    timelines: tuple[CallTimeline, ...] = Field(
        default=(),
        description="of calls to several ranks: the oldest 8 in flight, then the last 16 that have ended, the last one "
        "first, at most 8 of an endpoint, and none of actors that were stopped",
    )


class SessionStatus(EngineStatus):
    """A session, its engine and its owner."""

    session: str
    owner: str
    connected: bool
    pid: int = Field(description="of the engine, where the gateway runs")
    problem: str = Field(default="", description="why the engine did not say more, such as that it did not answer")


class SlurmAllocation(_Model):
    """What Slurm has given the job, or is to give it while it waits. Empty texts: Slurm has none."""

    job_id: int
    state: str = Field(description="in Slurm's word")
    partition: str = ""
    account: str = ""
    qos: str = ""
    time_limit: float | None = Field(default=None, description="seconds; null: none, or unknown")
    seconds_left: float | None = Field(default=None, description="until Slurm ends it; null: no end is known")


class JobStatus(_Model):
    """A job as its gateway sees it."""

    gateway_version: str
    python: str
    meshes: dict[str, int] = Field(description="number of hosts by mesh")
    hosts: tuple[HostStatus, ...] = Field(default=(), description="the hosts that the gateway knows of")
    runs: tuple[RunStatus, ...] = Field(default=(), description="submitted programs, without their commands")
    sessions: tuple[SessionStatus, ...] = ()
    slurm: SlurmAllocation | None = Field(default=None, description="of a Slurm job")


class PrintedLine(_Model):
    """A line that ``count`` ranks of ``mesh`` printed; ``ranks`` are the first of them, at most 64."""

    number: int = Field(description="grows with each line of a session")
    time: float = Field(default=0.0, description="when it reached the gateway, in seconds since 1970")
    stream: Literal["stdout", "stderr"]
    mesh: str
    ranks: tuple[int, ...]
    more_ranks: Spans = Field(default=(), description="the others: the first and the last of each sequence")
    count: int
    host: str
    text: str
    end: str


class SessionOutput(_Model):
    """Lines of one session. ``dropped`` older ones are no longer kept. ``now`` is the time of the gateway's clock."""

    session: str = ""
    now: float = 0.0
    lines: tuple[PrintedLine, ...] = ()
    last: int = Field(default=0, description="the number of the newest line so far")
    dropped: int = 0
    problem: str = Field(default="", description="why there are no lines, such as that the engine did not answer")


class OutputPage(_Model):
    """What the actors of a job printed, by session."""

    sessions: tuple[SessionOutput, ...] = ()


# --- runs: programs that the gateway runs beside itself -----------------------------------------------------


# The kernel takes no NUL in an argument, a path or a variable, and no "=" in the name of a variable.
_Short: TypeAlias = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_Argument: TypeAlias = Annotated[str, Field(max_length=16_384, pattern=r"^[^\x00]*$")]
_Variable: TypeAlias = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00=]+$")]


class JoinableJob(_Model):
    """What makes a job of a program the one that it runs in: its type, and in a cluster its name and namespace."""

    kind: Annotated[str, Field(max_length=256)]
    name: Annotated[str, Field(max_length=256)] = ""
    namespace: Annotated[str, Field(max_length=256)] = ""


class Program(_Model):
    """A program to run beside the gateway, before its code is known there.

    ``id`` is random: a request that is repeated with it returns the run that the first one started. Limits: ``memory``
    and ``disk`` are in bytes, of all processes of the run; None: the gateway's defaults."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    id: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""
    command: Annotated[tuple[_Argument, ...], Field(min_length=1, max_length=1024)]
    environment: Annotated[dict[_Variable, _Argument], Field(max_length=512)] = {}
    restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    memory: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    processes: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    disk: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None


class Submission(Program):
    """The body of ``POST /v1/runs``. ``directory`` and ``paths`` are relative to the synced project."""

    version: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    directory: _Short = ""
    paths: Annotated[tuple[_Short, ...], Field(max_length=256)] = ("",)
    job: JoinableJob


class StopRequest(_Model):
    """The body of ``POST /v1/runs/<name>/stop``: the seconds that the program has to end, and the ``id`` of the run,
    "" for whichever has the name."""

    grace: Annotated[float, Field(ge=0, le=MAX_GRACE, strict=True, allow_inf_nan=False)] = 30.0
    id: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")] = ""


class RunStatus(_Model):
    """A run: a submitted program beside the gateway."""

    name: str
    state: RunState
    command: tuple[str, ...]
    age: float = Field(description="seconds since it was submitted")
    seconds: float = Field(default=0.0, description="that it has run, or ran, restarts included")
    exit_code: int | None = Field(
        default=None, description="of the program, negative for a signal; null while it runs or if it never started"
    )
    reason: str = Field(default="", description="why it ended, or why it is restarted or stopped")
    restarts: int = Field(default=0, description="how often it was started again")
    max_restarts: int = 0
    pid: int | None = Field(default=None, description="of the program, where the gateway runs")
    printed: int = Field(default=0, description="bytes of output so far")
    owner: str = Field(default="", description="who submitted it")
    version: str = Field(default="", description="of the code that it runs")
    news: bool = Field(default=False, description="it has ended, and no earlier list of runs has said so")
    id: str = Field(default="", description="of its submission: that of a later run with the same name is another one")

    @property
    def live(self) -> bool:
        """Whether it has not ended yet."""
        return self.state in LIVE_STATES


class Runs(_Model):
    """The runs of a job, the oldest first."""

    runs: tuple[RunStatus, ...] = ()


class RunOutput(_Model):
    """A part of what a run printed. ``data`` is in base64 and begins at byte ``start``, which is above the one that
    was requested if the bytes in between are no longer kept."""

    start: int
    data: str
    run: RunStatus

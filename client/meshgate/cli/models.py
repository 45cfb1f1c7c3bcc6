"""What commands print with ``--json``; ``meshgate schema COMMAND`` prints these models as JSON Schema.

A field keeps its name and meaning in later releases; others may be added. Models that contain those of other packages
are in the modules of their commands, so that ``meshgate ls`` imports neither.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class LateRank(Result):
    """A straggler: a rank that replies last to calls of an endpoint, and later than half of the ranks by at least 10 ms
    and a tenth of the call."""

    session: str
    mesh: str = Field(description="of actors")
    endpoint: str
    rank: int
    host: str
    calls: int = Field(description="in which it was late, of those that were compared")
    compared: int = Field(description="the last calls to several ranks, at most 100")
    seconds: float = Field(description="after half of the ranks, in the mean of these calls")


class JobRow(Result):
    """A running job."""

    id: str = Field(description="what other commands take: the id, in a cluster the name, of a Slurm job login:number")
    kind: str = Field(description="the class of the job; empty in a cluster")
    namespace: str = Field(default="", description="in a cluster")
    name: str = Field(default="", description="of a Slurm job")
    state: str = Field(default="", description="of a Slurm job, with the reason if it waits in the queue")
    partition: str = Field(default="", description="of a Slurm job")
    account: str = Field(default="", description="of a Slurm job; empty: Slurm has none")
    qos: str = Field(default="", description="of a Slurm job; empty: Slurm has none")
    time_limit: float | None = Field(default=None, description="of a Slurm job, in seconds")
    seconds_left: float | None = Field(default=None, description="until Slurm ends the job; null: no end is known")
    meshes: dict[str, int] | None = Field(description="number of hosts by mesh; null: another version of meshgate's")
    age: float | None = Field(description="seconds since it was started; null in `describe`: not known")
    owner: str = ""
    pid: int | None = Field(default=None, description="of the gateway, on this machine unless `machine` is set")
    machine: str = Field(default="", description="the other machine or container on which it was started, if any")
    directory: str = Field(default="", description="in which the job was started, on this machine")


class Jobs(Result):
    """``meshgate ls``"""

    jobs: list[JobRow]


class Ended(Result):
    """``meshgate kill``"""

    ended: list[str] = Field(description="the ids of the jobs, or of the session, that were ended")


class Scaled(Result):
    """``meshgate scale``"""

    mesh: str
    hosts: int = Field(description="the number of hosts that the mesh has now")


class ClusterEvent(Result):
    """An event of the cluster about an object of the job."""

    object: str
    reason: str
    message: str
    count: int = 1


class Sync(Result):
    """``meshgate sync``: one such object on each line"""

    version: str
    files: int
    nbytes: int
    ready: int = Field(description="hosts that have the version")
    hosts: int
    seconds: float


class Pull(Result):
    """``meshgate pull``"""

    files: int
    size: int
    travelled: int = Field(description="bytes that were transferred")
    left_out: list[str]


class CommandOutcome(Result):
    """A command on one host."""

    rank: int
    host: str
    returncode: int = Field(description="127 or 126 if it could not be started, 255 if the host was lost")
    stdout: str
    stderr: str
    error: str = Field(description="why it could not be started, or how the host was lost")


class CommandOutcomes(Result):
    """``meshgate exec``"""

    returncode: int = Field(description="the highest")
    results: list[CommandOutcome]


class ProcessReport(Result):
    """What a process runs."""

    host: str
    mesh: str = Field(description="the name of its proc mesh")
    rank: int
    pid: int
    stack: str
    problem: str = Field(default="", description="why its stack is not known")


class StackGroups(Result):
    """``meshgate stacks``"""

    processes: list[ProcessReport]
    problems: dict[str, str] = Field(description="why the processes on a host could not be read")


class Leftover(Result):
    """A process of a job whose gateway is gone."""

    job: str
    pid: int
    command: str


class Leftovers(Result):
    """``meshgate gc``"""

    processes: list[Leftover]
    ended: bool = Field(description="whether they were ended")


class CallRate(Result):
    """The calls of a mesh of actors since the last look that its engine answered, or since it was spawned if that was
    later."""

    session: str
    mesh: str
    class_name: str
    ranks: int
    ended: int = Field(description="calls that ended")
    failed: int = Field(description="of those that ended")
    rate: float = Field(description="calls that ended and casts, per second")
    latency: float | None = Field(description="mean of those that ended, in seconds; null: none did")
    casts: int = Field(description="calls without a reply (broadcast) that were sent")
    in_flight: int
    oldest: float | None = Field(description="age of the oldest call in flight, in seconds; null: there is none")
    straggler: LateRank | None = Field(default=None, description="for which others have waited longest; null: for none")


KEPT = "roughly the bytes of values that stay in processes, by the name of their mesh; those without are left out"


class RankUsage(Result):
    """What a process and its children use."""

    mesh: str = Field(description="the name of its proc mesh")
    rank: int
    host: str
    pid: int
    cpu: float | None = Field(description="percent of one CPU since the last look; null: it is new")
    memory: int = Field(description="resident bytes")
    gpus: tuple[int, ...] = Field(description="GPUs of its host that it uses, as far as is known")
    gpu: float | None = Field(description="their mean utilization, in percent; null: unknown")
    gpu_memory: int | None = Field(description="bytes that it uses on them, or, if unknown, that are used on them")
    kept: int | None = Field(
        default=0,
        description="roughly the bytes of values that stay in it; null: unknown, because several sessions have a mesh "
        "of this name",
    )


class LostRanks(Result):
    """Ranks that were lost for the same reason."""

    session: str
    mesh: str = Field(
        description="of processes; or of actors that failed while their processes run on; empty: an endpoint's"
    )
    ranks: list[int]
    reason: str = Field(description="in short; at most 32 of a mesh are distinguished")
    exit_code: int | None = Field(description="of the processes, negative for a signal; null: unknown, or they run on")
    age: float | None = Field(description="seconds since the first was lost; null: not known")
    last_age: float | None = Field(description="seconds since the last was lost; null: not known")


class GpuUsage(Result):
    """A GPU of a host; null: it does not report that."""

    host: str
    index: int
    utilization: int | None = Field(description="percent")
    memory: int | None = Field(description="bytes used")
    memory_total: int | None


class Top(Result):
    """``meshgate top``: one such object on each line, or with --once only one"""

    seconds: float = Field(description="since the last look")
    calls: list[CallRate]
    ranks: list[RankUsage]
    gpus: list[GpuUsage]
    kept: dict[str, int] = Field(default={}, description=KEPT)
    problems: dict[str, str] = Field(description="why a host or session could not be read, by its name")
    lost: list[LostRanks] = Field(default=[], description="ranks that were lost, those with the same reason together")


class ErrorGroup(Result):
    """Ranks that failed in the same way."""

    ranks: list[int] = Field(description="the first of them")
    count: int
    message: str
    traceback: str = Field(description="on the rank; its files are relative to the project")


class ErrorReport(Result):
    """Why a program or a call failed."""

    type: str = Field(description="the class of the exception; of one that ranks raised, theirs")
    message: str
    traceback: str = Field(default="", description="of the program on this machine")
    endpoint: str = Field(default="", description="of the call that failed, as mesh.endpoint")
    groups: list[ErrorGroup] = Field(default=[], description="of a call that failed on ranks: the largest first")


class RankValue(Result):
    """What a rank returned."""

    rank: int
    value: Any = Field(description="as JSON, or null if it cannot be expressed in JSON")
    text: str = Field(default="", description="its repr, if it cannot")


class Reload(Result):
    """What the processes of the actors reloaded."""

    version: str
    files: int = Field(description="changed files that were sent")
    modules: list[str]
    old_classes: list[str] = Field(description="classes of live objects, which keep their old code until spawned again")


class Called(Result):
    """``meshgate call``"""

    target: str
    session: str = Field(description="in which the actors are")
    values: list[RankValue] = []
    output: str = Field(default="", description="what actors printed meanwhile")
    error: ErrorReport | None = None
    reload: Reload | None = Field(default=None, description="null: the code was not synced")
    seconds: dict[str, float] = Field(description="time of each step")


class Ran(Result):
    """``meshgate run``"""

    returncode: int = Field(description="negative: the signal that ended it")
    stdout: str
    stderr: str
    error: ErrorReport | None = Field(default=None, description="the exception that ended the program")
    seconds: float

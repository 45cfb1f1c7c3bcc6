"""What commands print with ``--json``; ``meshgate schema COMMAND`` prints these models as JSON Schema.

A field keeps its name and meaning in later releases; others may be added.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from meshgate.cli.agents.models import Called, Ran
from meshgate.cli.top.models import Top
from meshgate.doctor.findings import Finding
from meshgate.jobs.sessions import SessionInfo
from meshgate_wire.status import CallStatus, JobStatus, PrintedLine

__all__ = [
    "SCHEMAS",
    "CallReport",
    "CommandOutcome",
    "Description",
    "Diagnosis",
    "Ended",
    "Event",
    "Executed",
    "JobRow",
    "Jobs",
    "Leftover",
    "Leftovers",
    "LogLine",
    "ProcessReport",
    "Pull",
    "Sessions",
    "StackGroups",
    "Sync",
    "Why",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class JobRow(_Model):
    """A running job."""

    id: str = Field(description="what other commands take: the id, or in a cluster the name")
    kind: str = Field(description="the class of the job; empty in a cluster")
    namespace: str = Field(default="", description="in a cluster")
    meshes: dict[str, int] | None = Field(description="number of hosts by mesh; null: another version of meshgate's")
    age: float = Field(description="seconds since it was started")
    owner: str = ""
    pid: int | None = Field(default=None, description="of the gateway, on this machine")
    directory: str = Field(default="", description="in which the job was started, on this machine")


class Jobs(_Model):
    """``meshgate ls``"""

    jobs: list[JobRow]


class Sessions(_Model):
    """``meshgate sessions``"""

    sessions: list[SessionInfo]


class Ended(_Model):
    """``meshgate kill``"""

    ended: list[str] = Field(description="the ids of the jobs that were ended")


class Event(_Model):
    """An event of the cluster about an object of the job."""

    object: str
    reason: str
    message: str
    count: int = 1


class Description(_Model):
    """``meshgate describe``"""

    job: JobRow
    gateway: str = Field(description="how the gateway is reached")
    log: str = Field(default="", description="the file of the gateway's log, on this machine")
    objects: list[str] = Field(default=[], description="kind/name of each object, in a cluster")
    events: list[Event] = Field(default=[], description="recent events, in a cluster")
    status: JobStatus


class LogLine(PrintedLine):
    """``meshgate logs``: one such object on each line"""

    session: str


class Sync(_Model):
    """``meshgate sync``: one such object on each line"""

    version: str
    files: int
    nbytes: int
    ready: int = Field(description="hosts that have the version")
    hosts: int
    seconds: float


class Pull(_Model):
    """``meshgate pull``"""

    files: int
    size: int
    travelled: int = Field(description="bytes that were transferred")
    left_out: list[str]


class CommandOutcome(_Model):
    """A command on one host."""

    rank: int
    host: str
    returncode: int = Field(description="127 or 126 if it could not be started, 255 if the host was lost")
    stdout: str
    stderr: str
    error: str = Field(description="why it could not be started, or how the host was lost")


class Executed(_Model):
    """``meshgate exec``"""

    returncode: int = Field(description="the highest")
    results: list[CommandOutcome]


class ProcessReport(_Model):
    """What a process runs."""

    host: str
    mesh: str = Field(description="the name of its proc mesh")
    rank: int
    pid: int
    stack: str
    problem: str = Field(default="", description="why its stack is not known")


class StackGroups(_Model):
    """``meshgate stacks``"""

    processes: list[ProcessReport]
    problems: dict[str, str] = Field(description="why the processes on a host mesh could not be read")


class CallReport(_Model):
    """A call in flight and the first processes that it waits for."""

    session: str
    call: CallStatus
    processes: list[ProcessReport]


class Why(_Model):
    """``meshgate why``"""

    calls: list[CallReport] = Field(description="the oldest first")


class Diagnosis(_Model):
    """``meshgate doctor``"""

    findings: list[Finding]


class Leftover(_Model):
    """A process of a job whose gateway is gone."""

    job: str
    pid: int
    command: str


class Leftovers(_Model):
    """``meshgate gc``"""

    processes: list[Leftover]
    ended: bool = Field(description="whether they were ended")


SCHEMAS: dict[str, type[BaseModel]] = {
    "ls": Jobs,
    "kill": Ended,
    "sessions": Sessions,
    "status": JobStatus,
    "describe": Description,
    "logs": LogLine,
    "sync": Sync,
    "pull": Pull,
    "exec": Executed,
    "stacks": StackGroups,
    "why": Why,
    "top": Top,
    "gc": Leftovers,
    "doctor": Diagnosis,
    "call": Called,
    "run": Ran,
}
"""The model that each command prints with ``--json``."""

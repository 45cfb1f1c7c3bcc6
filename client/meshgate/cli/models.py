"""What commands print with ``--json``; ``meshgate schema COMMAND`` prints these models as JSON Schema.

A field keeps its name and meaning in later releases; others may be added. Models that contain those of other packages
are in the modules of their commands, so that ``meshgate ls`` imports neither.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class JobRow(Result):
    """A running job."""

    id: str = Field(description="what other commands take: the id, or in a cluster the name")
    kind: str = Field(description="the class of the job; empty in a cluster")
    namespace: str = Field(default="", description="in a cluster")
    meshes: dict[str, int] | None = Field(description="number of hosts by mesh; null: another version of meshgate's")
    age: float = Field(description="seconds since it was started")
    owner: str = ""
    pid: int | None = Field(default=None, description="of the gateway, on this machine unless `machine` is set")
    machine: str = Field(default="", description="the other machine or container on which it was started, if any")
    directory: str = Field(default="", description="in which the job was started, on this machine")


class Jobs(Result):
    """``meshgate ls``"""

    jobs: list[JobRow]


class Ended(Result):
    """``meshgate kill``"""

    ended: list[str] = Field(description="the ids of the jobs that were ended")


class Event(Result):
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


class Executed(Result):
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
    problems: dict[str, str] = Field(description="why the processes on a host mesh could not be read")


class Leftover(Result):
    """A process of a job whose gateway is gone."""

    job: str
    pid: int
    command: str


class Leftovers(Result):
    """``meshgate gc``"""

    processes: list[Leftover]
    ended: bool = Field(description="whether they were ended")

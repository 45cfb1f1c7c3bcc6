"""What ``meshgate top --json`` prints; see ``cli/models.py``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class CallRate(_Model):
    """The calls of a mesh of actors since the last look, or since it was spawned if that was later."""

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


class RankUsage(_Model):
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


class GpuUsage(_Model):
    """A GPU of a host; null: it does not report that."""

    host: str
    index: int
    utilization: int | None = Field(description="percent")
    memory: int | None = Field(description="bytes used")
    memory_total: int | None


class Top(_Model):
    """``meshgate top``: one such object on each line, or with --once only one"""

    seconds: float = Field(description="since the last look")
    calls: list[CallRate]
    ranks: list[RankUsage]
    gpus: list[GpuUsage]
    problems: dict[str, str] = Field(description="why a host or session could not be read, by its name")

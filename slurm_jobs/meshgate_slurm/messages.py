"""What the client and the program on the login node exchange, as JSON, and what a gateway says about its job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from meshgate_slurm.spec import SlurmSpec

__all__ = [
    "JOB_FILE",
    "MARK",
    "BatchRequest",
    "Ended",
    "GatewayReport",
    "GatewayState",
    "JobReport",
    "Rejected",
    "RunningSlurmJob",
    "StartRequest",
    "surrounding_job",
]

JOB_FILE = "MESHGATE_SLURM_JOB"  # the variable with the path of the file that describes a batch job to its client
MARK = "meshgate-slurm: "  # begins the line with the reply: shell start-up files may print other lines

ApplyId = Annotated[str, Field(pattern=r"^[0-9a-f-]{8,64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StartRequest(_Model):
    apply_id: ApplyId
    spec: SlurmSpec


class BatchRequest(StartRequest):
    """A job whose client is ``client``, a command that runs in ``directory`` of the first node."""

    client: str = Field(min_length=1)
    directory: str


class RunningSlurmJob(_Model):
    """What a client needs to find a job again. ``host`` is the machine of its gateway, ``socket`` a unix socket there,
    ``pid`` and ``started`` identify the gateway's process. A batch job, whose gateway only its own client uses, has
    none of these."""

    apply_id: ApplyId
    job_id: int
    host: str
    directory: str
    socket: str
    pid: int
    started: str
    token: str = Field(repr=False)
    meshes: dict[str, int]
    log_dir: str
    version: str = ""


def surrounding_job() -> RunningSlurmJob | None:
    """The batch job that this program is the client of, if any."""
    path = os.environ.get(JOB_FILE)
    return None if path is None else RunningSlurmJob.model_validate_json(Path(path).read_bytes())


class Rejected(_Model):
    """Why the login node could not do what was asked; ``output`` is the last output of the gateway, if any."""

    error: str
    output: str = ""


class GatewayState(_Model):
    """Whether the gateway's process runs, seen on ``host``."""

    host: str
    alive: bool
    output: str = ""


class Ended(_Model):
    """The job has ended: its last state, in Slurm's word."""

    state: str = ""


class GatewayReport(_Model):
    """What the gateway announces to the program that started it."""

    pid: int = 0
    socket: str = ""
    job_id: int = 0
    log_dir: str = ""
    error: str | None = None


class JobReport(_Model):
    """The job as its gateway sees it. ``why`` says why it waits or has ended; ``failed`` why its workers cannot be
    used. ``registered`` counts workers that have connected, ``ready`` those that still are."""

    job_id: int
    state: str
    why: str = ""
    expected_start: float | None = None
    end_time: float | None = None
    ended: bool = False
    pending: bool = False
    registered: int = 0
    ready: int = 0
    nodes: int = 0
    failed: str | None = None

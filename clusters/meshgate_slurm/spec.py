"""What a job asks of Slurm, validated before anything is sent to the cluster.

The client builds a ``SlurmSpec`` from the arguments of ``SlurmJob``; the gateway turns it into a batch script. The
messages of its errors begin with the name of the argument, so that the client only has to add its own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

DEFAULT_LEASE = 14400.0
DEFAULT_IDLE_TIMEOUT = 1800.0
DEFAULT_WARN_BEFORE = 600.0

MeshName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$")]
Positive = Annotated[int, Field(ge=1, strict=True)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # the batch script exports it
_MEMORY = re.compile(r"[0-9]+[KMGT]?B?", re.IGNORECASE)
_TIMES = (  # minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]
    re.compile(r"(?P<m>\d+)(?::(?P<s>\d+))?"),
    re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"),
    re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?"),
)
_UNLIMITED = frozenset({"infinite", "unlimited"})

_MINE: Mapping[str, str] = {  # options of sbatch that the job decides, and the argument to use instead
    "--array": "",
    "-a": "",
    "--batch": "",
    "--bell": "",
    "--cpus-per-task": "cpus_per_task",
    "-c": "cpus_per_task",
    "--error": "log_dir",
    "-e": "log_dir",
    "--exclusive": "exclusive",
    "--gpus-per-node": "gpus_per_node",
    "--help": "",
    "--input": "",
    "-i": "",
    "--job-name": "job_name",
    "-J": "job_name",
    "--mem": "mem",
    "--no-kill": "",
    "-k": "",
    "--no-requeue": "",
    "--nodes": "meshes",
    "-N": "meshes",
    "--ntasks": "meshes",
    "-n": "meshes",
    "--ntasks-per-node": "ntasks_per_node",
    "--open-mode": "",
    "--output": "log_dir",
    "-o": "log_dir",
    "--parsable": "",
    "--requeue": "",
    "--test-only": "",
    "--wait": "",
    "-W": "",
    "--wrap": "",
}
_SHARED: Mapping[str, str] = {  # options that may be given here or as an argument, but not both
    "--time": "time_limit",
    "-t": "time_limit",
    "--partition": "partition",
    "-p": "partition",
    "--account": "account",
    "-A": "account",
    "--qos": "qos",
    "-q": "qos",
}


class SlurmSpec(BaseModel):
    """One job. Times are in seconds, except for ``time_limit``, which is Slurm's text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    meshes: dict[MeshName, Annotated[int, Field(ge=1, le=4096, strict=True)]] = Field(min_length=1)
    python_exe: Annotated[str, Field(min_length=1)] = "python"
    slurm_args: tuple[str, ...] = ()
    monarch_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    job_name: str = "monarch_job"
    ntasks_per_node: Positive = 1
    time_limit: str | None = None
    partition: str | None = None
    log_dir: str | None = None
    exclusive: bool = True
    gpus_per_node: Positive | None = None
    cpus_per_task: Positive | None = None
    mem: str | None = None
    account: str | None = None
    qos: str | None = None
    share: bool = False  # the node's CPUs and memory in proportion to the GPUs asked for
    gateway_on: Literal["login", "node"] = "login"  # node: the first one of the allocation
    split_gpus: bool = True  # each process sees its part of the node's GPUs
    env: dict[str, str] = {}
    lease: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DEFAULT_LEASE
    idle_timeout: Seconds = DEFAULT_IDLE_TIMEOUT
    warn_before: Seconds | None = None  # DEFAULT_WARN_BEFORE, or half of a shorter time limit

    @property
    def nodes(self) -> int:
        return sum(self.meshes.values())

    @property
    def working_directory(self) -> str | None:
        """The value of the last ``--chdir`` in ``slurm_args``, which counts."""
        found = [each for each in self.slurm_args if _option(each) in ("--chdir", "-D")]
        return found[-1].removeprefix(_option(found[-1])).lstrip("= ").strip("\"'") if found else None

    @field_validator("job_name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _JOB_NAME.fullmatch(value):
            raise ValueError("use letters, digits and _ . + -, at most 128, so that log files can have this name")
        return value

    @field_validator("time_limit")
    @classmethod
    def _check_time(cls, value: str | None) -> str | None:
        if value is not None and (value != value.strip() or time_limit_minutes(value) is None):
            raise ValueError("not a time of Slurm's: use MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS")
        return value

    @field_validator("mem")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        if value is not None and not _MEMORY.fullmatch(value):
            raise ValueError("not an amount of memory: use a number with K, M, G or T, such as 16G")
        return value

    @field_validator("python_exe", "partition", "log_dir", "account", "qos")
    @classmethod
    def _check_text(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "\n" in value or "\0" in value):
            raise ValueError("must be text on one line, and not empty")
        return value

    @field_validator("env")
    @classmethod
    def _check_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a variable: use letters, digits and _, no digit first")
            if "\0" in text:
                raise ValueError(f"the value of {name!r} contains a null byte, which no variable can have")
        return value

    @field_validator("slurm_args")
    @classmethod
    def _check_arguments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            if not argument.startswith("-") or "\n" in argument:
                raise ValueError(f"{argument!r} is not an option: write each as one text, such as '--constraint=a100'")
            name = _option(argument)
            if name in _MINE:
                instead = f"use {_MINE[name]}=" if _MINE[name] else "the job depends on its own value"
                raise ValueError(f"{name} cannot be set here: {instead}")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> SlurmSpec:
        for name in map(_option, self.slurm_args):
            argument = _SHARED.get(name)
            if argument is not None and getattr(self, argument) is not None:
                raise ValueError(f"slurm_args has {name} and {argument}= is set as well: pass only one")
        if self.share and self.exclusive:
            raise ValueError("exclusive=True contradicts share_node()")
        if self.gpus_per_node is not None and self.ntasks_per_node > self.gpus_per_node:
            raise ValueError(
                f"ntasks_per_node={self.ntasks_per_node} is more than gpus_per_node={self.gpus_per_node}: each task "
                "needs at least one GPU"
            )
        if self.monarch_port is not None and not self.exclusive:
            raise ValueError(
                f"monarch_port={self.monarch_port} with exclusive=False: two jobs on a node would collide. Leave it "
                "out, and each worker takes a free port"
            )
        return self


def _option(argument: str) -> str:
    """The name of an option: ``--time`` of ``--time=5``, ``-t`` of ``-t5`` and of ``-t 5``."""
    if argument.startswith("--"):
        return re.split(r"[=\s]", argument, maxsplit=1)[0]
    return argument[:2]


def time_limit_minutes(text: str) -> float | None:
    """Slurm's text for a time limit in minutes; infinity for no limit, None if it is not one."""
    if text.strip().lower() in _UNLIMITED:
        return float("inf")
    for form in _TIMES:
        if found := form.fullmatch(text.strip()):
            parts: dict[str, Any] = {name: int(value or 0) for name, value in found.groupdict().items()}
            days, hours, minutes = parts.get("d", 0), parts.get("h", 0), parts.get("m", 0)
            return float((days * 24 + hours) * 60 + minutes + parts.get("s", 0) / 60)
    return None

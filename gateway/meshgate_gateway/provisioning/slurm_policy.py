"""The operator's policy for Slurm jobs that a gateway submits for others, and the check of a job against it. Pure.

Slurm applies its own rules to the user that a job is submitted as. The policy narrows them for callers that have only a
token. Each value that it checks becomes a line of a batch script, so characters that could begin another option are
rejected with it.
"""

from __future__ import annotations

import os
import pwd
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from meshgate_gateway.provisioning.refusals import (
    listed,
    matches,
    not_a_submitter,
    not_allowed,
    read_policy_file,
    session_violations,
)
from meshgate_slurm.spec import SlurmSpec, time_limit_minutes

DEFAULT_PYTHON = "python"  # what a caller that chooses none sends
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_PATH = re.compile(r"[A-Za-z0-9_./~@+-]+")
_OPTION = re.compile(r"--[a-z][a-z-]*")
_OPTION_VALUE = re.compile(r"[A-Za-z0-9_.:@+,*/&|=\[\]()-]*")
_NOT_OPTIONS = frozenset(  # arguments of SlurmJob that the policy checks there, and what decides whose job it is
    {"--time", "--time-min", "--partition", "--account", "--qos", "--uid", "--gid", "--chdir", "--clusters"}
)


class Caller(BaseModel):
    """The holder of the token with this SHA-256, and the user of the cluster that its jobs run as. Without ``user``,
    they run as the gateway's own, unless that is root."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")]
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    user: str | None = None


class SlurmPolicy(BaseModel):
    """Patterns are shell patterns such as ``team-*``. An empty list allows no value: the job then has Slurm's default.
    None is no limit besides Slurm's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    callers: tuple[Caller, ...] = ()
    submitters: tuple[str, ...] = ("*",)
    """Patterns of the names of callers that may submit programs, which run beside the gateways of their jobs. Whoever
    may use a job may stop its runs."""
    python: str = sys.executable
    """The Python of the jobs' gateways and workers, on a file system that the nodes share."""
    pythons: tuple[str, ...] = ()
    """Patterns of other Pythons that a job may use instead. It also runs on this machine, as the caller's user."""
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Names of options of sbatch that ``slurm_args`` may contain, such as ``--constraint``."""
    max_nodes: int = Field(default=16, ge=1)
    max_time: str | None = None
    """Maximum time limit, in Slurm's form. Jobs must then set one."""
    max_jobs_per_caller: int | None = Field(default=None, ge=1)
    max_idle: int = Field(default=86_400, ge=1)
    """Maximum idle timeout of a job, in seconds."""
    max_lease: int = Field(default=86_400, ge=1)
    """Maximum lease of a job's sessions, in seconds."""
    batch: bool = True
    """Whether ``apply(client_script)`` is allowed."""

    @field_validator("max_time")
    @classmethod
    def _check_time(cls, value: str | None) -> str | None:
        if value is not None and time_limit_minutes(value) is None:
            raise ValueError("not a time of Slurm's: use MINUTES, HH:MM:SS, D-HH or D-HH:MM:SS")
        return value

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _OPTION.fullmatch(name) or name in _NOT_OPTIONS:
                raise ValueError(f"{name!r} cannot be allowed: list full names such as --constraint, without values")
        return value


def why_not_use(policy: SlurmPolicy, owner: str, *, submits: bool) -> str | None:
    """Why a job of ``owner`` may not be used, or no program be submitted to it; None if it may."""
    name = owner.removeprefix("caller:")
    if owner == name:  # the operator
        return None
    if name not in {caller.name for caller in policy.callers}:
        return (
            f"{owner} is not in the policy of this gateway any more, so the token of its job (MESHGATE_TOKEN) opens "
            "nothing here: ask its operator"
        )
    if submits and not matches(name, policy.submitters):
        return not_a_submitter(owner, policy.submitters)
    return None


def read_slurm_policy(path: Path, uid: int) -> SlurmPolicy:
    """The policy of a gateway that runs as the user ``uid``. Raises ValueError if the file cannot be read or is
    invalid."""
    policy = read_policy_file(path, SlurmPolicy)
    names = [caller.name for caller in policy.callers]
    if len({*names}) < len(names):
        raise ValueError(f"invalid policy {path}: callers: two have the same name")
    for caller in policy.callers:
        if problem := _user_problem(caller.user, uid):
            raise ValueError(f"invalid policy {path}: caller {caller.name!r}: {problem}")
    return policy


def _user_problem(user: str | None, uid: int) -> str:
    if user is None:
        return "" if uid != 0 else "set user: this gateway runs as root, and no job may"
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return f"this machine has no user {user!r}"
    if account.pw_uid == 0:
        return "no job may run as root"
    if uid not in (0, account.pw_uid):
        return f"only a gateway that runs as root can submit jobs as {user!r}"
    return ""


def slurm_violations(policy: SlurmPolicy, spec: SlurmSpec, *, batch: bool) -> list[str]:
    """Everything in the requested job that the policy does not allow, each as a clause."""
    return list(_violations(policy, spec, batch))


def _violations(policy: SlurmPolicy, spec: SlurmSpec, batch: bool) -> Iterator[str]:
    if spec.nodes > policy.max_nodes:
        yield f"{spec.nodes} nodes exceed the limit of {policy.max_nodes}"
    if spec.gateway_on != "login":
        yield f"gateway_on {spec.gateway_on!r} is not allowed: this gateway starts those of its jobs on its own machine"
    if batch and not policy.batch:
        yield "apply(client_script) is not allowed"
    yield from not_allowed("partition", spec.partition.split(",") if spec.partition else (), policy.partitions, _PLAIN)
    yield from not_allowed("account", (spec.account,) if spec.account else (), policy.accounts, _PLAIN)
    yield from not_allowed("qos", (spec.qos,) if spec.qos else (), policy.qos, _PLAIN)
    if spec.python_exe != DEFAULT_PYTHON and (
        os.path.normpath(spec.python_exe) != spec.python_exe
        or not _PATH.fullmatch(spec.python_exe)
        or not matches(spec.python_exe, policy.pythons)
    ):
        yield f"python_exe {spec.python_exe!r} is not allowed (allowed: {listed(policy.pythons)}): leave it out"
    if spec.log_dir is not None and not _PATH.fullmatch(spec.log_dir):
        yield f"log_dir {spec.log_dir!r}: use only letters, digits and _ . / ~ @ + -"
    yield from _time_violations(policy, spec)
    for argument in spec.slurm_args:
        name, _, value = argument.partition("=")
        if name not in policy.options or not _OPTION_VALUE.fullmatch(value):
            yield f"slurm_args {argument!r} is not allowed (allowed, as --option=value: {listed(policy.options)})"


def _time_violations(policy: SlurmPolicy, spec: SlurmSpec) -> Iterator[str]:
    if policy.max_time is not None:
        asked = time_limit_minutes(spec.time_limit) if spec.time_limit is not None else None
        if asked is None:
            yield f"time_limit must be set, to at most {policy.max_time}"
        elif not 0 < asked <= (time_limit_minutes(policy.max_time) or 0):
            yield f"time_limit {spec.time_limit} exceeds the limit of {policy.max_time}"
    yield from session_violations(policy, spec.idle_timeout, spec.lease)

"""Checks and conversions of the arguments of ``SlurmJob``; their errors name the argument."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from meshgate_slurm.spec import SlurmSpec


def build_spec(arguments: Mapping[str, Any]) -> SlurmSpec:
    """The job that the arguments describe; None stands for an argument's default. Raises ValueError."""
    given = {name: value for name, value in arguments.items() if value is not None}
    slurm_args = given.get("slurm_args", ())
    if isinstance(slurm_args, str):
        raise TypeError(f"SlurmJob(slurm_args={slurm_args!r}): expected a list, such as ['--constraint=a100']")
    try:
        return SlurmSpec.model_validate({**given, "slurm_args": tuple(slurm_args)})
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            names = [str(part) for part in problem["loc"] if part != "[key]"]
            where = (names[0] if names else "") + "".join(f"[{name!r}]" for name in names[1:])
            value = "" if not names or isinstance(problem["input"], (dict, list, tuple)) else f"={problem['input']!r}"
            text = problem["msg"].removeprefix("Value error, ")
            lines.append(f"SlurmJob({where}{value}): {text}" if where else f"SlurmJob: {text}")
        raise ValueError("\n".join(lines)) from None


def refuse_direct_access(*, out_of_cluster: bool, attach_to: str | None, bind_to: str | None) -> None:
    """Monarch's arguments for drivers outside the cluster, which meshgate reaches by its gateway."""
    if out_of_cluster:
        raise ValueError("SlurmJob(out_of_cluster=True): the gateway is in the cluster; pass login= instead")
    if attach_to is not None:
        raise ValueError(f"SlurmJob(attach_to={attach_to!r}): the driver reaches no worker; pass login= instead")
    if bind_to is not None:
        raise ValueError(
            f"SlurmJob(bind_to={bind_to!r}): each worker listens on the address by which it reaches the gateway; "
            "remove the argument"
        )


def check_sync_dirs(sync_dirs: Sequence[str] | None) -> list[str] | None:
    """Checked by the constructor, so that a missing directory is reported before anything is submitted."""
    if sync_dirs is None:
        return None
    if isinstance(sync_dirs, (str, bytes)):
        raise TypeError(f"SlurmJob(sync_dirs={sync_dirs!r}): expected a list, such as sync_dirs=[…]")
    paths = [os.fspath(path) for path in sync_dirs]
    if missing := [path for path in paths if not os.path.isdir(os.path.expanduser(path))]:
        raise ValueError(f"SlurmJob(sync_dirs=…): {missing[0]!r} is not a directory on this machine")
    return paths

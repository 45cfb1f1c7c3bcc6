"""Reads a torchx ``AppDef``: one role that runs a torchrun command on its replicas. Pure; torchx is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshgate.jobs.spmd.torchrun import FORMS, is_command


@dataclass(frozen=True, slots=True)
class AppRole:
    """What the job of an AppDef needs. ``wrapper`` is the entrypoint, if that is a program that runs its arguments.
    ``cpus``, ``gpus`` and ``memory_mb`` are those of each replica, or None."""

    name: str
    image: str
    command: tuple[str, ...]
    wrapper: tuple[str, ...]
    environment: Mapping[str, str]
    replicas: int
    cpus: float | None
    gpus: int | None
    memory_mb: int | None
    workspace: str | None


def read_appdef(appdef: Any) -> AppRole:
    """Raises TypeError if ``appdef`` is not an AppDef, and ValueError if it does not run torchrun in one role."""
    roles = getattr(appdef, "roles", None)
    if not isinstance(roles, list):
        raise TypeError(f"serve() takes a command as a list of strings, or a torchx AppDef, not {appdef!r}")
    if len(roles) != 1:
        raise ValueError(f"the AppDef {appdef.name!r} has {len(roles)} roles: SPMD jobs have one")
    [role] = roles
    entrypoint, arguments = str(role.entrypoint), tuple(map(str, role.args))
    command: tuple[str, ...]
    wrapper: tuple[str, ...]
    if is_command(entrypoint):
        command, wrapper = (entrypoint, *arguments), ()
    elif arguments and is_command(arguments[0]):
        command, wrapper = arguments, (entrypoint,)
    else:
        found = " ".join([entrypoint, *arguments[:2]])
        raise ValueError(
            f"role {role.name!r} runs {found!r}: expected {FORMS}, or an entrypoint that runs such a command"
        )
    if role.num_replicas < 1:
        raise ValueError(f"role {role.name!r} has num_replicas={role.num_replicas}: expected at least 1")
    return AppRole(
        name=role.name,
        image=role.image,
        command=command,
        wrapper=wrapper,
        environment=dict(role.env),
        replicas=role.num_replicas,
        cpus=_positive(role.resource.cpu),
        gpus=_positive(role.resource.gpu),
        memory_mb=_positive(role.resource.memMB),
        workspace=_workspace(role),
    )


def refuse_unmapped(appdef: Any, scheduler: str) -> None:
    """Raises ValueError if the role has a field that a meshgate job of ``scheduler`` does not take."""
    [role] = appdef.roles
    unmapped = {
        "min_replicas": role.min_replicas is not None,
        "max_retries": role.max_retries > 0,
        "port_map": bool(role.port_map),
        "mounts": bool(role.mounts),
        "resource.capabilities": bool(role.resource.capabilities),
        "resource.devices": bool(role.resource.devices),
    }
    for field, is_set in unmapped.items():
        if is_set:
            hint = "; use torchrun --max-restarts" if field == "max_retries" else ""
            raise ValueError(f"role {role.name!r}: {field} is not supported with the scheduler {scheduler}{hint}")


def _positive(value: Any) -> Any:
    return value if value is not None and value > 0 else None


def _workspace(role: Any) -> str | None:
    """The directory on this machine whose files the role runs, its first project, as Monarch takes it."""
    projects = getattr(role.workspace, "projects", None) if role.workspace is not None else None
    if not projects:
        return None
    directory = os.path.abspath(os.path.expanduser(str(next(iter(projects)))))
    if not os.path.isdir(directory):
        raise ValueError(f"role {role.name!r}: its workspace {directory} is not a directory on this machine")
    return directory

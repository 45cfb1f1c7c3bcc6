"""The hosts of an SPMD job by the name of a torchx scheduler: which job starts them, and what of torchx it takes.

An ``AppDef`` has one role that runs a torchrun command on its replicas. It is read without importing torchx.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.job import KubernetesJob
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.slurm.job import SlurmJob
from meshgate.jobs.spmd.torchrun import FORMS, TorchrunCommand, is_command
from meshgate.jobs.spmd.torchx_job import TorchXJob
from meshgate.jobs.trait import JobTrait

MESH = "workers"


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of ``job_of``."""

    scheduler: str
    config: Mapping[str, Any]
    command: TorchrunCommand
    appdef: Any
    role: AppRole | None
    name: str | None

    @property
    def hosts(self) -> int:
        if self.role is not None:
            return self.role.replicas
        return self.command.nodes[1] if self.command.nodes is not None else 1

    def take(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The values of ``config`` under our names. Raises ValueError for keys that are not in ``names``."""
        for key, value in self.config.items():
            if key not in names and value is not None:
                known = f"; supported: {', '.join(names)}" if names else ""
                raise ValueError(f"scheduler_cfg of {self.scheduler}: {key} is not supported{known}")
        return {names[key]: value for key, value in self.config.items() if key in names}


def job_of(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
    """The job, not started, whose hosts run ``command``; ``appdef`` and ``role`` are None for a command alone.

    Raises ValueError for an unknown scheduler, with a list, and for what the scheduler's job does not take.
    """
    make = SCHEDULERS.get(scheduler)
    if make is None:
        known = ", ".join(sorted(SCHEDULERS))
        raise ValueError(f"unknown scheduler {scheduler!r}: the schedulers are {known}; or pass job=…")
    return make(_Asked(scheduler, config, command, appdef, role, name))


def _local_cwd(asked: _Asked) -> JobTrait:
    if asked.role is not None:
        return TorchXJob(asked.appdef, asked.scheduler, asked.config)
    asked.take({})
    nodes = asked.command.nodes
    if nodes is not None and nodes != (1, 1):
        raise ValueError(
            f"the scheduler local_cwd has one host, and --nnodes is {nodes[0]}:{nodes[1]}. For several "
            "hosts on this machine, pass job=ProcessJob({'workers': 2})"
        )
    return ProcessJob({MESH: 1})


def _local_docker(asked: _Asked) -> JobTrait:
    if asked.role is None:
        raise ValueError("the scheduler local_docker needs an AppDef, whose role names the image")
    return TorchXJob(asked.appdef, asked.scheduler, asked.config)


def _kubernetes(asked: _Asked) -> JobTrait:
    role = asked.role
    names = {
        "namespace": "namespace",
        "service_account": "service_account_name",
        "priority_class": "priority_class_name",
        "queue": "queue_name",
    }
    options = asked.take(names)
    if role is not None:
        refuse_unmapped(asked.appdef, asked.scheduler)
        options.update(image=role.image or None, env_vars=dict(role.environment) or None)
        options.update(cpus=role.cpus, gpus=role.gpus, memory=f"{role.memory_mb}Mi" if role.memory_mb else None)
    given = {key: value for key, value in options.items() if value is not None}
    return KubernetesJob(name=asked.name, compute=Compute(replicas=asked.hosts, **given))


def _slurm(asked: _Asked) -> JobTrait:
    role = asked.role
    names = {
        "account": "account",
        "partition": "partition",
        "time": "time_limit",
        "qos": "qos",
        "comment": "--comment",
        "constraint": "--constraint",
        "mail-user": "--mail-user",
        "mail-type": "--mail-type",
        "login": "login",
        "python_exe": "python_exe",
        "log_dir": "log_dir",
        "job_name": "job_name",
    }
    taken = asked.take(names)
    options = {key: value for key, value in taken.items() if value is not None}
    if asked.name is not None:
        options.setdefault("job_name", asked.name)
    flags = [key for key in options if key.startswith("--")]
    options["slurm_args"] = [f"{key}={options.pop(key)}" for key in flags]
    if role is not None:
        refuse_unmapped(asked.appdef, asked.scheduler)
        if role.image:
            raise ValueError(
                f"role {role.name!r}: image={role.image!r} is not supported with the scheduler {asked.scheduler}"
            )
        # As torchx: a replica with resources of its own shares its node.
        options["exclusive"] = role.cpus is None and role.gpus is None and role.memory_mb is None
        options["cpus_per_task"] = None if role.cpus is None else math.ceil(role.cpus)
        options["mem"] = None if role.memory_mb is None else f"{role.memory_mb}M"
        options.update(gpus_per_node=role.gpus, env=dict(role.environment) or None)
    return SlurmJob({MESH: asked.hosts}, **options)


SCHEDULERS: Mapping[str, Callable[[_Asked], JobTrait]] = {
    "k8s": _kubernetes,
    "kubernetes": _kubernetes,
    "local_cwd": _local_cwd,
    "local_docker": _local_docker,
    "slurm": _slurm,
}

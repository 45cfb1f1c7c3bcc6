"""The hosts of an SPMD job by the name of a torchx scheduler: which job starts them, and what of torchx it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.job import KubernetesJob
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.slurm.job import SlurmJob
from meshgate.jobs.spmd.appdef import AppRole, refuse_unmapped
from meshgate.jobs.spmd.torchrun import TorchrunCommand
from meshgate.jobs.spmd.torchx_job import TorchXJob
from meshgate.jobs.trait import JobTrait

MESH = "workers"


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
    return make(scheduler, config, command, appdef, role, name)


def _local_cwd(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
    if role is not None:
        return TorchXJob(appdef, scheduler, config)
    _take(scheduler, config, {})
    if command.nodes is not None and command.nodes != (1, 1):
        raise ValueError(
            f"the scheduler local_cwd has one host, and --nnodes is {command.nodes[0]}:{command.nodes[1]}. For several "
            "hosts on this machine, pass job=ProcessJob({'workers': 2})"
        )
    return ProcessJob({MESH: 1})


def _local_docker(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
    if role is None:
        raise ValueError("the scheduler local_docker needs an AppDef, whose role names the image")
    return TorchXJob(appdef, scheduler, config)


def _kubernetes(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
    names = {
        "namespace": "namespace",
        "service_account": "service_account_name",
        "priority_class": "priority_class_name",
        "queue": "queue_name",
    }
    options = _take(scheduler, config, names)
    if role is not None:
        refuse_unmapped(appdef, scheduler)
        options.update(image=role.image or None, env_vars=dict(role.environment) or None)
        options.update(cpus=role.cpus, gpus=role.gpus, memory=f"{role.memory_mb}Mi" if role.memory_mb else None)
    given = {key: value for key, value in options.items() if value is not None}
    return KubernetesJob(name=name, compute=Compute(replicas=_hosts(command, role), **given))


def _slurm(
    scheduler: str,
    config: Mapping[str, Any],
    command: TorchrunCommand,
    appdef: Any,
    role: AppRole | None,
    name: str | None,
) -> JobTrait:
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
    taken = _take(scheduler, config, names)
    options = {key: value for key, value in taken.items() if value is not None}
    if name is not None:
        options.setdefault("job_name", name)
    flags = [key for key in options if key.startswith("--")]
    options["slurm_args"] = [f"{key}={options.pop(key)}" for key in flags]
    if role is not None:
        refuse_unmapped(appdef, scheduler)
        if role.image:
            raise ValueError(
                f"role {role.name!r}: image={role.image!r} is not supported with the scheduler {scheduler}"
            )
        # As torchx: a replica with resources of its own shares its node.
        options["exclusive"] = role.cpus is None and role.gpus is None and role.memory_mb is None
        options["cpus_per_task"] = None if role.cpus is None else math.ceil(role.cpus)
        options["mem"] = None if role.memory_mb is None else f"{role.memory_mb}M"
        options.update(gpus_per_node=role.gpus, env=dict(role.environment) or None)
    return SlurmJob({MESH: _hosts(command, role)}, **options)


def _hosts(command: TorchrunCommand, role: AppRole | None) -> int:
    if role is not None:
        return role.replicas
    return command.nodes[1] if command.nodes is not None else 1


def _take(scheduler: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of ``config`` under our names. Raises ValueError for keys that are not in ``names``."""
    for key, value in config.items():
        if key not in names and value is not None:
            known = f"; supported: {', '.join(names)}" if names else ""
            raise ValueError(f"scheduler_cfg of {scheduler}: {key} is not supported{known}")
    return {names[key]: value for key, value in config.items() if key in names}


Make = Callable[[str, Mapping[str, Any], TorchrunCommand, Any, "AppRole | None", "str | None"], JobTrait]
SCHEDULERS: Mapping[str, Make] = {
    "k8s": _kubernetes,
    "kubernetes": _kubernetes,
    "local_cwd": _local_cwd,
    "local_docker": _local_docker,
    "slurm": _slurm,
}

"""``meshgate ls`` and ``meshgate kill`` for the jobs of a Kubernetes cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from meshgate.cli.console import age_text, fail, meshes_text, new_table
from meshgate.cli.models import Ended, Event, JobRow, Jobs
from meshgate.errors import JobNotRunning

if TYPE_CHECKING:
    from meshgate_kubernetes.api.client import Api
    from meshgate_kubernetes.jobs.lifecycle import ListedJob

T = TypeVar("T")
EVENTS_SHOWN = 50


def list_jobs(namespace: str) -> Jobs:
    """The jobs of ``namespace``, or of all namespaces if that is empty."""
    from meshgate_kubernetes.jobs import lifecycle  # noqa: PLC0415 - takes a fifth of a second

    return Jobs(jobs=[_row_of(job) for job in _call_api(lambda api: lifecycle.list_jobs(api, namespace))])


def _row_of(job: ListedJob) -> JobRow:
    return JobRow(
        id=job.name,
        kind="KubernetesJob",
        namespace=job.namespace,
        meshes=dict(job.meshes) if job.meshes is not None else None,
        age=round(time.time() - job.created, 1),
        owner=job.owner,
    )


def table(jobs: Jobs, namespace: str) -> object:
    """What a terminal shows."""
    if not jobs.jobs:
        return f"no jobs in namespace {namespace!r}" if namespace else "no jobs in the cluster"
    found = new_table("NAME", "NAMESPACE", "MESHES", "AGE", "OWNER")
    for job in jobs.jobs:
        found.add_row(job.id, job.namespace, meshes_text(job.meshes), age_text(job.age), job.owner)
    return found


def kill(names: list[str], namespace: str, *, all_jobs: bool, report: Callable[[str], object]) -> Ended:
    """Reports each job that was ended with a line. Raises JobNotRunning if one is unknown, and ends none."""
    from meshgate_kubernetes.jobs import lifecycle  # noqa: PLC0415 - takes a fifth of a second

    running = {job.name: job for job in _call_api(lambda api: lifecycle.list_jobs(api, namespace))}
    if not names and not all_jobs:
        raise typer.BadParameter(f"name the jobs to end, or pass --all; run `meshgate ls -n {namespace}` to list them")
    if unknown := [name for name in names if name not in running]:
        raise JobNotRunning(f"there is no job {unknown[0]!r} in namespace {namespace!r}")
    ended = []
    for job in running.values() if all_jobs else [running[name] for name in names]:
        _call_api(lambda api, job=job: lifecycle.end(api, job))  # type: ignore[misc]
        ended.append(job.name)
        report(f"ended {job.namespace}/{job.name}")
    return Ended(ended=ended)


def objects_and_events(name: str, namespace: str) -> tuple[list[str], list[Event]]:
    """The objects of the job as ``kind/name``, and what the cluster reported about them last."""
    return _call_api(lambda api: _read_objects(api, name, namespace))


def _read_objects(api: Api, name: str, namespace: str) -> tuple[list[str], list[Event]]:
    from meshgate_kubernetes.manifests.names import JOB_LABEL  # noqa: PLC0415

    objects = [
        f"{kind}/{found['metadata']['name']}"
        for kind in ("Deployment", "StatefulSet", "Pod", "Service")
        for found in api.list_objects(kind, namespace, f"{JOB_LABEL}={name}")[0]
    ]
    names = {known.partition("/")[2] for known in objects}
    events = [
        Event(
            object=f"{found['involvedObject']['kind']}/{found['involvedObject']['name']}",
            reason=found.get("reason") or "",
            message=found.get("message") or "",
            count=found.get("count") or 1,
        )
        for found in api.list_objects("Event", namespace)[0]
        if found["involvedObject"].get("name") in names
    ]
    return objects, events[-EVENTS_SHOWN:]


def _call_api(call: Callable[[Api], T]) -> T:
    """Exits with code 1 and a message if the API server cannot be used."""
    from meshgate_kubernetes.api.client import Api  # noqa: PLC0415 - takes a fifth of a second
    from meshgate_kubernetes.errors import Forbidden, KubernetesError  # noqa: PLC0415

    try:
        return call(Api.from_kubeconfig())
    except KubernetesError as error:
        hint = ""
        if isinstance(error, Forbidden) and not error.namespace:
            hint = " in all namespaces; name one namespace with -n NAMESPACE"
        fail(f"{error}{hint}")

"""The command line: what runs here, and the end of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

import meshgate
from meshgate.jobs import registry
from meshgate.jobs.gateway_process import end_gateway

if TYPE_CHECKING:
    from meshgate_kubernetes.api import Api

__all__ = ["app"]

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Jobs of meshgate that run on this machine, or in a cluster."
)


Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="jobs in a Kubernetes cluster: those of this namespace")
]


@app.command("ls")
def list_jobs(
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="jobs in a Kubernetes cluster: those of all namespaces")
    ] = False,
) -> None:
    """Lists the running jobs: id, kind, hosts of each mesh, process of the gateway, age, where it was started.

    With a namespace, those of the cluster that KUBECONFIG names: name, namespace, hosts of each mesh, age.
    """
    if namespace is not None or all_namespaces:
        _list_in_cluster("" if all_namespaces else namespace or "")
        return
    table = Table("ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY", box=None, pad_edge=False, header_style="bold")
    for entry in registry.entries():
        meshes = " ".join(f"{name}={count}" for name, count in entry.meshes.items())
        age = _age(time.time() - entry.created)
        table.add_row(entry.apply_id[:8], entry.kind, meshes, str(entry.pid), age, _short(entry.directory))
    Console().print(table if table.row_count else "no job runs here", soft_wrap=True)


@app.command("kill")
def kill_jobs(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="ids, or how they begin")] = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="every job of yours on this machine")] = False,
    namespace: Namespace = None,
) -> None:
    """Ends jobs, with every process of theirs. With a namespace, jobs of a cluster, by their names."""
    if namespace is not None:
        _kill_in_cluster(ids or [], namespace, all_jobs)
        return
    running = list(registry.entries())
    if not ids and not all_jobs:
        raise typer.BadParameter("name the jobs to end, or say --all; meshgate ls lists them")
    chosen = running if all_jobs else [_the_one(running, prefix) for prefix in ids or []]
    for entry in chosen:
        end_gateway(entry.process, entry.apply_id)
        registry.unregister(entry.apply_id)
        typer.echo(f"ended {entry.apply_id[:8]} ({entry.kind}, pid {entry.pid})")


def _list_in_cluster(namespace: str) -> None:
    from meshgate_kubernetes.jobs import listed  # noqa: PLC0415  (a fifth of a second)

    table = Table("NAME", "NAMESPACE", "MESHES", "AGE", "ASKED FOR BY", box=None, pad_edge=False, header_style="bold")
    for job in _in_cluster(lambda api: listed(api, namespace)):
        meshes = "of another version"
        if job.meshes is not None:
            meshes = " ".join(f"{name}={count}" for name, count in job.meshes.items())
        table.add_row(job.name, job.namespace, meshes, _age(time.time() - job.created), job.owner)
    Console().print(table if table.row_count else "no job runs there", soft_wrap=True)


def _kill_in_cluster(names: list[str], namespace: str, all_jobs: bool) -> None:
    from meshgate_kubernetes.jobs import end_listed, listed  # noqa: PLC0415  (as above)

    there = {job.name: job for job in _in_cluster(lambda api: listed(api, namespace))}
    if not names and not all_jobs:
        raise typer.BadParameter(f"name the jobs to end, or say --all; meshgate ls -n {namespace} lists them")
    if unknown := [name for name in names if name not in there]:
        raise typer.BadParameter(f"no job {unknown[0]!r} runs in namespace {namespace!r}")
    for job in there.values() if all_jobs else [there[name] for name in names]:
        _in_cluster(lambda api, job=job: end_listed(api, job))  # type: ignore[misc]
        typer.echo(f"ended {job.namespace}/{job.name}")


def _in_cluster(do: Callable[[Api], T]) -> T:
    from meshgate_kubernetes.api import Api  # noqa: PLC0415  (as above)
    from meshgate_kubernetes.errors import Forbidden, KubernetesError  # noqa: PLC0415

    try:
        return do(Api.from_kubeconfig())
    except KubernetesError as error:
        hint = ""
        if isinstance(error, Forbidden) and not error.namespace:
            hint = " in all namespaces: name one of yours, -n NAMESPACE"
        typer.echo(f"meshgate: {error}{hint}", err=True)
        raise typer.Exit(1) from None


@app.command("version")
def show_version() -> None:
    """Prints the version."""
    typer.echo(meshgate.__version__)


def _the_one(running: list[registry.LocalEntry], prefix: str) -> registry.LocalEntry:
    found = [entry for entry in running if entry.apply_id.startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} jobs begin with" if found else "no running job begins with"
        raise typer.BadParameter(f"{what} {prefix!r}; meshgate ls lists them")
    return found[0]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _short(directory: str) -> str:
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if directory == home or directory.startswith(f"{home}/") else directory

"""``meshgate ls`` and ``meshgate kill``: the jobs of this machine, or of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from meshgate.cli import cluster_jobs, local_jobs
from meshgate.cli.console import emit
from meshgate.cli.options import AsJson, Namespace


def list_jobs(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Jobs in this namespace of a Kubernetes cluster.")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs in all namespaces of a Kubernetes cluster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List running jobs.

    Shows the jobs of this machine or, with a namespace, those of the cluster that KUBECONFIG names.
    """
    if namespace is not None or all_namespaces:
        searched = "" if all_namespaces else namespace or ""
        jobs = cluster_jobs.list_jobs(searched)
        emit(jobs, as_json, lambda console: console.print(cluster_jobs.table(jobs, searched)))
    else:
        jobs = local_jobs.list_jobs()
        emit(jobs, as_json, lambda console: console.print(local_jobs.table(jobs)))


def kill_jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB", help="Ids or unique prefixes, or job files; in a cluster, names."),
    ] = None,
    all_jobs: Annotated[
        bool, typer.Option("--all", help="All your jobs on this machine, or all jobs in the namespace.")
    ] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """End jobs and all their processes or pods."""
    report = (lambda line: None) if as_json else typer.echo
    if namespace is not None:
        ended = cluster_jobs.kill(ids or [], namespace, all_jobs=all_jobs, report=report)
    else:
        ended = local_jobs.kill(ids or [], all_jobs=all_jobs, report=report)
    emit(ended, as_json, lambda console: None)

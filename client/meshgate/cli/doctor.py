"""``meshgate doctor``: what is in the way of running jobs, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console

from meshgate.cli.console import AsJson, Job, Namespace, console, emit
from meshgate.cli.jobs import behind_a_gateway
from meshgate.cli.models import Result
from meshgate.doctor.checks import Finding, check_cluster, check_file_watches, check_gateway
from meshgate.errors import JobError
from meshgate.jobs.find import find_job
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.tokens import find_token, has_own_token, token_to_dial, url_of_gateway
from meshgate.session.dialing import UrlDialer


class Diagnosis(Result):
    """``meshgate doctor``"""

    findings: list[Finding]


def diagnose(
    job: Job = None,
    namespace: Namespace = None,
    watch: Annotated[float, typer.Option("--watch", help="Seconds to watch the connection for cuts.")] = 0.0,
    gpus: Annotated[int, typer.Option("--gpus", help="With -n: GPUs of each worker of the job.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", help="With -n: workers of the job.")] = 1,
    image: Annotated[str | None, typer.Option("--image", help="With -n: the image of the workers.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="With -n: also pull the images of the job, each by a pod that then ends.")
    ] = False,
    image_pull_secrets: Annotated[
        list[str] | None,
        typer.Option("--image-pull-secret", help="With -n: a Secret with which they are pulled; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the way to a job's gateway, and say what to change.

    Also checks this machine and, with -n, the cluster: whether it would admit a job with such workers, and has nodes
    for it. Creates nothing in the cluster without --images.

    The gateway is that of JOB or, without it, of MESHGATE_URL. Exits with 1 if there is a problem.
    """
    if images and (namespace is None or _behind_a_gateway(namespace)):
        raise typer.BadParameter("--images needs -n, and a kubeconfig without MESHGATE_TOKEN")
    compute = Compute(gpus=gpus, replicas=replicas, image=image, image_pull_secrets=image_pull_secrets or ())
    findings, shown = [], console()
    for finding in _findings(job, namespace, watch, compute, images=images):
        findings.append(finding)
        if not as_json:
            _show(finding, shown)
    emit(Diagnosis(findings=findings), as_json, lambda _: None)
    if any(finding.outcome == "problem" for finding in findings):
        raise typer.Exit(1)


def _findings(
    job: str | None, namespace: str | None, watch: float, compute: Compute, *, images: bool
) -> Iterator[Finding]:
    yield from check_file_watches()
    if namespace is not None and not _behind_a_gateway(namespace):
        sound = True
        for finding in check_cluster(None, namespace, compute, images=images):
            sound = sound and finding.outcome == "ok"
            yield finding
        if not sound:
            return
    if job is not None:
        yield from check_gateway(find_job(job, namespace)._dialer(), watch)
    elif url := url_of_gateway():
        yield from check_gateway(UrlDialer(url, _token()), watch, url)


def _token() -> str | Callable[[], str]:
    try:
        return find_token()
    except JobError:  # then the check reports why, and without any the gateway says what it needs
        return token_to_dial if has_own_token() else ""


def _behind_a_gateway(namespace: str) -> bool:
    try:
        return behind_a_gateway(namespace)
    except JobError:  # there is neither a token nor a kubeconfig, which the checks of the cluster report
        return False


def _show(finding: Finding, console: Console) -> None:
    console.print(f"{'✓' if finding.outcome == 'ok' else '✗'} {finding.check}: {finding.text}")
    if finding.remedy:
        console.print(f"    → {finding.remedy}")

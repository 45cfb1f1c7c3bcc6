"""Checks of the way to a cluster: the kubeconfig, the API server, and the permissions that a job needs.

Each check needs the one before it, so the first problem ends them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from meshgate.doctor.findings import Finding, problem
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import (
    Forbidden,
    KubernetesError,
    NotKubernetes,
    Unauthenticated,
    Unreachable,
    UntrustedCertificate,
)
from meshgate_kubernetes.jobs.permissions import require_permissions

_REMEDIES: dict[type[KubernetesError], str] = {
    Unauthenticated: "log in to the cluster again, as you do for kubectl; then `kubectl get pods` works too",
    Unreachable: "start the VPN or proxy that the cluster needs, and check the server's address in the kubeconfig",
    NotKubernetes: "correct the server's address in the kubeconfig: it is that of another service",
    UntrustedCertificate: "put the cluster's CA into the kubeconfig (certificate-authority-data); download it again",
}


def check_cluster(kubeconfig: str | None, namespace: str) -> Iterator[Finding]:
    """Whether jobs can be started in ``namespace`` of the cluster that ``kubeconfig`` (None: as kubectl) selects."""
    try:
        api = Api.from_kubeconfig(kubeconfig)
    except Unauthenticated as error:
        yield problem("kubeconfig", error, _REMEDIES[Unauthenticated])
        return
    except KubernetesError as error:
        yield problem("kubeconfig", error, "set KUBECONFIG to the kubeconfig of your cluster; `kubectl config view`")
        return
    yield Finding(check="kubeconfig", outcome="ok", text=f"selects the API server at {api.host}")
    try:
        started = time.monotonic()
        api.list_rules(namespace)
    except KubernetesError as error:
        remedy = next((text for kind, text in _REMEDIES.items() if isinstance(error, kind)), "ask the administrator")
        yield problem("API server", error, remedy)
        return
    yield Finding(check="API server", outcome="ok", text=f"answers within {time.monotonic() - started:.2f} s")
    yield from _check_permissions(api, namespace)


def _check_permissions(api: Api, namespace: str) -> Iterator[Finding]:
    request = JobRequest(namespace=namespace).with_mesh(mesh_from_compute("workers", Compute()))
    try:
        require_permissions(api, request.spec("doctor"), forward=True)
    except Forbidden as error:
        remedy = f"ask for the Kubernetes role `edit` in namespace {namespace}, or for the Role in docs/kubernetes.md"
        yield problem("permissions", error, remedy)
    except KubernetesError as error:
        yield problem("permissions", error, "try again; the API server did not answer a permission review")
    else:
        yield Finding(check="permissions", outcome="ok", text=f"jobs can be started in namespace {namespace}")

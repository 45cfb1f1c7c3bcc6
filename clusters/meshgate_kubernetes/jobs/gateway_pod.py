"""Finds the pod of a job's gateway, and reports why a known gateway is gone."""

from __future__ import annotations

from dataclasses import dataclass

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound
from meshgate_kubernetes.manifests.names import COMPONENT_LABEL, JOB_LABEL, Names
from meshgate_kubernetes.manifests.pods import GATEWAY_PORT
from meshgate_kubernetes.status.discovery import container_id, is_ready
from meshgate_kubernetes.status.termination import termination_reason


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """One gateway process: the pod and the container ID, which changes when the container restarts."""

    name: str
    host: str
    uid: str
    container: str
    port: int = GATEWAY_PORT


def find_gateway(api: Api, job: str, namespace: str) -> GatewayPod | None:
    """The gateway of the job if it is ready; the newest if an old one is still being deleted."""
    pods, _ = api.list_objects("Pod", namespace, f"{JOB_LABEL}={job},{COMPONENT_LABEL}=gateway")
    ready = [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    if not ready:
        return None
    pod = max(ready, key=lambda each: str(each["metadata"]["creationTimestamp"]))
    ip = pod["status"]["podIP"]
    return GatewayPod(pod["metadata"]["name"], ip, pod["metadata"]["uid"], container_id(pod, GATEWAY_PORT))


def gateway_gone_reason(api: Api, job: str, namespace: str, known: GatewayPod | None) -> str | None:
    """Why the gateway process ``known`` is gone for good; None if it may still respond. Raises KubernetesError."""
    try:
        api.get("ConfigMap", Names(job).parent, namespace)
    except NotFound:
        return "the job was deleted"
    if known is None:
        return None
    try:
        pod = api.get("Pod", known.name, namespace)
    except NotFound:
        return f"its pod {known.name} was deleted"
    reason = termination_reason(pod, known.uid, known.container)
    return f"its pod {known.name} {reason}" if reason else None

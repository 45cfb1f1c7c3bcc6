"""Which pod, and which process in it, is the gateway of a job; and how one that was known has ended."""

from __future__ import annotations

from dataclasses import dataclass

from meshgate_kubernetes.api import Api
from meshgate_kubernetes.discovery import container_id, is_ready
from meshgate_kubernetes.errors import NotFound
from meshgate_kubernetes.names import COMPONENT_LABEL, JOB_LABEL, Names
from meshgate_kubernetes.pods import GATEWAY_PORT
from meshgate_kubernetes.spec import Object

__all__ = ["GatewayPod", "find_gateway", "why_gone", "why_lost"]


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """One gateway process for ever: the pod, and the container in it, which changes when it is restarted."""

    name: str
    host: str
    uid: str
    container: str
    port: int = GATEWAY_PORT


def find_gateway(api: Api, job: str, namespace: str) -> GatewayPod | None:
    """The gateway of the job if one is ready, the newest where an old one is still on its way out."""
    pods, _ = api.find("Pod", namespace, f"{JOB_LABEL}={job},{COMPONENT_LABEL}=gateway")
    ready = [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
    if not ready:
        return None
    pod = max(ready, key=lambda each: str(each["metadata"]["creationTimestamp"]))
    ip = pod["status"]["podIP"]
    return GatewayPod(pod["metadata"]["name"], ip, pod["metadata"]["uid"], container_id(pod))


def why_gone(api: Api, job: str, namespace: str, known: GatewayPod | None) -> str | None:
    """Why the gateway process ``known`` will never answer again, None while it may. Raises KubernetesError."""
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
    why = why_lost(pod, known.uid, known.container)
    return f"its pod {known.name} {why}" if why else None


def why_lost(pod: Object, uid: str, container: str) -> str | None:
    """Why the process that ran as ``container`` in the pod ``uid`` runs no more, None while it may."""
    if pod["metadata"]["uid"] != uid:
        return "was replaced"
    if "deletionTimestamp" in pod["metadata"]:
        return "is being deleted"
    statuses = pod.get("status", {}).get("containerStatuses") or []
    ended = any(each.get("state", {}).get("terminated") for each in statuses)
    if ended or container_id(pod) != container or pod["status"].get("phase") in ("Failed", "Succeeded"):
        return f"ended: {ending_of(pod) or pod['status'].get('message') or 'nobody knows why'}"
    return None


def ending_of(pod: Object) -> str:
    """How the container of a pod ended last: ``OOMKilled``, ``exit code 1``; "" when it never has."""
    reason = pod.get("status", {}).get("reason") or ""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        ended = status.get("state", {}).get("terminated") or (status.get("lastState") or {}).get("terminated")
        if ended:
            how = f"exit code {ended.get('exitCode')}"
            why = ended.get("reason", "")
            return f"{why}, {how}" if why not in ("", "Error", "Completed") else how
    return str(reason)

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
    return GatewayPod(pod["metadata"]["name"], ip, pod["metadata"]["uid"], container_id(pod, GATEWAY_PORT))


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
    status = pod.get("status", {})
    if status.get("phase") not in ("Failed", "Succeeded") and _runs(status, container):
        return None
    node = pod["spec"].get("nodeName")
    return f"ended: {_ending(pod, container)}" + (f" (node {node})" if node else "")


def _runs(status: Object, container: str) -> bool:
    """Whether ``container`` is there and has not ended. Other containers of the pod are not looked at."""
    statuses = status.get("containerStatuses") or []
    return not container or any(
        each.get("containerID") == container and not each.get("state", {}).get("terminated") for each in statuses
    )


def _ending(pod: Object, container: str) -> str:
    """``OOMKilled, exit code 137``, ``Evicted: the node was low on memory``, ``exit code 1``."""
    status = pod.get("status", {})
    if status.get("reason"):  # of the whole pod: it was evicted, or its node is gone
        return ": ".join(filter(None, (status["reason"], (status.get("message") or "").strip())))
    ends = [
        ended
        for each in status.get("containerStatuses") or []
        for place in ("state", "lastState")
        if (ended := (each.get(place) or {}).get("terminated"))
    ]
    ended = next((each for each in ends if each.get("containerID") == container), ends[0] if ends else None)
    if ended is None:
        return str(status.get("message") or "its container is not there any more")
    how, why = f"exit code {ended.get('exitCode')}", ended.get("reason", "")
    return f"{why}, {how}" if why not in ("", "Error", "Completed") else how

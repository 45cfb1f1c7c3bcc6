"""Why a container of a pod no longer runs, and why one is not the first of its job. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshgate_kubernetes.manifests.spec import Object

CREATED_TOGETHER = timedelta(seconds=60)  # at most between a job and its first gateway, unless a quota delays it


def termination_reason(pod: Object, uid: str, container: str) -> str | None:
    """Why container ID ``container`` of the pod with ``uid`` has ended; None if it may still run.

    The reason completes a sentence that starts with the pod: ``was replaced``, ``ended: OOMKilled, exit code 137``.
    """
    if pod["metadata"]["uid"] != uid:
        return "was replaced"
    if "deletionTimestamp" in pod["metadata"]:
        return "is being deleted"
    status = pod.get("status", {})
    if status.get("phase") not in ("Failed", "Succeeded") and _is_running(status, container):
        return None
    node = pod["spec"].get("nodeName")
    return f"ended: {_describe_end(status, container)}" + (f" (node {node})" if node else "")


def restart_reason(pod: Object, container: str, job_created: str) -> str:
    """Why the gateway in container ``container`` of the pod is not the first of its job, as far as the pod shows it; ""
    if it is. ``job_created``: when the job was, as Kubernetes writes it."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ours = [each for each in statuses if each.get("name") == container]
    if ended := next((end for each in ours if (end := (each.get("lastState") or {}).get("terminated"))), None):
        why = _describe_end({"containerStatuses": ours}, ended.get("containerID", ""))
        return f"the gateway's container ended at {ended.get('finishedAt')} ({why}) and was started again"
    created = pod["metadata"]["creationTimestamp"]
    if _time(created) - _time(job_created) > CREATED_TOGETHER:
        return (
            f"the gateway's pod was created at {created}, long after the job ({job_created}), so an earlier one was "
            "deleted, evicted, or lost with its node"
        )
    return ""


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _is_running(status: Object, container: str) -> bool:
    """Whether ``container`` exists and has not ended. Other containers of the pod do not count."""
    statuses = status.get("containerStatuses") or []
    return not container or any(
        each.get("containerID") == container and not each.get("state", {}).get("terminated") for each in statuses
    )


def _describe_end(status: Object, container: str) -> str:
    """``OOMKilled, exit code 137``, ``Evicted: the node was low on memory``, ``exit code 1``."""
    if status.get("reason"):  # of the pod: it was evicted, or its node is gone
        return ": ".join(filter(None, (status["reason"], (status.get("message") or "").strip())))
    ends = [
        ended
        for each in status.get("containerStatuses") or []
        for field in ("state", "lastState")
        if (ended := (each.get(field) or {}).get("terminated"))
    ]
    ended = next((each for each in ends if each.get("containerID") == container), ends[0] if ends else None)
    if ended is None:
        return str(status.get("message") or "its container no longer exists")
    exit_code, reason = f"exit code {ended.get('exitCode')}", ended.get("reason", "")
    return f"{reason}, {exit_code}" if reason not in ("", "Error", "Completed") else exit_code

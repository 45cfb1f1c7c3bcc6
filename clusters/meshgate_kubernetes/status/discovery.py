"""The pods of a mesh by rank, its hosts, and why a container no longer runs. Pure.

As in Monarch, the pod-index label gives the rank. Clusters before 1.28 do not set it, so a StatefulSet's pod falls back
to the ordinal in its name; pods without either (of a Deployment, bare pods) are ranked by name, and keep the rank that
they had once. The pod that replaces one of them may have any name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from meshgate_kubernetes.manifests.spec import MeshSpec, Object

_ORDINAL = re.compile(r"-(\d+)$")
ZONE_LABEL = "topology.kubernetes.io/zone"
CREATED_TOGETHER = timedelta(seconds=60)  # at most between a job and its first gateway, unless a quota delays it
_NEVER = "9999-12-31T00:00:00Z"


@dataclass(frozen=True, slots=True)
class WorkerHost:
    """A ready worker pod and its Monarch address.

    ``zone`` is the pod's own label, which Kubernetes sets from 1.35 on, or ``""``. The label of its node would need a
    permission for all nodes of the cluster.
    """

    name: str
    rank: int
    address: str
    uid: str
    container: str
    """The container ID: a restarted container is another host at the same address."""
    identity: str = ""
    """What the worker derives its Monarch service identity from; see ``_identity``."""
    node: str = ""
    zone: str = ""


Known: TypeAlias = Mapping[int, WorkerHost | None]
"""The hosts that a mesh has had, by rank; None for a lost host."""
_NONE: Known = {}


def pods_by_rank(mesh: MeshSpec, pods: Iterable[Object], known: Known = _NONE) -> dict[int, Object]:
    """The pods of the mesh by rank, without pods that are being deleted and ranks beyond the mesh."""
    live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not _ended(pod)]
    ranks = {pod["metadata"]["name"]: _rank(mesh, pod) for pod in live}
    if any(rank is None for rank in ranks.values()):
        if mesh.way != "selector":
            live = [pod for pod in live if ranks[pod["metadata"]["name"]] is not None]
        else:
            ranks = _ranks_by_name(live, known)
    found: dict[int, Object] = {}
    for pod in live:
        rank = ranks[pod["metadata"]["name"]]
        if rank is not None and (not mesh.replicas or rank < mesh.replicas):
            found[rank] = pod
    return dict(sorted(found.items()))


def _ranks_by_name(pods: Sequence[Object], known: Known) -> dict[str, int | None]:
    """The rank of each pod by its name. ``known`` hosts keep theirs, and the others take those that are free: first the
    ready ones, because a mesh may have fewer hosts than there are pods."""
    kept = {host.uid: rank for rank, host in known.items() if host is not None}
    ranks = {pod["metadata"]["name"]: kept.get(pod["metadata"]["uid"]) for pod in pods}
    taken = set(ranks.values())
    free = (rank for rank in itertools.count() if rank not in taken)
    others = sorted((not is_ready(pod), name) for pod in pods if ranks[name := pod["metadata"]["name"]] is None)
    return ranks | {name: next(free) for _, name in others}


def ready_hosts(mesh: MeshSpec, pods: Iterable[Object], known: Known = _NONE) -> list[WorkerHost] | None:
    """The hosts of the mesh in rank order; None if one is missing or not ready."""
    found = present_hosts(mesh, pods, known)
    complete = found and [host.rank for host in found] == list(range(mesh.replicas or len(found)))
    return found if complete else None


def present_hosts(mesh: MeshSpec, pods: Iterable[Object], known: Known = _NONE) -> list[WorkerHost]:
    """The ready hosts of the mesh, in rank order."""
    return [
        WorkerHost(
            name=pod["metadata"]["name"],
            rank=rank,
            address=_address(pod["status"]["podIP"], _port(mesh, pod)),
            uid=pod["metadata"]["uid"],
            container=container_id(pod, _port(mesh, pod)),
            identity=_identity(pod, rank),
            node=pod["spec"].get("nodeName") or "",
            zone=(pod["metadata"].get("labels") or {}).get(ZONE_LABEL) or "",
        )
        for rank, pod in pods_by_rank(mesh, pods, known).items()
        if is_ready(pod)
    ]


def replacement_hosts(mesh: MeshSpec, known: Known, pods: Iterable[Object]) -> dict[int, WorkerHost]:
    """The ready hosts that replace lost ones, by rank."""
    taken = {(host.uid, host.container) for host in known.values() if host is not None}
    return {
        host.rank: host
        for host in present_hosts(mesh, pods, known)
        if (host.uid, host.container) not in taken and host.rank in known and known[host.rank] is None
    }


def container_id(pod: Object, port: int) -> str:
    """The ID of the container that declares ``port``, or else of the first container; "" before it has started.

    Sidecars therefore do not count.
    """
    containers = pod["spec"]["containers"]
    serving = [
        each["name"] for each in containers if any(_declares(port, declared) for declared in each.get("ports") or [])
    ]
    name = (serving or [containers[0]["name"]])[0]
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((str(each.get("containerID") or "") for each in statuses if each["name"] == name), "")


def _declares(port: int, declared: Object) -> bool:
    return bool(declared.get("containerPort") == port)


def is_ready(pod: Object) -> bool:
    conditions: Sequence[Object] = pod.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _rank(mesh: MeshSpec, pod: Object) -> int | None:
    label = (pod["metadata"].get("labels") or {}).get(mesh.rank_label)
    if label is not None and label.isdecimal():
        return int(label)
    owners = pod["metadata"].get("ownerReferences") or []
    match = _ORDINAL.search(pod["metadata"]["name"])
    if match and any(owner["kind"] == "StatefulSet" for owner in owners):
        return int(match[1])
    return None


def _port(mesh: MeshSpec, pod: Object) -> int:
    """The pod's ``MONARCH_PORT``, or else the port of the mesh."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable["name"] == "MONARCH_PORT" and str(variable.get("value", "")).isdecimal():
                return int(variable["value"])
    return mesh.port


def _identity(pod: Object, rank: int) -> str:
    """What a worker names its Monarch service by, according to its pod's environment; "" if that says nothing.

    Workers follow Monarch's own convention: ``MONARCH_SERVICE_PROC_IDS`` lists the identities by rank; with
    ``MONARCH_POD_UID`` the identity derives from the UID of the pod.
    """
    variables = {each["name"]: each for container in pod["spec"]["containers"] for each in container.get("env") or []}
    listed = variables.get("MONARCH_SERVICE_PROC_IDS", {}).get("value")
    if listed is not None:
        try:
            return str(json.loads(listed)[rank])
        except (ValueError, LookupError, TypeError):
            return ""
    return str(pod["metadata"]["uid"]) if "MONARCH_POD_UID" in variables else ""


def _address(ip: str, port: int) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def termination_reason(pod: Object, uid: str, container: str) -> str | None:
    """Why container ID ``container`` of the pod with ``uid`` has ended; None if it may still run.

    The reason completes a sentence that starts with the pod: ``was replaced``, ``ended: OOMKilled, exit code 137``.
    """
    if pod["metadata"]["uid"] != uid:
        return "was replaced"
    if "deletionTimestamp" in pod["metadata"]:
        return f"is being deleted{_disruption(pod)}"
    status = pod.get("status", {})
    if status.get("phase") not in ("Failed", "Succeeded") and _is_running(status, container):
        return None
    node = pod["spec"].get("nodeName")
    return f"ended: {_describe_end(status, container)}" + (f" (node {node})" if node else "")


def grace_period(pod: Object, container: str) -> float:
    """For how many seconds container ``container`` may run on after the request to delete the pod; 0 without such a
    request, or if it has ended."""
    metadata, status = pod["metadata"], pod.get("status", {})
    if "deletionTimestamp" not in metadata or _ended(pod) or not _is_running(status, container):
        return 0.0
    return float(metadata.get("deletionGracePeriodSeconds") or 0)


def stop_period(pod: Object, container: str, event: Object) -> float:
    """For how many seconds at most container ``container`` may run on after the kubelet's ``event`` of reason Killing.

    0 if that is about another container, or an earlier one of the same name, or if the pod is being deleted.
    """
    if "deletionTimestamp" in pod["metadata"]:
        return 0.0
    when = _time(event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])
    for each in pod.get("status", {}).get("containerStatuses") or []:
        running = each.get("state", {}).get("running") or {}
        about = event["involvedObject"].get("fieldPath") == f"spec.containers{{{each['name']}}}"
        if about and each.get("containerID") == container and _time(running.get("startedAt", _NEVER)) < when:
            return float(pod["spec"].get("terminationGracePeriodSeconds") or 0)
    return 0.0


def _disruption(pod: Object) -> str:
    """`` (EvictionByEvictionAPI: Eviction API: evicting)``: why Kubernetes deletes the pod; "" if it does not say.

    Kubernetes has the condition from 1.26 on: kubernetes.io/docs/concepts/workloads/pods/disruptions.
    """
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            facts = (str(condition.get(key) or "").strip() for key in ("reason", "message"))
            text = ": ".join(filter(None, facts))
            return f" ({text})" if text else ""
    return ""


def restart_reason(pod: Object, container: str, job_created: str) -> str:
    """Why the gateway in container ``container`` of the pod is not the first of its job, as far as the pod shows it; ""
    if it is. ``job_created``: when the job was, as Kubernetes writes it."""
    name = pod["metadata"]["name"]
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ours = [each for each in statuses if each.get("name") == container]
    if ended := next((end for each in ours if (end := (each.get("lastState") or {}).get("terminated"))), None):
        why = _describe_end({"containerStatuses": ours}, ended.get("containerID", ""))
        return f"the container of pod {name} ended at {ended.get('finishedAt')} ({why}) and was started again"
    created = pod["metadata"]["creationTimestamp"]
    if _time(created) - _time(job_created) > CREATED_TOGETHER:
        return (
            f"pod {name} was created at {created}, long after the job ({job_created}), so an earlier one was "
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

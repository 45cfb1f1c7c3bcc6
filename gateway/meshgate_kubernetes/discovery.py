"""Which pods are the hosts of a mesh, in which order. Pure.

The order is Monarch's: rank by the pod-index label. A cluster older than 1.28 does not set that label, so a pod
of a StatefulSet is ranked by its ordinal instead, and pods that have neither (a Deployment's, bare ones) by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshgate_kubernetes.spec import MeshSpec, Object

__all__ = ["Host", "container_id", "is_ready", "present_hosts", "ranked", "ready_hosts", "successors"]

_ORDINAL = re.compile(r"-(\d+)$")
ZONE_LABEL = "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class Host:
    """A ready worker pod, and where Monarch reaches it.

    ``zone`` is the pod's own label, which Kubernetes sets from 1.35 on, or whoever made the pod; "" where nobody has.
    The node's label would need a right on all nodes of the cluster, which a job does not ask for.
    """

    name: str
    rank: int
    address: str
    uid: str
    container: str
    """Which container of the pod: a restarted one is another host, at the same address."""
    node: str = ""
    zone: str = ""


def ranked(mesh: MeshSpec, pods: Iterable[Object]) -> dict[int, Object]:
    """The pods of the mesh by rank. Pods on their way out are not among them, nor ranks beyond the mesh's."""
    living = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not _ended(pod)]
    ranks = {pod["metadata"]["name"]: _rank(mesh, pod) for pod in living}
    if any(rank is None for rank in ranks.values()):
        if mesh.way != "selector":
            living = [pod for pod in living if ranks[pod["metadata"]["name"]] is not None]
        else:
            ranks = dict(zip(sorted(ranks), range(len(ranks)), strict=True))
    found: dict[int, Object] = {}
    for pod in living:
        rank = ranks[pod["metadata"]["name"]]
        if rank is not None and (not mesh.replicas or rank < mesh.replicas):
            found[rank] = pod
    return dict(sorted(found.items()))


def ready_hosts(mesh: MeshSpec, pods: Iterable[Object]) -> list[Host] | None:
    """The hosts of the mesh in rank order, or None while one of them is not there or not ready."""
    found = present_hosts(mesh, pods)
    complete = found and [host.rank for host in found] == list(range(mesh.replicas or len(found)))
    return found if complete else None


def present_hosts(mesh: MeshSpec, pods: Iterable[Object]) -> list[Host]:
    """Those hosts of the mesh that are ready now, in rank order."""
    return [
        Host(
            name=pod["metadata"]["name"],
            rank=rank,
            address=_address(pod["status"]["podIP"], _port(mesh, pod)),
            uid=pod["metadata"]["uid"],
            container=container_id(pod, _port(mesh, pod)),
            node=pod["spec"].get("nodeName") or "",
            zone=(pod["metadata"].get("labels") or {}).get(ZONE_LABEL) or "",
        )
        for rank, pod in ranked(mesh, pods).items()
        if is_ready(pod)
    ]


def successors(mesh: MeshSpec, known: Mapping[int, Host | None], pods: Iterable[Object]) -> dict[int, Host]:
    """For ranks of ``known`` whose host has ended (None), the ready host that has taken its place, where there is one.

    A pod with a rank of its own takes the place of that rank; pods that are ranked by name alone, any.
    """
    pods = list(pods)
    vacant = sorted(rank for rank, host in known.items() if host is None)
    taken = {(host.uid, host.container) for host in known.values() if host is not None}
    new = [host for host in present_hosts(mesh, pods) if (host.uid, host.container) not in taken]
    if any(_rank(mesh, pod) is None for pod in pods):
        return dict(zip(vacant, new, strict=False))
    return {host.rank: host for host in new if host.rank in vacant}


def container_id(pod: Object, port: int) -> str:
    """The container of the pod that serves ``port``, which changes when it is restarted; "" before it has started.

    It is the one that names the port, else the first: sidecars, whoever adds them, come and go without it.
    """
    containers = pod["spec"]["containers"]
    serving = [each["name"] for each in containers if any(_is(port, named) for named in each.get("ports") or [])]
    name = (serving or [containers[0]["name"]])[0]
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((str(each.get("containerID") or "") for each in statuses if each["name"] == name), "")


def _is(port: int, named: Object) -> bool:
    return bool(named.get("containerPort") == port)


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
    """The port that the pod says (Monarch's way: ``MONARCH_PORT``), else the mesh's."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable["name"] == "MONARCH_PORT" and str(variable.get("value", "")).isdecimal():
                return int(variable["value"])
    return mesh.port


def _address(ip: str, port: int) -> str:
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")

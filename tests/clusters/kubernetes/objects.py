"""Small Kubernetes objects as the API server returns them."""

from __future__ import annotations

from typing import Any

from meshgate_kubernetes.manifests.job_objects import statefulset_selector
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, WorkerSpec

Object = dict[str, Any]
STARTED = "2026-01-01T00:00:00Z"


def job(*meshes: MeshSpec, name: str = "trainer", **fields: Any) -> JobSpec:
    return JobSpec(name=name, namespace="team", meshes=meshes or (mesh(),), gateway_image="gateway:1", **fields)


def mesh(name: str = "workers", replicas: int = 2, job: str = "trainer", **worker: Any) -> MeshSpec:
    spec = WorkerSpec(**{"image": "worker:1", **worker})
    return MeshSpec(
        name=name, replicas=replicas, way="statefulset", selector=statefulset_selector(job, name), worker=spec
    )


def found_mesh(replicas: int = 2, selector: str = "app=mine", **fields: Any) -> MeshSpec:
    return MeshSpec(name="workers", replicas=replicas, way="selector", selector=selector, **fields)


def pod(name: str = "trainer-workers-0", *, ready: bool = True, owner: str = "StatefulSet", **status: Any) -> Object:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if ready else "False"},
    ]
    container = {"name": "worker", "containerID": f"containerd://{name}", "state": {"running": {"startedAt": STARTED}}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {}, "ownerReferences": [{"kind": owner}]},
        "spec": {"containers": [{"name": "worker"}], "terminationGracePeriodSeconds": 30},
        "status": {
            "phase": "Running" if ready else "Pending",
            "podIP": "10.0.0.1",
            "conditions": conditions,
            "containerStatuses": [container],
            **status,
        },
    }


def unschedulable(message: str, **requests: str) -> Object:
    made = pod(ready=False)
    made["spec"]["containers"][0]["resources"] = {"requests": {key.replace("_", "."): v for key, v in requests.items()}}
    made["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    }
    return made


def waiting(reason: str, message: str = "", **status: Any) -> Object:
    container = {"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}, **status}
    return pod(ready=False, containerStatuses=[container])


def event(of: Object, reason: str, message: str = "", at: str = "2026-01-01T00:00:01Z", container: str = "") -> Object:
    involved = {"kind": of["kind"], "name": of["metadata"]["name"], "uid": of["metadata"].get("uid")}
    if container:
        involved["fieldPath"] = f"spec.containers{{{container}}}"
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": at}


def node(name: str = "node0", **allocatable: str) -> Object:
    return {
        "metadata": {"name": name},
        "status": {"allocatable": {k.replace("_", "."): v for k, v in allocatable.items()}},
    }

"""A job as Kubernetes objects, in the order to create them. Pure: data in, data out.

One ConfigMap, the *parent*, holds the job's specification and owns all the rest, so that deleting it, in the
foreground, removes everything and is finished only when everything is gone. API versions are those that
Kubernetes 1.20 and today's releases both serve.
"""

from __future__ import annotations

import hashlib

from meshgate_kubernetes.names import (
    COMPONENT_LABEL,
    JOB_LABEL,
    MAX_STATEFUL_SET_NAME,
    MESH_LABEL,
    QUEUE_LABEL,
    Names,
)
from meshgate_kubernetes.pods import GATEWAY_PORT, gateway_template, job_labels, worker_template
from meshgate_kubernetes.selectors import selector_object
from meshgate_kubernetes.spec import JobSpec, MeshSpec, Object

__all__ = [
    "SPEC_KEY",
    "gateway_objects",
    "gateway_rules",
    "mesh_objects",
    "monarch_mesh_name",
    "own_selector",
    "owned_by",
    "parent",
    "token_secret",
]

SPEC_KEY = "job.json"
OWNER_ANNOTATION = "meshgate.dev/asked-for-by"
ATTEMPT_ANNOTATION = "meshgate.dev/attempt"
OPERATOR_SELECTOR = "app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name="
MONARCH_API = "monarch.pytorch.org/v1alpha1"
_RBAC = "rbac.authorization.k8s.io/v1"


def parent(spec: JobSpec, owner: str = "", attempt: str = "") -> Object:
    """The object that owns the job, and tells whoever finds it what the job is, and who asked a gateway for it.

    By ``attempt`` the one who made it knows it again.
    """
    head = _head("v1", "ConfigMap", spec, Names(spec.name).parent, "job")
    if notes := {key: value for key, value in ((OWNER_ANNOTATION, owner), (ATTEMPT_ANNOTATION, attempt)) if value}:
        head["metadata"]["annotations"] = notes
    return {
        **head,
        "data": {SPEC_KEY: spec.model_dump_json(exclude_defaults=True)},
    }


def token_secret(spec: JobSpec, token: str) -> Object:
    return {
        **_head("v1", "Secret", spec, Names(spec.name).secret, "gateway"),
        "type": "Opaque",
        "stringData": {"token": token},
    }


def owned_by(owner: Object, objects: list[Object]) -> list[Object]:
    """``objects`` with an owner reference to ``owner``, as the API server returned that."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        # Holds the owner back, in a foreground deletion, until this object is gone.
        "blockOwnerDeletion": True,
    }
    return [{**each, "metadata": {**each["metadata"], "ownerReferences": [reference]}} for each in objects]


def gateway_objects(spec: JobSpec) -> list[Object]:
    """The gateway of the job's own: account, rights, pod, address, and who may reach it."""
    names = Names(spec.name)
    gateway = {JOB_LABEL: spec.name, COMPONENT_LABEL: "gateway"}
    return [
        {**_head("v1", "ServiceAccount", spec, names.gateway, "gateway"), "automountServiceAccountToken": True},
        {**_head(_RBAC, "Role", spec, names.gateway, "gateway"), "rules": gateway_rules(names)},
        {
            **_head(_RBAC, "RoleBinding", spec, names.gateway, "gateway"),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.gateway},
            "subjects": [{"kind": "ServiceAccount", "name": names.gateway, "namespace": spec.namespace}],
        },
        _gateway_policy(spec, gateway),
        {
            **_head("v1", "Service", spec, names.gateway, "gateway"),
            "spec": {
                "selector": gateway,
                "ports": [{"name": "gateway", "port": GATEWAY_PORT, "targetPort": "gateway", "protocol": "TCP"}],
            },
        },
        {
            **_head("apps/v1", "Deployment", spec, names.gateway, "gateway"),
            "spec": {
                "replicas": 1,
                # A second gateway beside the first would answer for sessions that it does not hold.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": gateway},
                "template": gateway_template(spec),
            },
        },
    ]


def gateway_rules(names: Names) -> list[Object]:
    """The least that serves: see the workers and why they fail, read the job, and end it when it is idle."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.parent],
            "verbs": ["get", "delete"],
        },
    ]


def _gateway_policy(spec: JobSpec, gateway: dict[str, str]) -> Object:
    """From outside only the gateway's port; from the job's own pods all of them, as Monarch's processes call
    back to the engine on ports they agree on."""
    sources: list[Object] = [{"podSelector": {"matchLabels": {JOB_LABEL: spec.name}}}]
    for mesh in spec.meshes:
        if mesh.way != "statefulset":
            sources.append({"podSelector": selector_object(mesh.selector)})
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", spec, Names(spec.name).gateway, "gateway"),
        "spec": {
            "podSelector": {"matchLabels": gateway},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]},
                {"from": sources},
            ],
        },
    }


def mesh_objects(spec: JobSpec, mesh: MeshSpec) -> list[Object]:
    """The objects of one mesh; none for pods that exist already."""
    if mesh.way == "selector":
        return []
    policy = _worker_policy(spec, mesh)
    if mesh.way == "monarchmesh":
        return [policy, _monarch_mesh(spec, mesh)]
    return [policy, _headless_service(spec, mesh), _stateful_set(spec, mesh)]


def own_selector(job: str, mesh: str) -> str:
    """The selector of the pods of a mesh in a StatefulSet of ours."""
    return f"{JOB_LABEL}={job},{MESH_LABEL}={mesh}"


def monarch_mesh_name(job: str, mesh: str) -> str:
    """The MonarchMesh of a mesh. Its CRD takes lower-case letters and digits alone, so hyphens go, and twelve
    hexadecimal digits keep jobs apart that differ in those only: so many that nobody finds a job's name whose network
    policies would open the pods of another."""
    digest = hashlib.sha256(f"{job}/{mesh}".encode()).hexdigest()[:12]
    stem = f"{job.replace('-', '')}{mesh}"[: MAX_STATEFUL_SET_NAME - len(digest)]
    return f"{stem}{digest}"


def _worker_policy(spec: JobSpec, mesh: MeshSpec) -> Object:
    """Only the job's own pods reach its workers: whoever reaches a Monarch port runs code there.

    Every mesh has one of its own, because a MonarchMesh's pods are known by other labels than ours.
    """
    sources: list[Object] = [{"podSelector": {"matchLabels": {JOB_LABEL: spec.name}}}]
    sources.extend({"podSelector": selector_object(each.selector)} for each in spec.meshes if each.way != "statefulset")
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", spec, f"{Names(spec.name).workers}-{mesh.name}", "worker"),
        "spec": {
            "podSelector": selector_object(mesh.selector),
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources}],
        },
    }


def _headless_service(spec: JobSpec, mesh: MeshSpec) -> Object:
    return {
        **_head("v1", "Service", spec, Names(spec.name).mesh(mesh.name), "worker"),
        "spec": {
            "clusterIP": "None",
            # Workers must find each other before they are ready, or none ever is.
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: spec.name, MESH_LABEL: mesh.name},
            "ports": [{"name": "monarch", "port": mesh.port, "protocol": "TCP"}],
        },
    }


def _stateful_set(spec: JobSpec, mesh: MeshSpec) -> Object:
    name = Names(spec.name).mesh(mesh.name)
    return _annotated(
        mesh,
        {
            **_head("apps/v1", "StatefulSet", spec, name, "worker"),
            "spec": {
                "replicas": mesh.replicas,
                "serviceName": name,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {JOB_LABEL: spec.name, MESH_LABEL: mesh.name}},
                "template": worker_template(spec, mesh),
            },
        },
    )


def _monarch_mesh(spec: JobSpec, mesh: MeshSpec) -> Object:
    return _annotated(
        mesh,
        {
            **_head(MONARCH_API, "MonarchMesh", spec, monarch_mesh_name(spec.name, mesh.name), "worker"),
            "spec": {"replicas": mesh.replicas, "port": mesh.port, "podTemplate": worker_template(spec, mesh)},
        },
    )


def _annotated(mesh: MeshSpec, controller: Object) -> Object:
    """The controller object with the user's labels (Kueue's among them) and annotations, which never replace ours."""
    metadata = controller["metadata"]
    queue = mesh.worker.queue_name if mesh.worker is not None else None
    labels = {**mesh.labels, **({QUEUE_LABEL: queue} if queue else {}), MESH_LABEL: mesh.name, **metadata["labels"]}
    annotations = {"annotations": dict(mesh.annotations)} if mesh.annotations else {}
    return {**controller, "metadata": {**metadata, "labels": labels, **annotations}}


def _head(api_version: str, kind: str, spec: JobSpec, name: str, component: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": spec.namespace, "labels": job_labels(spec, component)},
    }

"""The Kubernetes objects of a job, in creation order. Pure.

One ConfigMap, the *parent*, stores the job's specification and owns all other objects, so that a foreground deletion of
the parent finishes only when all of them are gone. The API versions are served by Kubernetes 1.20 and all later
releases so far, except for those with an entry in ``OLDER_VERSIONS``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

from meshgate_kubernetes.manifests.names import (
    COMPONENT_LABEL,
    FORWARDER,
    GATEWAY,
    JOB_LABEL,
    MAX_STATEFUL_SET_NAME,
    MESH_LABEL,
    QUEUE_LABEL,
    Names,
    selector_object,
)
from meshgate_kubernetes.manifests.pods import (
    GATEWAY_PORT,
    METRICS_PORT,
    PACKED_WHEEL,
    gateway_template,
    job_labels,
    recommended_labels,
    worker_template,
)
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, Object
from meshgate_wire.proof import engines_key

SPEC_KEY = "job.json"
SIZE_KEY = "hosts."  # then the name of a mesh: how many hosts it has been scaled to
OPTIONAL_KINDS = frozenset({"PodDisruptionBudget"})  # a job works without; some users may not create them
OLDER_VERSIONS = {"PodDisruptionBudget": "policy/v1beta1"}  # Kubernetes 1.20
OWNER_ANNOTATION = "meshgate.dev/asked-for-by"
GROUPS_ANNOTATION = "meshgate.dev/shared-with-groups"  # JSON: names of groups may contain any character
ATTEMPT_ANNOTATION = "meshgate.dev/attempt"
CHANGE_ANNOTATION = "meshgate.dev/changing"  # ``workers=4 ID``: what a mesh is being scaled to, and by which change
OPERATOR_SELECTOR = "app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name="
MONARCH_API = "monarch.pytorch.org/v1alpha1"
_RBAC = "rbac.authorization.k8s.io/v1"
# Of the gateway's Role. A job works without, and some users may not grant it.
EVENTS_RULE: Object = {"apiGroups": [""], "resources": ["events"], "verbs": ["list", "watch"]}


def parent(spec: JobSpec, owner: str = "", attempt: str = "", groups: Sequence[str] = ()) -> Object:
    """The object that owns all others and stores the specification of the job, its ``owner``, and the ``groups`` that
    the owner shares it with.

    ``attempt`` lets its creator recognize it.
    """
    head = _head("v1", "ConfigMap", spec, Names(spec.name).parent, "job")
    shared = json.dumps(sorted(groups)) if groups else ""
    notes = {OWNER_ANNOTATION: owner, GROUPS_ANNOTATION: shared, ATTEMPT_ANNOTATION: attempt}
    if given := {key: value for key, value in notes.items() if value}:
        head["metadata"]["annotations"] = given
    return {
        **head,
        "data": {SPEC_KEY: spec.model_dump_json(exclude_defaults=True)},
    }


def asked_spec(parent: Object) -> JobSpec:
    """The specification that the creator of the job asked for. Raises ValueError if another version of meshgate did."""
    return JobSpec.model_validate_json((parent.get("data") or {}).get(SPEC_KEY, ""))


def sizes_data(sizes: Mapping[str, int]) -> dict[str, str]:
    """What the data of the parent says of meshes that have been scaled to ``sizes``."""
    return {f"{SIZE_KEY}{mesh}": str(hosts) for mesh, hosts in sizes.items()}


def sizes_of(parent: Object) -> dict[str, int]:
    """The numbers of hosts of meshes that have been scaled."""
    data = parent.get("data") or {}
    return {key.removeprefix(SIZE_KEY): int(hosts) for key, hosts in data.items() if key.startswith(SIZE_KEY)}


def current_spec(parent: Object) -> JobSpec:
    """As ``asked_spec``, with the numbers of hosts that the meshes have been scaled to."""
    return with_sizes(asked_spec(parent), sizes_of(parent))


def with_sizes(spec: JobSpec, sizes: Mapping[str, int]) -> JobSpec:
    """``spec`` with these numbers of hosts."""
    meshes = (each.model_copy(update={"replicas": sizes.get(each.name, each.replicas)}) for each in spec.meshes)
    return spec.model_copy(update={"meshes": tuple(meshes)})


def token_secret(spec: JobSpec, token: str) -> Object:
    return {
        **_head("v1", "Secret", spec, Names(spec.name).secret, "gateway"),
        "type": "Opaque",
        "stringData": {"token": token, **({} if GATEWAY in spec.gateway_pods else {"key": engines_key(token)})},
    }


def wheel_secret(spec: JobSpec, packed: bytes) -> Object:
    """A Secret and no ConfigMap: a client that waits for the job watches its ConfigMaps, with all their data."""
    return {
        **_head("v1", "Secret", spec, Names(spec.name).wheel, "gateway"),
        "type": "Opaque",
        "data": {PACKED_WHEEL: base64.b64encode(packed).decode()},
    }


def owned_by(owner: Object, objects: list[Object]) -> list[Object]:
    """``objects`` with an owner reference to ``owner``, as the API server returned that."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        # In a foreground deletion the owner stays until this object is gone.
        "blockOwnerDeletion": True,
    }
    return [{**each, "metadata": {**each["metadata"], "ownerReferences": [reference]}} for each in objects]


def gateway_objects(spec: JobSpec) -> list[Object]:
    """The objects of the job's gateway."""
    names = Names(spec.name)
    entrance = next(iter(spec.gateway_pods))
    return [
        *(_gateway_account(spec) if spec.gateway.service_account_name is None else ()),
        *(_gateway_policy(spec, component) for component in spec.gateway_pods),
        {
            **_head("v1", "Service", spec, names.gateway, "gateway"),
            "spec": {
                "selector": component_labels(spec, entrance),
                "ports": [
                    {
                        "name": "gateway",
                        "port": GATEWAY_PORT,
                        "targetPort": "gateway",
                        "protocol": "TCP",
                        "appProtocol": "kubernetes.io/ws",  # routes of the Gateway API upgrade websockets by it
                    }
                ],
            },
        },
        *(obj for component, replicas in spec.gateway_pods.items() for obj in _deployed(spec, component, replicas)),
    ]


def component_labels(spec: JobSpec, component: str) -> dict[str, str]:
    return {JOB_LABEL: spec.name, COMPONENT_LABEL: component}


def _deployed(spec: JobSpec, component: str, replicas: int) -> list[Object]:
    """A Deployment, and how many of its pods may be evicted at a time."""
    name, selector = Names(spec.name).deployment(component), {"matchLabels": component_labels(spec, component)}
    # Two pods with engines at once would receive connections for each other's sessions, and the end of one is the end
    # of every session, so a drain of its node waits. Gateways that forward are replaced one after the other.
    forwards = component == FORWARDER
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    return [
        {
            **_head("apps/v1", "Deployment", spec, name, component),
            "spec": {
                "replicas": replicas,
                "strategy": rolling if forwards else {"type": "Recreate"},
                "selector": selector,
                "template": gateway_template(spec, component),
            },
        },
        {
            **_head("policy/v1", "PodDisruptionBudget", spec, name, component),
            "spec": {"maxUnavailable": 1 if forwards else 0, "selector": selector},
        },
    ]


def _gateway_account(spec: JobSpec) -> list[Object]:
    """The gateway's own ServiceAccount and its permissions."""
    names = Names(spec.name)
    return [
        {**_head("v1", "ServiceAccount", spec, names.gateway, "gateway"), "automountServiceAccountToken": True},
        {**_head(_RBAC, "Role", spec, names.gateway, "gateway"), "rules": gateway_rules(names)},
        {
            **_head(_RBAC, "RoleBinding", spec, names.gateway, "gateway"),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.gateway},
            "subjects": [{"kind": "ServiceAccount", "name": names.gateway, "namespace": spec.namespace}],
        },
    ]


def gateway_rules(names: Names) -> list[Object]:
    """The minimal permissions: watch the workers, and what kubelets do with them, read the job, and delete it when
    idle."""
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.parent],
            "verbs": ["get", "delete"],
        },
        EVENTS_RULE,
    ]


def _gateway_policy(spec: JobSpec, component: str) -> Object:
    """Admits everyone to the gateway's port and its metrics, and the job's own pods to all ports, because Monarch's
    processes connect to the engine on dynamic ports. Only gateways that forward connect to that of the engines' pod."""
    ports = {GATEWAY: [GATEWAY_PORT, METRICS_PORT], FORWARDER: [GATEWAY_PORT]}.get(component, [METRICS_PORT])
    admitted: list[Object] = [{"ports": [{"port": port, "protocol": "TCP"} for port in ports]}]
    sources: list[Object] = [{"podSelector": {"matchLabels": {JOB_LABEL: spec.name}}}]
    for mesh in spec.meshes:
        if mesh.way != "statefulset":
            sources.append({"podSelector": selector_object(mesh.selector)})
    return {
        **_head("networking.k8s.io/v1", "NetworkPolicy", spec, Names(spec.name).deployment(component), component),
        "spec": {
            "podSelector": {"matchLabels": component_labels(spec, component)},
            "policyTypes": ["Ingress"],
            "ingress": admitted if component == FORWARDER else [*admitted, {"from": sources}],
        },
    }


def mesh_objects(spec: JobSpec, mesh: MeshSpec) -> list[Object]:
    """The objects of a mesh; none for existing pods."""
    if mesh.way == "selector":
        return []
    policy = _worker_policy(spec, mesh)
    if mesh.way == "monarchmesh":
        return [policy, _monarch_mesh(spec, mesh)]
    return [policy, _headless_service(spec, mesh), _stateful_set(spec, mesh)]


def statefulset_selector(job: str, mesh: str) -> str:
    """The selector of the pods of a mesh that a StatefulSet creates."""
    return f"{JOB_LABEL}={job},{MESH_LABEL}={mesh}"


def monarch_mesh_name(job: str, mesh: str) -> str:
    """The name of a mesh's MonarchMesh. Its CRD allows only lower-case letters and digits, so hyphens are removed.

    Twelve hexadecimal digits of a hash distinguish names that differ only in hyphens. That many make it infeasible to
    choose a job name that collides with another job's, whose network policies it would then share.
    """
    digest = hashlib.sha256(f"{job}/{mesh}".encode()).hexdigest()[:12]
    stem = f"{job.replace('-', '')}{mesh}"[: MAX_STATEFUL_SET_NAME - len(digest)]
    return f"{stem}{digest}"


def _worker_policy(spec: JobSpec, mesh: MeshSpec) -> Object:
    """Admits only the job's own pods to its workers, because a Monarch port runs any code sent to it.

    Each mesh has its own policy, because the pods of a MonarchMesh have other labels.
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
            # Workers must resolve each other before they are ready, or none ever becomes ready.
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: spec.name, MESH_LABEL: mesh.name},
            "ports": [{"name": "monarch", "port": mesh.port, "protocol": "TCP"}],
        },
    }


def _stateful_set(spec: JobSpec, mesh: MeshSpec) -> Object:
    name = Names(spec.name).mesh(mesh.name)
    return _annotated(
        spec,
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
        spec,
        mesh,
        {
            **_head(MONARCH_API, "MonarchMesh", spec, monarch_mesh_name(spec.name, mesh.name), "worker"),
            "spec": {"replicas": mesh.replicas, "port": mesh.port, "podTemplate": worker_template(spec, mesh)},
        },
    )


def _annotated(spec: JobSpec, mesh: MeshSpec, controller: Object) -> Object:
    """The controller with the user's labels, its queue label and annotations. They never override meshgate's labels."""
    metadata = controller["metadata"]
    queue = mesh.worker.queue_name if mesh.worker is not None else None
    own = {**({QUEUE_LABEL: queue} if queue else {}), MESH_LABEL: mesh.name, **job_labels(spec, "worker")}
    labels = {**metadata["labels"], **mesh.labels, **own}
    annotations = {"annotations": dict(mesh.annotations)} if mesh.annotations else {}
    return {**controller, "metadata": {**metadata, "labels": labels, **annotations}}


def _head(api_version: str, kind: str, spec: JobSpec, name: str, component: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": spec.namespace,
            "labels": {**recommended_labels(spec), **job_labels(spec, component)},
        },
    }

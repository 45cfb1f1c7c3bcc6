"""The operator's policy for jobs that a gateway creates for others, and the check of a job against it.

A provisioning gateway has permissions that its callers lack, so it rejects everything that the policy does not allow:
above all what would give a pod further permissions (other service accounts, host paths, privileges, raw pod
specifications), and what would let a job reach the pods of another, since a Monarch port runs any code sent to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from meshgate_gateway.provisioning.refusals import listed, matches, not_allowed, read_policy_file, session_violations
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs.lifecycle import ListedJob
from meshgate_kubernetes.manifests.names import JOB_LABEL, is_label_key, is_label_value
from meshgate_kubernetes.manifests.spec import (
    GPU_RESOURCE,
    GPU_TYPE_LABEL,
    GatewaySpec,
    JobSpec,
    MeshSpec,
    Quantity,
    VolumeMount,
    WorkerSpec,
    parse_quantity,
)

_ORDINARY_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage", GPU_RESOURCE})
# meshgate, the MonarchMesh operator and network policies identify the pods of a job by labels with these prefixes.
_RESERVED_PREFIXES = ("meshgate.dev/", "monarch.pytorch.org/")
_NOT_OF_A_JOB = f"!{JOB_LABEL}"
ALL_NAMESPACES = ""
_PATTERN_CHARACTERS = frozenset("*?[")


class Policy(BaseModel):
    """Patterns are shell patterns such as ``team-*``; for labels, patterns of ``key=value``. An empty list allows
    nothing, unless its comment says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    callers: tuple[str, ...] = ()
    """Names and groups of Kubernetes identities that may create jobs without permissions of their own, such as
    ``system:serviceaccount:training:*`` or ``system:serviceaccounts:training``."""
    sharing_groups: tuple[str, ...] = ()
    """Groups of Kubernetes identities whose members use, scale and end each other's jobs, such as
    ``system:serviceaccounts:training``. A job is shared with those of its owner's groups that this names when it is
    created."""
    submitters: tuple[str, ...] = ("*",)
    """Names and groups of Kubernetes identities that may submit programs to the jobs that they may use. The programs
    run in the pods of the jobs' gateways, with the service accounts of those. Whoever may use a job may stop its
    runs."""
    namespaces: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    """Prefixes of image references, such as ``ghcr.io/our-team/``."""
    gateway_image: str = Field(min_length=1)
    """The image of the jobs' gateways, regardless of the request."""
    max_replicas: int = Field(default=16, ge=1)
    """Maximum number of pods of a job, over all meshes, also after it has grown."""
    max_jobs_per_caller: int | None = Field(default=None, ge=1)
    """Maximum number of jobs of one caller at a time, over all namespaces; None: unlimited."""
    max_gpus_per_caller: int | None = Field(default=None, ge=0)
    """Maximum number of GPUs of all jobs of one caller, over all namespaces; None: unlimited."""
    max_per_pod: dict[str, Quantity] = {}
    """Maximum amount of each resource per pod, by name or pattern: each limit that matches applies. If none does, cpu,
    memory, ephemeral-storage and GPUs are unlimited and other resources are not allowed."""
    max_idle: int = Field(default=86_400, ge=1)
    """Maximum idle timeout of a job, in seconds."""
    max_lease: int = Field(default=86_400, ge=1)
    """Maximum lease of a job's sessions, in seconds."""
    selectors: tuple[str, ...] = ()
    """Labels of existing pods that a job may use, such as ``app=trainers-*``. A selector must contain one of them. Any
    caller that may create jobs can run code in these pods. Pods that were created for a job are always excluded."""
    secrets: tuple[str, ...] = ()
    """Do not use ``*``: the token of every job is a Secret ``<job>-token``."""
    service_accounts: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    """Names of PersistentVolumeClaims. Of other volume types only emptyDir is allowed."""
    priority_classes: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    """Kueue queues."""
    tolerations: tuple[str, ...] = ()
    """Keys of taints."""
    node_labels: tuple[str, ...] = ()
    """Node labels for node selectors and ``gpu_type``, such as ``nvidia.com/gpu.product=*``."""
    labels: tuple[str, ...] = ()
    """Labels of pods and their controllers. Services and network policies select pods by label."""
    annotations: tuple[str, ...] = ()
    """Keys of annotations. Other controllers, such as sidecar injectors, act on annotations."""


class PolicyViolation(KubernetesError):
    """The operator's policy does not allow the job."""


def read_policy(path: Path) -> Policy:
    """Raises ValueError if the file cannot be read or is invalid."""
    return read_policy_file(path, Policy)


def apply_policy(policy: Policy, job: JobSpec) -> JobSpec:
    """``job`` with the policy's gateway image, in which nothing is installed, with one pod behind this gateway, which
    forwards to it and may be replaced at any time, and with selectors that never match a pod that was created for a
    job, whatever labels that job gives its pods."""
    meshes = tuple(
        mesh.model_copy(update={"selector": f"{mesh.selector},{_NOT_OF_A_JOB}"}) if mesh.way == "selector" else mesh
        for mesh in job.meshes
    )
    ready = job.gateway.model_copy(update={"replicas": 1, "install_monarch": False, "env_vars": {}, "secrets": ()})
    return job.model_copy(update={"gateway_image": policy.gateway_image, "gateway": ready, "meshes": meshes})


def violations(policy: Policy, job: JobSpec) -> list[str]:
    """Everything in the requested job that the policy does not allow, each as a clause.

    The selectors of pods to be created are not checked: ``lifecycle.resolve`` replaces them.
    """
    return list(_violations(policy, job))


def growth_violations(policy: Policy, job: JobSpec, mesh: MeshSpec) -> list[str]:
    """Everything that the policy does not allow in ``job`` with more hosts in ``mesh``, which the job itself creates.
    The policy may have changed since the job was created."""
    problems = (f"mesh {mesh.name!r}: {problem}" for problem in _mesh_violations(policy, mesh))
    return [*_place_and_size_violations(policy, job), *problems]


def _place_and_size_violations(policy: Policy, job: JobSpec) -> Iterator[str]:
    if not matches(job.namespace, policy.namespaces):
        yield f"namespace {job.namespace!r} is not allowed (allowed: {listed(policy.namespaces)})"
    pods = sum(mesh.replicas for mesh in job.meshes)
    if pods > policy.max_replicas:
        yield f"{pods} pods exceed the limit of {policy.max_replicas}"


def _violations(policy: Policy, job: JobSpec) -> Iterator[str]:
    yield from _place_and_size_violations(policy, job)
    yield from session_violations(policy, job.idle_timeout, job.lease)
    yield from not_allowed("image pull secret", job.image_pull_secrets, policy.image_pull_secrets)
    yield from (f"gateway: {problem}" for problem in _gateway_violations(policy, job.gateway))
    for mesh in job.meshes:
        for problem in _mesh_violations(policy, mesh):
            yield f"mesh {mesh.name!r}: {problem}"


def _mesh_violations(policy: Policy, mesh: MeshSpec) -> Iterator[str]:
    yield from _label_violations(mesh.labels, policy.labels)
    yield from not_allowed("annotation", mesh.annotations, policy.annotations)
    if mesh.worker is not None:
        yield from _worker_violations(policy, mesh.worker)
        return
    labels = _equalities(mesh.selector)
    if labels is None:
        yield f"selector {mesh.selector!r} is not allowed: use only key=value terms"
    elif own := [key for key in labels if key.startswith(_RESERVED_PREFIXES)]:
        yield f"selector {mesh.selector!r} uses {own[0]}: a job cannot use the pods of another job"
    elif not any(matches(label, policy.selectors) for label in _as_text(labels)):
        yield f"selector {mesh.selector!r} needs an allowed label (allowed: {listed(policy.selectors)})"


def _worker_violations(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    if not any(worker.image.startswith(prefix) for prefix in policy.images):
        yield f"image {worker.image!r} is not allowed (allowed prefixes: {listed(policy.images)})"
    if worker.template is not None or worker.pod_spec:
        yield "a raw pod specification (pod_spec) is not allowed"
    if worker.fuse:
        yield "a privileged pod (fuse) is not allowed"
    yield from not_allowed("secret", worker.secrets, policy.secrets)
    yield from not_allowed("image pull secret", worker.image_pull_secrets, policy.image_pull_secrets)
    yield from not_allowed("queue", _optional(worker.queue_name), policy.queues)
    yield from _pod_violations(policy, worker, _node_labels(worker))
    for volume in worker.volumes:
        yield from _volume_violations(policy, volume)
    yield from _resource_violations(policy, worker)


def _pod_violations(policy: Policy, pod: WorkerSpec | GatewaySpec, node_labels: Mapping[str, str]) -> Iterator[str]:
    yield from not_allowed("service account", _optional(pod.service_account_name), policy.service_accounts)
    yield from not_allowed("priority class", _optional(pod.priority_class_name), policy.priority_classes)
    # A toleration without a key tolerates every taint.
    taints = [str(each.get("key") or "") for each in pod.tolerations]
    yield from not_allowed("toleration", taints, policy.tolerations)
    yield from not_allowed("node label", _as_text(node_labels), policy.node_labels)
    yield from _label_violations(pod.labels, policy.labels)
    yield from not_allowed("annotation", pod.annotations, policy.annotations)


def _gateway_violations(policy: Policy, gateway: GatewaySpec) -> Iterator[str]:
    # Clients add this toleration themselves; it does not give the gateway a GPU.
    tolerations = tuple(each for each in gateway.tolerations if each.get("key") != GPU_RESOURCE)
    checked = gateway.model_copy(update={"tolerations": tolerations})
    yield from _pod_violations(policy, checked, gateway.node_selector)
    for resource, amount in (
        ("cpu", gateway.cpu),
        ("memory", gateway.memory),
        ("ephemeral-storage", gateway.disk_size),
    ):
        if amount:
            yield from _too_much(policy, resource, amount)


def _volume_violations(policy: Policy, volume: VolumeMount) -> Iterator[str]:
    if foreign := set(volume.source) - {"persistentVolumeClaim", "emptyDir"}:
        yield f"volume type {', '.join(sorted(foreign))} is not allowed"
    if (claim := volume.source.get("persistentVolumeClaim")) is not None:
        name = claim.get("claimName", "") if isinstance(claim, dict) else claim
        yield from not_allowed("claim", [str(name)], policy.claims)


def _label_violations(labels: Mapping[str, str], allowed: tuple[str, ...]) -> Iterator[str]:
    own = [key for key in labels if key.startswith(_RESERVED_PREFIXES)]
    yield from (f"label {key!r} is reserved" for key in own)
    yield from not_allowed("label", _as_text({key: labels[key] for key in labels if key not in own}), allowed)


def _node_labels(worker: WorkerSpec) -> dict[str, str]:
    labels = dict(worker.node_selector)
    if worker.gpu_type is not None:
        key, equals, value = worker.gpu_type.partition("=")
        labels.setdefault(*((key, value) if equals else (GPU_TYPE_LABEL, worker.gpu_type)))
    return labels


def _resource_violations(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    requested: dict[str, str | None] = {
        "cpu": worker.cpu,
        "memory": worker.memory,
        "ephemeral-storage": worker.disk_size,
        GPU_RESOURCE: str(worker.gpus) if worker.gpus else None,
        **worker.resources,
    }
    others = [resource for resource in requested if resource not in _ORDINARY_RESOURCES]
    yield from not_allowed("resource", others, tuple(policy.max_per_pod))
    for resource, amount in requested.items():
        if amount is not None:
            yield from _too_much(policy, resource, amount)
        elif resource in ("cpu", "memory"):
            yield from (f"{resource} must be set, to at most {limit} per pod" for limit in _limits(policy, resource))


def _too_much(policy: Policy, resource: str, amount: str) -> Iterator[str]:
    for limit in _limits(policy, resource):
        if parse_quantity(amount) > parse_quantity(limit):
            yield f"{amount} of {resource} exceeds the limit of {limit} per pod"


def _limits(policy: Policy, resource: str) -> list[str]:
    return [limit for pattern, limit in policy.max_per_pod.items() if matches(resource, (pattern,))]


def _equalities(selector: str) -> dict[str, str] | None:
    """The labels of a selector that consists only of ``key=value`` terms; None for any other."""
    labels: dict[str, str] = {}
    for term in selector.split(","):
        key, equals, value = (part.strip() for part in term.replace("==", "=", 1).partition("="))
        if not equals or not is_label_key(key) or not is_label_value(value):
            return None
        labels[key] = value
    return labels


def _optional(value: str | None) -> list[str]:
    return [] if value is None else [value]


def _as_text(labels: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in labels.items()]


def counted_namespaces(policy: Policy, namespace: str) -> list[str]:
    """Where jobs must be counted before one is created in ``namespace``: nowhere without limits per caller, and in all
    namespaces if the policy has patterns of namespaces."""
    if policy.max_jobs_per_caller is None and policy.max_gpus_per_caller is None:
        return []
    return searched_namespaces(policy, namespace)


def searched_namespaces(policy: Policy, *others: str) -> list[str]:
    """Where jobs can be that the policy allows, and ``others``: in all namespaces if it has patterns of namespaces."""
    if any(_PATTERN_CHARACTERS & set(allowed) for allowed in policy.namespaces):
        return [ALL_NAMESPACES]
    return sorted({*policy.namespaces, *others})


def exceeded_quota(policy: Policy, job: JobSpec, owner: str, existing: Iterable[ListedJob]) -> str | None:
    """Why ``owner`` may not have ``job`` in addition to its ``existing`` jobs, which may include it; None if it may."""
    others = _other_jobs(job, owner, existing)
    limit = policy.max_jobs_per_caller
    if limit is not None and len(others) + 1 > limit:
        return f"{owner} has {_names(others)}, and the limit per caller is {limit} {_jobs(limit)}: end one first"
    return exceeded_gpus(policy, job, owner, others)


def exceeded_gpus(policy: Policy, job: JobSpec, owner: str, existing: Iterable[ListedJob]) -> str | None:
    """As ``exceeded_quota``, for GPUs alone."""
    limit, others = policy.max_gpus_per_caller, _other_jobs(job, owner, existing)
    if limit is None or not job.gpu_count:
        return None
    if unknown := [f"{each.namespace}/{each.name}" for each in others if each.gpus is None]:
        return f"the GPUs of {unknown[0]}, which another version of meshgate created, cannot be counted: end it first"
    used = sum(each.gpus or 0 for each in others)
    if used + job.gpu_count > limit:
        has = f"has {used} in {_names(others)}" if used else "has none yet"
        return f"{owner} asks for {job.gpu_count} GPUs and {has}, and the limit per caller is {limit}"
    return None


def _other_jobs(job: JobSpec, owner: str, existing: Iterable[ListedJob]) -> list[ListedJob]:
    this = (job.name, job.namespace)
    return [each for each in existing if each.owner == owner and (each.name, each.namespace) != this]


def _names(jobs: Iterable[ListedJob]) -> str:
    return ", ".join(sorted(f"{each.namespace}/{each.name}" for each in jobs))


def _jobs(count: int) -> str:
    return "job" if count == 1 else "jobs"

"""What a gateway provisions for others: the operator's policy, and how a job fares against it. Pure.

A gateway that provisions holds rights that its callers have not, so whatever the policy does not allow is refused,
above all what would let a pod borrow more of them: other service accounts, the host's files, privileges, raw pods;
and what would let a job into the pods of another, to whose Monarch port whoever reaches it may send code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate_kubernetes.names import JOB_LABEL, is_label_key, is_label_value
from meshgate_kubernetes.quantity import parse_quantity
from meshgate_kubernetes.spec import GPU_RESOURCE, GPU_TYPE_LABEL, JobSpec, MeshSpec, Quantity, VolumeMount, WorkerSpec

__all__ = ["Policy", "as_made_for_others", "read_policy", "violations"]

_ORDINARY_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage", GPU_RESOURCE})
# By these meshgate and the MonarchMesh operator know whose pod it is, and network policies whom to admit.
_IDENTIFYING = ("meshgate.dev/", "monarch.pytorch.org/")
_NO_JOBS_POD = f"!{JOB_LABEL}"


class Policy(BaseModel):
    """Patterns are shell-like: ``team-*``. An empty list allows nothing, unless its comment says otherwise.

    A list of labels has patterns of ``key=value``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    callers: tuple[str, ...] = ()
    """Names and groups of Kubernetes identities that may ask without a right of their own, such as
    ``system:serviceaccount:training:*`` or ``system:serviceaccounts:training``."""
    namespaces: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    """Beginnings of image references, such as ``ghcr.io/our-team/``."""
    gateway_image: str = Field(min_length=1)
    """What the gateways of the jobs run, whatever is asked for."""
    max_replicas: int = Field(default=16, ge=1)
    """Pods of one job, all meshes together."""
    max_per_pod: dict[str, Quantity] = {}
    """The most of each resource that a pod may have. Of cpu, memory, ephemeral-storage and GPUs, where they are not
    listed, any amount; of any other resource none."""
    max_idle: int = Field(default=86_400, ge=1)
    """Seconds: the longest a job may wait for its next session."""
    max_lease: int = Field(default=86_400, ge=1)
    """Seconds: the longest a session may wait for its program, and the job with it."""
    selectors: tuple[str, ...] = ()
    """Labels of existing pods that a job may run on, such as ``app=trainers-*``: whoever may have a job made runs code
    in these. One of them must be in the selector. Pods that were made for a job are never among them."""
    secrets: tuple[str, ...] = ()
    """Beware of ``*``: the token of every job is a Secret ``<job>-token``."""
    service_accounts: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    """Names of PersistentVolumeClaims. Of other volumes emptyDir is allowed, and nothing else."""
    priority_classes: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    """Of Kueue: what ``queue_name`` may be."""
    tolerations: tuple[str, ...] = ()
    """Keys of taints."""
    node_labels: tuple[str, ...] = ()
    """Labels by which nodes may be chosen, a ``gpu_type`` among them: ``nvidia.com/gpu.product=*``."""
    labels: tuple[str, ...] = ()
    """Labels of pods and what controls them. By labels Services and network policies take pods for their own."""
    annotations: tuple[str, ...] = ()
    """Keys of annotations. By annotations other controllers, such as injectors of sidecars, change pods."""


def read_policy(path: Path) -> Policy:
    """Raises ValueError that says what is wrong."""
    try:
        return Policy.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def as_made_for_others(policy: Policy, job: JobSpec) -> JobSpec:
    """``job`` with what is not for its caller to say: the gateway's image, and that a selector finds no pod that was
    made for a job, now or later, whatever labels that job has given it."""
    meshes = tuple(
        mesh.model_copy(update={"selector": f"{mesh.selector},{_NO_JOBS_POD}"}) if mesh.way == "selector" else mesh
        for mesh in job.meshes
    )
    return job.model_copy(update={"gateway_image": policy.gateway_image, "meshes": meshes})


def violations(policy: Policy, job: JobSpec) -> list[str]:
    """Everything about the job, as its caller asks for it, that the policy does not allow, each as a sentence.

    The selectors of pods that are to be made are not looked at: ``jobs.resolve`` says what they are.
    """
    return list(_violations(policy, job))


def _violations(policy: Policy, job: JobSpec) -> Iterator[str]:
    if not _matches(job.namespace, policy.namespaces):
        yield f"namespace {job.namespace!r} is not among {_listed(policy.namespaces)}"
    pods = sum(mesh.replicas for mesh in job.meshes)
    if pods > policy.max_replicas:
        yield f"{pods} pods are more than {policy.max_replicas}"
    if not 0 < job.idle_timeout <= policy.max_idle:
        yield f"an idle timeout of {job.idle_timeout or 'never'} is longer than {policy.max_idle} s"
    if job.lease > policy.max_lease:
        yield f"a lease of {job.lease:g} s is longer than {policy.max_lease} s"
    yield from _not_among("image pull secret", job.image_pull_secrets, policy.image_pull_secrets)
    for mesh in job.meshes:
        for problem in _mesh_violations(policy, mesh):
            yield f"mesh {mesh.name!r}: {problem}"


def _mesh_violations(policy: Policy, mesh: MeshSpec) -> Iterator[str]:
    yield from _label_violations(mesh.labels, policy.labels)
    yield from _not_among("annotation", mesh.annotations, policy.annotations)
    if mesh.worker is not None:
        yield from _worker_violations(policy, mesh.worker)
        return
    labels = _equalities(mesh.selector)
    if labels is None:
        yield f"the selector {mesh.selector!r} is not made of key=value alone, as those of others must be"
    elif own := [key for key in labels if key.startswith(_IDENTIFYING)]:
        yield f"the selector {mesh.selector!r} names {own[0]}: the pods of jobs are not lent to other jobs"
    elif not any(_matches(label, policy.selectors) for label in _as_text(labels)):
        yield f"the selector {mesh.selector!r} has none of {_listed(policy.selectors)}"


def _worker_violations(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    if not any(worker.image.startswith(prefix) for prefix in policy.images):
        yield f"image {worker.image!r} does not begin with one of {_listed(policy.images)}"
    if worker.template is not None or worker.pod_spec:
        yield "a raw pod specification is not taken from others"
    if worker.fuse:
        yield "privileged pods are not made for others"
    yield from _not_among("service account", _given(worker.service_account_name), policy.service_accounts)
    yield from _not_among("secret", worker.secrets, policy.secrets)
    yield from _not_among("image pull secret", worker.image_pull_secrets, policy.image_pull_secrets)
    yield from _not_among("priority class", _given(worker.priority_class_name), policy.priority_classes)
    yield from _not_among("queue", _given(worker.queue_name), policy.queues)
    # Without a key it is every taint that is tolerated.
    taints = [str(each.get("key") or "") for each in worker.tolerations]
    yield from _not_among("toleration", taints, policy.tolerations)
    yield from _not_among("node label", _as_text(_node_labels(worker)), policy.node_labels)
    yield from _label_violations(worker.labels, policy.labels)
    yield from _not_among("annotation", worker.annotations, policy.annotations)
    for volume in worker.volumes:
        yield from _volume_violations(policy, volume)
    yield from _too_much(policy, worker)


def _volume_violations(policy: Policy, volume: VolumeMount) -> Iterator[str]:
    if foreign := set(volume.source) - {"persistentVolumeClaim", "emptyDir"}:
        yield f"a volume of the kind {', '.join(sorted(foreign))} is not given to others"
    if (claim := volume.source.get("persistentVolumeClaim")) is not None:
        name = claim.get("claimName", "") if isinstance(claim, dict) else claim
        yield from _not_among("claim", [str(name)], policy.claims)


def _label_violations(labels: Mapping[str, str], allowed: tuple[str, ...]) -> Iterator[str]:
    own = [key for key in labels if key.startswith(_IDENTIFYING)]
    yield from (f"label {key!r} is not for others to set" for key in own)
    yield from _not_among("label", _as_text({key: labels[key] for key in labels if key not in own}), allowed)


def _node_labels(worker: WorkerSpec) -> dict[str, str]:
    labels = dict(worker.node_selector)
    if worker.gpu_type is not None:
        key, equals, value = worker.gpu_type.partition("=")
        labels.setdefault(*((key, value) if equals else (GPU_TYPE_LABEL, worker.gpu_type)))
    return labels


def _too_much(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    wanted: dict[str, str | None] = {
        "cpu": worker.cpu,
        "memory": worker.memory,
        "ephemeral-storage": worker.disk_size,
        GPU_RESOURCE: str(worker.gpus) if worker.gpus else None,
        **worker.resources,
    }
    others = [resource for resource in wanted if resource not in _ORDINARY_RESOURCES]
    yield from _not_among("resource", others, tuple(policy.max_per_pod))
    for resource, limit in policy.max_per_pod.items():
        amount = wanted.get(resource)
        if amount is None and resource in ("cpu", "memory"):
            yield f"{resource} must be said: at most {limit} a pod"
        elif parse_quantity(amount or "0") > Decimal(parse_quantity(limit)):
            yield f"{amount} of {resource} is more than {limit} a pod"


def _equalities(selector: str) -> dict[str, str] | None:
    """The labels of a selector that consists of ``key=value`` alone; None of any other."""
    labels: dict[str, str] = {}
    for term in selector.split(","):
        key, equals, value = (part.strip() for part in term.replace("==", "=", 1).partition("="))
        if not equals or not is_label_key(key) or not is_label_value(value):
            return None
        labels[key] = value
    return labels


def _not_among(what: str, asked: Iterable[str], allowed: tuple[str, ...]) -> Iterator[str]:
    for each in asked:
        if not _matches(each, allowed):
            yield f"{what} {each!r} is not among {_listed(allowed)}"


def _given(value: str | None) -> list[str]:
    return [] if value is None else [value]


def _as_text(labels: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in labels.items()]


def _matches(value: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _listed(allowed: tuple[str, ...]) -> str:
    return ", ".join(allowed) or "(none)"

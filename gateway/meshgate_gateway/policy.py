"""What a gateway provisions for others: the operator's policy, and how a job fares against it. Pure.

A gateway that provisions holds rights that its callers have not, so whatever the policy does not allow is refused,
above all what would let a pod borrow more of them: other service accounts, the host's files, privileges, raw pods.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate_kubernetes.quantity import parse_quantity
from meshgate_kubernetes.spec import GPU_RESOURCE, JobSpec, Quantity, WorkerSpec

__all__ = ["Policy", "read_policy", "violations"]

_HARMLESS_VOLUMES = frozenset({"persistentVolumeClaim", "emptyDir"})


class Policy(BaseModel):
    """Patterns are shell-like: ``team-*``. An empty list allows nothing, unless its comment says otherwise."""

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
    """The most of each resource that a pod may have. Of one that is not listed, any amount."""
    max_idle: int = Field(default=86_400, ge=1)
    """Seconds: the longest a job may wait for its next session."""
    secrets: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()


def read_policy(path: Path) -> Policy:
    """Raises ValueError that says what is wrong."""
    try:
        return Policy.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def violations(policy: Policy, job: JobSpec) -> list[str]:
    """Everything about the job that the policy does not allow, each as a sentence."""
    return list(_violations(policy, job))


def _violations(policy: Policy, job: JobSpec) -> Iterator[str]:
    if not _matches(job.namespace, policy.namespaces):
        yield f"namespace {job.namespace!r} is not among {_listed(policy.namespaces)}"
    pods = sum(mesh.replicas for mesh in job.meshes)
    if pods > policy.max_replicas:
        yield f"{pods} pods are more than {policy.max_replicas}"
    if not 0 < job.idle_timeout <= policy.max_idle:
        yield f"an idle timeout of {job.idle_timeout or 'never'} is longer than {policy.max_idle} s"
    for mesh in job.meshes:
        if mesh.worker is not None:
            for problem in _worker_violations(policy, mesh.worker):
                yield f"mesh {mesh.name!r}: {problem}"


def _worker_violations(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    if not any(worker.image.startswith(prefix) for prefix in policy.images):
        yield f"image {worker.image!r} does not begin with one of {_listed(policy.images)}"
    if worker.template is not None or worker.pod_spec:
        yield "a raw pod specification is not taken from others"
    if worker.fuse:
        yield "privileged pods are not made for others"
    account = worker.service_account_name
    if account is not None and not _matches(account, policy.service_accounts):
        yield f"service account {account!r} is not among {_listed(policy.service_accounts)}"
    for secret in worker.secrets:
        if not _matches(secret, policy.secrets):
            yield f"secret {secret!r} is not among {_listed(policy.secrets)}"
    for volume in worker.volumes:
        if foreign := set(volume.source) - _HARMLESS_VOLUMES:
            yield f"a volume of the kind {', '.join(sorted(foreign))} is not given to others"
    yield from _too_much(policy, worker)


def _too_much(policy: Policy, worker: WorkerSpec) -> Iterator[str]:
    wanted: dict[str, str | None] = {
        "cpu": worker.cpu,
        "memory": worker.memory,
        "ephemeral-storage": worker.disk_size,
        GPU_RESOURCE: str(worker.gpus) if worker.gpus else None,
        **worker.resources,
    }
    for resource, limit in policy.max_per_pod.items():
        amount = wanted.get(resource)
        if amount is None and resource in ("cpu", "memory"):
            yield f"{resource} must be said: at most {limit} a pod"
        elif parse_quantity(amount or "0") > Decimal(parse_quantity(limit)):
            yield f"{amount} of {resource} is more than {limit} a pod"


def _matches(value: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _listed(allowed: tuple[str, ...]) -> str:
    return ", ".join(allowed) or "(none)"

"""The limits of what one caller may have at a time, over all of its jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from meshgate_gateway.provisioning.policy import Policy
from meshgate_kubernetes.jobs.lifecycle import ListedJob
from meshgate_kubernetes.manifests.spec import JobSpec

ALL_NAMESPACES = ""
_PATTERN_CHARACTERS = frozenset("*?[")


def counted_namespaces(policy: Policy, namespace: str) -> list[str]:
    """Where jobs must be counted before one is created in ``namespace``: nowhere without limits per caller, and in all
    namespaces if the policy has patterns of namespaces."""
    if policy.max_jobs_per_caller is None and policy.max_gpus_per_caller is None:
        return []
    if any(_PATTERN_CHARACTERS & set(allowed) for allowed in policy.namespaces):
        return [ALL_NAMESPACES]
    return sorted({*policy.namespaces, namespace})


def exceeded_quota(policy: Policy, job: JobSpec, owner: str, existing: Iterable[ListedJob]) -> str | None:
    """Why ``owner`` may not have ``job`` in addition to its ``existing`` jobs, which may include it; None if it may."""
    this = (job.name, job.namespace)
    others = [each for each in existing if each.owner == owner and (each.name, each.namespace) != this]
    names = ", ".join(sorted(f"{each.namespace}/{each.name}" for each in others))
    limit = policy.max_jobs_per_caller
    if limit is not None and len(others) + 1 > limit:
        return f"{owner} has {names}, and the limit per caller is {limit} {_jobs(limit)}: end one first"
    limit = policy.max_gpus_per_caller
    if limit is None or not job.gpu_count:
        return None
    if unknown := [f"{each.namespace}/{each.name}" for each in others if each.gpus is None]:
        return f"the GPUs of {unknown[0]}, which another version of meshgate created, cannot be counted: end it first"
    used = sum(each.gpus or 0 for each in others)
    if used + job.gpu_count > limit:
        has = f"has {used} in {names}" if used else "has none yet"
        return f"{owner} asks for {job.gpu_count} GPUs and {has}, and the limit per caller is {limit}"
    return None


def _jobs(count: int) -> str:
    return "job" if count == 1 else "jobs"

"""What one caller may have at a time."""

from __future__ import annotations

import pytest

from meshgate_gateway.provisioning.policy import Policy
from meshgate_gateway.provisioning.quota import counted_namespaces, exceeded_quota
from meshgate_kubernetes.jobs.lifecycle import ListedJob
from meshgate_kubernetes.manifests.spec import JobSpec
from tests.clusters.kubernetes.objects import found_mesh, job, mesh


def policy(**limits: int) -> Policy:
    return Policy(namespaces=("team", "other"), gateway_image="gateway:1", **limits)


def listed(name: str, gpus: int | None = 0, owner: str = "kubernetes:alice", namespace: str = "team") -> ListedJob:
    return ListedJob(name, namespace, name, {}, 0.0, owner, gpus)


def requested(gpus: int = 0, replicas: int = 2) -> JobSpec:
    return job(mesh(replicas=replicas, gpus=gpus))


def exceeded(allowed: Policy, spec: JobSpec, *existing: ListedJob) -> str | None:
    return exceeded_quota(allowed, spec, "kubernetes:alice", existing)


def test_without_limits_nothing_is_counted() -> None:
    assert counted_namespaces(policy(), "team") == []
    assert exceeded(policy(), requested(gpus=8), listed("a", 64)) is None


@pytest.mark.parametrize("limit", ["max_jobs_per_caller", "max_gpus_per_caller"])
def test_jobs_are_counted_in_every_namespace_of_the_policy(limit: str) -> None:
    assert counted_namespaces(policy(**{limit: 1}), "team") == ["other", "team"]
    patterns = policy(**{limit: 1}).model_copy(update={"namespaces": ("team-*", "other")})
    assert counted_namespaces(patterns, "team-a") == [""]


def test_the_limit_of_jobs_counts_those_of_the_same_caller_only() -> None:
    two = policy(max_jobs_per_caller=2)
    others = [listed("b", owner="kubernetes:bob"), listed("c", owner="")]
    assert exceeded(two, requested(), listed("a"), *others) is None
    reason = exceeded(two, requested(), listed("a"), listed("d", namespace="other"), *others)
    assert reason == "kubernetes:alice has other/d, team/a, and the limit per caller is 2 jobs: end one first"


def test_a_job_that_runs_already_is_not_counted_twice() -> None:
    assert exceeded(policy(max_jobs_per_caller=1, max_gpus_per_caller=4), requested(2), listed("trainer", 4)) is None
    same_name = listed("trainer", namespace="other")
    assert exceeded(policy(max_jobs_per_caller=1), requested(), same_name) is not None


def test_the_limit_of_gpus_is_over_all_pods_of_all_jobs() -> None:
    eight = policy(max_gpus_per_caller=8)
    assert exceeded(eight, requested(gpus=2), listed("a", 4)) is None
    reason = exceeded(eight, requested(gpus=2), listed("a", 5))
    assert reason == "kubernetes:alice asks for 4 GPUs and has 5 in team/a, and the limit per caller is 8"
    assert exceeded(policy(max_gpus_per_caller=0), requested(gpus=1)) is not None


def test_gpus_of_other_vendors_count_and_existing_pods_do_not() -> None:
    amd = job(mesh(replicas=3, resources={"amd.com/gpu": "2", "rdma/hca": "9"}))
    assert amd.gpu_count == 6
    assert job(found_mesh(replicas=3)).gpu_count == 0


def test_gpus_that_cannot_be_counted_block_further_ones_but_not_jobs_without() -> None:
    eight = policy(max_gpus_per_caller=8)
    assert exceeded(eight, requested(), listed("old", None)) is None
    reason = exceeded(eight, requested(gpus=1), listed("old", None))
    assert reason is not None
    assert "the GPUs of team/old, which another version" in reason

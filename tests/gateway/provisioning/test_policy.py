"""Which jobs the operator's policy allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate import Compute, KubernetesJob
from meshgate_gateway.provisioning.policy import (
    Policy,
    apply_policy,
    counted_namespaces,
    exceeded_quota,
    read_policy,
    violations,
)
from meshgate_kubernetes.jobs.lifecycle import ListedJob
from meshgate_kubernetes.manifests.job_objects import statefulset_selector
from meshgate_kubernetes.manifests.spec import GatewaySpec, JobSpec, VolumeMount, WorkerSpec
from tests.clusters.kubernetes.objects import found_mesh, job, mesh
from tests.programs import ROOT

POLICY = Policy(
    namespaces=("team*",),
    images=("worker:",),
    gateway_image="gateway:1",
    max_replicas=4,
    max_per_pod={"memory": "8Gi", "nvidia.com/gpu": "2"},
    secrets=("wandb-*",),
    selectors=("app=mine",),
)


def requested_job(*, replicas: int = 2, idle_timeout: int = 60, **worker: Any) -> JobSpec:
    return job(mesh(replicas=replicas, **{"memory": "4Gi", **worker}), idle_timeout=idle_timeout)


def test_a_job_within_the_policy_has_no_violations() -> None:
    assert violations(POLICY, requested_job(replicas=4, memory="8Gi")) == []
    assert violations(POLICY, requested_job(gpus=2, secrets=("wandb-key",))) == []
    assert violations(POLICY, job(found_mesh(), idle_timeout=60)) == []


@pytest.mark.parametrize(
    ("spec", "violation"),
    [
        (requested_job(replicas=5), "5 pods exceed the limit of 4"),
        (requested_job(idle_timeout=0), "idle_timeout 0 (never) exceeds the limit of 86400 s"),
        (requested_job(idle_timeout=90_000), "idle_timeout 90000 s exceeds"),
        (requested_job(image="evil:1"), "image 'evil:1' is not allowed (allowed prefixes: worker:)"),
        (requested_job(memory="9Gi"), "9Gi of memory exceeds the limit of 8Gi per pod"),
        (requested_job(memory=None), "memory must be set, to at most 8Gi per pod"),
        (requested_job(gpus=3), "3 of nvidia.com/gpu exceeds the limit of 2 per pod"),
        (requested_job(resources={"nvidia.com/gpu": "4"}), "4 of nvidia.com/gpu exceeds the limit of 2 per pod"),
        (requested_job(secrets=("admin",)), "secret 'admin' is not allowed (allowed: wandb-*)"),
        (requested_job(service_account_name="admin"), "service account 'admin' is not allowed (allowed: none)"),
        (requested_job(pod_spec={"hostNetwork": True}), "a raw pod specification (pod_spec) is not allowed"),
        (
            requested_job(template={"spec": {"containers": [{"name": "x"}]}}),
            "a raw pod specification (pod_spec) is not allowed",
        ),
        (requested_job(fuse=True), "a privileged pod (fuse) is not allowed"),
        (
            requested_job(volumes=(VolumeMount(mount_path="/h", source={"hostPath": {"path": "/"}}),)),
            "volume type hostPath is not allowed",
        ),
    ],
)
def test_a_violation_names_the_value_and_the_limit(spec: JobSpec, violation: str) -> None:
    assert violation in "; ".join(violations(POLICY, spec))


VOLUME = {"mount_path": "/data"}
CHOICES: list[tuple[dict[str, Any], str, dict[str, tuple[str, ...]]]] = [
    ({"service_account_name": "admin"}, "service account 'admin'", {"service_accounts": ("adm*",)}),
    ({"secrets": ("other",)}, "secret 'other'", {"secrets": ("other",)}),
    ({"image_pull_secrets": ("registry",)}, "image pull secret 'registry'", {"image_pull_secrets": ("reg*",)}),
    ({"priority_class_name": "urgent"}, "priority class 'urgent'", {"priority_classes": ("urgent",)}),
    ({"queue_name": "research"}, "queue 'research'", {"queues": ("research",)}),
    ({"tolerations": ({"key": "gpu", "operator": "Exists"},)}, "toleration 'gpu'", {"tolerations": ("gpu",)}),
    ({"tolerations": ({"operator": "Exists"},)}, "toleration ''", {"tolerations": ("*",)}),
    ({"node_selector": {"pool": "control"}}, "node label 'pool=control'", {"node_labels": ("pool=*",)}),
    ({"gpus": 1, "gpu_type": "H100"}, "node label 'nvidia.com/gpu.product=H100'", {"node_labels": ("nvidia.com/*",)}),
    ({"gpus": 1, "gpu_type": "pool=h"}, "node label 'pool=h'", {"node_labels": ("pool=h",)}),
    ({"labels": {"app": "web"}}, "label 'app=web'", {"labels": ("app=*",)}),
    ({"annotations": {"inject": "all"}}, "annotation 'inject'", {"annotations": ("inject",)}),
    (
        {"volumes": (VolumeMount(source={"persistentVolumeClaim": {"claimName": "data"}}, **VOLUME),)},
        "claim 'data'",
        {"claims": ("data",)},
    ),
]


@pytest.mark.parametrize(("worker", "value", "allowing"), CHOICES)
def test_an_unlisted_value_is_not_allowed(
    worker: dict[str, Any], value: str, allowing: dict[str, tuple[str, ...]]
) -> None:
    spec = requested_job(**worker)
    (violation,) = violations(POLICY, spec)
    assert f"{value} is not allowed (allowed: " in violation
    assert violations(POLICY.model_copy(update=allowing), spec) == []


@pytest.mark.parametrize(
    ("gateway", "violation"),
    [
        (GatewaySpec(service_account_name="admin"), "gateway: service account 'admin' is not allowed (allowed: none)"),
        (GatewaySpec(memory="9Gi"), "gateway: 9Gi of memory exceeds the limit of 8Gi per pod"),
        (GatewaySpec(tolerations=({"operator": "Exists"},)), "gateway: toleration '' is not allowed (allowed: none)"),
        (GatewaySpec(labels={"app": "other"}), "gateway: label 'app=other' is not allowed (allowed: none)"),
        (GatewaySpec(memory="8Gi", tolerations=({"key": "nvidia.com/gpu", "operator": "Exists"},)), None),
    ],
)
def test_the_gateway_is_checked_too(gateway: GatewaySpec, violation: str | None) -> None:
    found = violations(POLICY, requested_job().model_copy(update={"gateway": gateway}))
    assert found == ([] if violation is None else [violation])


def test_the_gateway_that_the_policy_names_is_one_pod_in_which_nothing_is_installed() -> None:
    installed = {"install_monarch": True, "env_vars": {"PIP_INDEX_URL": "http://x"}, "secrets": ("pip",)}
    own = GatewaySpec(replicas=2, cpu="1", **installed)
    spec = apply_policy(POLICY, requested_job().model_copy(update={"gateway": own}))
    assert (spec.gateway_image, spec.gateway) == ("gateway:1", GatewaySpec(cpu="1"))


def test_an_unlisted_resource_is_not_allowed() -> None:
    assert violations(POLICY, requested_job(resources={"rdma/hca": "1"})) == [
        "mesh 'workers': resource 'rdma/hca' is not allowed (allowed: memory, nvidia.com/gpu)"
    ]
    listing = POLICY.model_copy(update={"max_per_pod": {"rdma/hca": "1"}})
    assert violations(listing, requested_job(resources={"rdma/hca": "1"})) == []


def test_the_limit_of_a_pattern_applies_to_each_resource_that_it_allows() -> None:
    limits = {"hugepages-*": "1Gi", "hugepages-1Gi": "512Mi", "mem*": "8Gi"}
    policy = POLICY.model_copy(update={"max_per_pod": limits})
    assert violations(policy, requested_job(memory="8Gi", resources={"hugepages-2Mi": "1Gi"})) == []
    worker = {"memory": None, "resources": {"hugepages-2Mi": "512Gi", "hugepages-1Gi": "1Gi"}}
    spec = requested_job(**worker).model_copy(update={"gateway": GatewaySpec(memory="9Gi")})
    assert violations(policy, spec) == [
        "gateway: 9Gi of memory exceeds the limit of 8Gi per pod",
        "mesh 'workers': memory must be set, to at most 8Gi per pod",
        "mesh 'workers': 512Gi of hugepages-2Mi exceeds the limit of 1Gi per pod",
        "mesh 'workers': 1Gi of hugepages-1Gi exceeds the limit of 512Mi per pod",
    ]


def test_the_policy_covers_every_field_of_a_worker() -> None:
    """Before you add a field here, decide on it in the policy."""
    checked = {name for worker, _, _ in CHOICES for name in worker}
    checked |= {"image", "cpu", "memory", "disk_size", "resources", "volumes", "fuse", "pod_spec", "template"}
    harmless = {"env_vars", "image_pull_policy", "install_monarch", "shared_memory_limit", "spot", "cpu_is_limit"}
    assert set(WorkerSpec.model_fields) == checked | harmless


def test_the_lease_is_limited() -> None:
    assert violations(POLICY, requested_job().model_copy(update={"lease": 86_400.0})) == []
    (violation,) = violations(POLICY, requested_job().model_copy(update={"lease": 86_401.0}))
    assert violation == "lease 86401 s exceeds the limit of 86400 s"


def test_fields_of_the_job_and_the_mesh_are_checked_too() -> None:
    spec = requested_job().model_copy(update={"image_pull_secrets": ("registry",)})
    assert violations(POLICY, spec) == ["image pull secret 'registry' is not allowed (allowed: none)"]
    labelled = mesh(memory="1Gi").model_copy(update={"labels": {"a": "b"}, "annotations": {"c": "d"}})
    assert violations(POLICY, job(labelled, idle_timeout=60)) == [
        "mesh 'workers': label 'a=b' is not allowed (allowed: none)",
        "mesh 'workers': annotation 'c' is not allowed (allowed: none)",
    ]


@pytest.mark.parametrize("key", ["meshgate.dev/job", "monarch.pytorch.org/mesh-name"])
def test_no_policy_allows_reserved_labels(key: str) -> None:
    everything = POLICY.model_copy(update={"labels": ("*",), "selectors": ("*",)})
    assert violations(everything, requested_job(labels={key: "victim"})) == [
        f"mesh 'workers': label {key!r} is reserved"
    ]
    (violation,) = violations(everything, job(found_mesh(selector=f"app=mine,{key}=victim"), idle_timeout=60))
    assert f"uses {key}: a job cannot use the pods of another job" in violation


@pytest.mark.parametrize(
    ("selector", "violation"),
    [
        ("app=other", "needs an allowed label (allowed: app=mine)"),
        ("app in (mine)", "is not allowed: use only key=value terms"),
        ("app=mine,!other", "is not allowed: use only key=value terms"),
        ("app!=mine", "is not allowed: use only key=value terms"),
    ],
)
def test_a_selector_must_contain_an_allowed_label(selector: str, violation: str) -> None:
    (problem,) = violations(POLICY, job(found_mesh(selector=selector), idle_timeout=60))
    assert violation in problem


def test_a_selector_may_have_more_labels() -> None:
    assert violations(POLICY, job(found_mesh(selector="rank=a, app == mine"), idle_timeout=60)) == []


def test_no_selector_is_allowed_by_default() -> None:
    (violation,) = violations(POLICY.model_copy(update={"selectors": ()}), job(found_mesh(), idle_timeout=60))
    assert "selector 'app=mine' needs an allowed label (allowed: none)" in violation


def test_selectors_exclude_the_pods_of_jobs() -> None:
    spec = apply_policy(POLICY, job(found_mesh(), mesh("made")))
    assert [each.selector for each in spec.meshes] == [
        "app=mine,!meshgate.dev/job",
        statefulset_selector("trainer", "made"),
    ]


def test_another_namespace_is_not_allowed() -> None:
    assert violations(POLICY.model_copy(update={"namespaces": ("other",)}), requested_job()) == [
        "namespace 'team' is not allowed (allowed: other)"
    ]


def test_an_invalid_policy_file_is_reported_with_the_field(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(ValueError, match="cannot read the policy"):
        read_policy(path)
    path.write_text('{"gateway_image": "gateway:1", "namespace": ["a"]}')
    with pytest.raises(ValueError, match=r"policy\.json: namespace: Extra inputs"):
        read_policy(path)
    path.write_text('{"gateway_image": "gateway:1", "namespaces": ["a"]}')
    assert read_policy(path).namespaces == ("a",)


def test_the_example_policy_allows_the_program_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MESHGATE_GATEWAY_IMAGE", "MESHGATE_WORKER_IMAGE"):
        monkeypatch.delenv(variable, raising=False)
    assert "KubernetesJob(compute=Compute(replicas=2)) as job" in (ROOT / "docs/kubernetes.md").read_text()
    program = KubernetesJob(compute=Compute(replicas=2), namespace="training")
    policy = read_policy(ROOT / "deploy/provisioning-gateway/example/policy.json")
    assert violations(policy, program._request.spec("trainer")) == []


def test_every_mesh_is_checked() -> None:
    spec = job(mesh("first", memory="1Gi"), mesh("second", memory="1Gi", image="evil:1"), idle_timeout=60)
    assert violations(POLICY, spec) == ["mesh 'second': image 'evil:1' is not allowed (allowed prefixes: worker:)"]


def policy(**limits: int) -> Policy:
    return Policy(namespaces=("team", "other"), gateway_image="gateway:1", **limits)


def listed(name: str, gpus: int | None = 0, owner: str = "kubernetes:alice", namespace: str = "team") -> ListedJob:
    return ListedJob(name=name, namespace=namespace, uid=name, meshes={}, created=0.0, owner=owner, gpus=gpus)


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

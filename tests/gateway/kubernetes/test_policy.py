"""What a gateway's operator allows to be made for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.policy import Policy, as_made_for_others, read_policy, violations
from meshgate_kubernetes.manifests import own_selector
from meshgate_kubernetes.spec import JobSpec, VolumeMount, WorkerSpec
from tests.gateway.kubernetes.objects import found_mesh, job, mesh

POLICY = Policy(
    namespaces=("team*",),
    images=("worker:",),
    gateway_image="gateway:1",
    max_replicas=4,
    max_per_pod={"memory": "8Gi", "nvidia.com/gpu": "2"},
    secrets=("wandb-*",),
    selectors=("app=mine",),
)


def asked(*, replicas: int = 2, idle_timeout: int = 60, **worker: Any) -> JobSpec:
    return job(mesh(replicas=replicas, **{"memory": "4Gi", **worker}), idle_timeout=idle_timeout)


def test_what_is_within_the_policy_is_made() -> None:
    assert violations(POLICY, asked(gpus=2, secrets=("wandb-key",))) == []
    assert violations(POLICY, job(found_mesh(), idle_timeout=60)) == []


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (asked(replicas=5), "5 pods are more than 4"),
        (asked(idle_timeout=0), "an idle timeout of never is longer than 86400 s"),
        (asked(idle_timeout=90_000), "an idle timeout of 90000"),
        (asked(image="evil:1"), "image 'evil:1' does not begin with one of worker:"),
        (asked(memory="9Gi"), "9Gi of memory is more than 8Gi a pod"),
        (asked(memory=None), "memory must be said: at most 8Gi a pod"),
        (asked(gpus=3), "3 of nvidia.com/gpu is more than 2 a pod"),
        (asked(resources={"nvidia.com/gpu": "4"}), "4 of nvidia.com/gpu is more than 2"),
        (asked(secrets=("admin",)), "secret 'admin' is not among wandb-*"),
        (asked(service_account_name="admin"), "service account 'admin' is not among (none)"),
        (asked(pod_spec={"hostNetwork": True}), "a raw pod specification"),
        (asked(template={"spec": {"containers": [{"name": "x"}]}}), "a raw pod specification"),
        (asked(fuse=True), "privileged pods"),
        (
            asked(volumes=(VolumeMount(mount_path="/h", source={"hostPath": {"path": "/"}}),)),
            "a volume of the kind hostPath",
        ),
    ],
)
def test_what_is_not_is_told(spec: JobSpec, told: str) -> None:
    assert told in "; ".join(violations(POLICY, spec))


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


@pytest.mark.parametrize(("worker", "told", "allowing"), CHOICES)
def test_what_the_policy_does_not_list_is_not_given(
    worker: dict[str, Any], told: str, allowing: dict[str, tuple[str, ...]]
) -> None:
    asking = asked(**worker)
    (only,) = violations(POLICY, asking)
    assert f"{told} is not among " in only
    assert violations(POLICY.model_copy(update=allowing), asking) == []


def test_a_resource_that_is_not_listed_is_not_given() -> None:
    assert violations(POLICY, asked(resources={"rdma/hca": "1"})) == [
        "mesh 'workers': resource 'rdma/hca' is not among memory, nvidia.com/gpu"
    ]
    listing = POLICY.model_copy(update={"max_per_pod": {"rdma/hca": "1"}})
    assert violations(listing, asked(resources={"rdma/hca": "1"})) == []


def test_every_field_of_a_worker_is_decided_on() -> None:
    """A new one must be looked at in the policy before it may be named here."""
    checked = {name for worker, _, _ in CHOICES for name in worker}
    checked |= {"image", "cpu", "memory", "disk_size", "resources", "volumes", "fuse", "pod_spec", "template"}
    harmless = {"env_vars", "image_pull_policy", "shared_memory_limit"}
    assert set(WorkerSpec.model_fields) == checked | harmless


def test_no_session_outlives_its_program_for_longer_than_allowed() -> None:
    assert violations(POLICY, asked().model_copy(update={"lease": 86_400.0})) == []
    (told,) = violations(POLICY, asked().model_copy(update={"lease": 86_401.0}))
    assert told == "a lease of 86401 s is longer than 86400 s"


def test_the_jobs_own_fields_are_looked_at_as_well() -> None:
    asking = asked().model_copy(update={"image_pull_secrets": ("registry",)})
    assert violations(POLICY, asking) == ["image pull secret 'registry' is not among (none)"]
    labelled = mesh(memory="1Gi").model_copy(update={"labels": {"a": "b"}, "annotations": {"c": "d"}})
    assert violations(POLICY, job(labelled, idle_timeout=60)) == [
        "mesh 'workers': label 'a=b' is not among (none)",
        "mesh 'workers': annotation 'c' is not among (none)",
    ]


@pytest.mark.parametrize("key", ["meshgate.dev/job", "monarch.pytorch.org/mesh-name"])
def test_no_policy_lets_a_pod_pass_for_one_of_another_job(key: str) -> None:
    everything = POLICY.model_copy(update={"labels": ("*",), "selectors": ("*",)})
    assert violations(everything, asked(labels={key: "victim"})) == [
        f"mesh 'workers': label {key!r} is not for others to set"
    ]
    (told,) = violations(everything, job(found_mesh(selector=f"app=mine,{key}=victim"), idle_timeout=60))
    assert f"names {key}: the pods of jobs are not lent to other jobs" in told


@pytest.mark.parametrize(
    ("selector", "told"),
    [
        ("app=other", "has none of app=mine"),
        ("app in (mine)", "is not made of key=value alone"),
        ("app=mine,!other", "is not made of key=value alone"),
        ("app!=mine", "is not made of key=value alone"),
    ],
)
def test_existing_pods_are_those_that_the_policy_names(selector: str, told: str) -> None:
    (problem,) = violations(POLICY, job(found_mesh(selector=selector), idle_timeout=60))
    assert told in problem


def test_more_labels_only_narrow_what_is_allowed() -> None:
    assert violations(POLICY, job(found_mesh(selector="rank=a, app == mine"), idle_timeout=60)) == []


def test_no_existing_pod_is_taken_by_default() -> None:
    (told,) = violations(POLICY.model_copy(update={"selectors": ()}), job(found_mesh(), idle_timeout=60))
    assert "the selector 'app=mine' has none of (none)" in told


def test_pods_of_jobs_are_left_out_of_what_a_selector_finds() -> None:
    made = as_made_for_others(POLICY, job(found_mesh(), mesh("made")))
    assert [each.selector for each in made.meshes] == ["app=mine,!meshgate.dev/job", own_selector("trainer", "made")]


def test_another_namespace_is_refused() -> None:
    assert violations(POLICY.model_copy(update={"namespaces": ("other",)}), asked()) == [
        "namespace 'team' is not among other"
    ]


def test_a_policy_file_that_is_wrong_says_where(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(ValueError, match="cannot be read"):
        read_policy(path)
    path.write_text('{"gateway_image": "gateway:1", "namespace": ["a"]}')
    with pytest.raises(ValueError, match=r"policy\.json: namespace: Extra inputs"):
        read_policy(path)
    path.write_text('{"gateway_image": "gateway:1", "namespaces": ["a"]}')
    assert read_policy(path).namespaces == ("a",)

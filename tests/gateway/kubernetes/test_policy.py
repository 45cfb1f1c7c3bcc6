"""What a gateway's operator allows to be made for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.policy import Policy, read_policy, violations
from meshgate_kubernetes.spec import JobSpec, VolumeMount
from tests.gateway.kubernetes.objects import found_mesh, job, mesh

POLICY = Policy(
    namespaces=("team*",),
    images=("worker:",),
    gateway_image="gateway:1",
    max_replicas=4,
    max_per_pod={"memory": "8Gi", "nvidia.com/gpu": "2"},
    secrets=("wandb-*",),
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

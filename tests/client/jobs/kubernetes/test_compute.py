"""Compute takes Kubetorch's arguments and names the invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate import Compute, Image
from meshgate.jobs.kubernetes.compute import seconds


def test_aliases_are_equivalent() -> None:
    assert Compute(gpu=2, cpu="4").worker == Compute(gpus=2, cpus=4).worker


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": -1}, "Compute(gpus=-1)"),
        ({"gpus": "many"}, "Compute(gpus='many')"),
        ({"gpu": 1, "gpus": 2}, "gpu is an alias of gpus; pass only one"),
        ({"cpus": "lots"}, "Compute(cpu='lots'): 'lots' is not a Kubernetes quantity"),
        ({"memory": "1GB"}, "Compute(memory='1GB')"),
        ({"memory": "0"}, "'0' must be greater than 0"),
        ({"gpu_type": "A100"}, "gpu_type requires gpus"),
        ({"gpu_memory": "10Gi"}, "whole GPUs"),
        ({"replicas": 0}, "Compute(replicas=0)"),
        ({"replicas": True}, "Compute(replicas=True)"),
        ({"image_pull_policy": "Sometimes"}, "Compute(image_pull_policy='Sometimes')"),
        ({"labels": {"a b": "c"}}, "invalid label key 'a b'"),
        ({"node_selector": {"zone": "a b"}}, "invalid value 'a b' of label 'zone'"),
        ({"env_vars": {"A=B": "c"}}, "invalid name 'A=B' of an environment variable"),
        ({"env_vars": {"POD_IP": "1"}}, "POD_IP is reserved: meshgate sets it"),
        ({"volumes": ["data"]}, "claim:/mount/path"),
        ({"volumes": [{"mountPath": "data", "emptyDir": {}}]}, "Compute(volumes)"),
        ({"launch_timeout": "soon"}, "Compute(launch_timeout='soon')"),
        ({"inactivity_ttl": "5000d"}, "Compute(inactivity_ttl='5000d'): at most 3650 days"),
        ({"memory": 16}, "'16' is less than 1Mi: give a unit, as in 16Gi"),
        ({"memory": "500m"}, "'500m' is less than 1Mi"),
        ({"shared_memory_limit": "1"}, "Compute(shared_memory_limit='1')"),
        ({"cpu": "100Gi"}, "is more CPUs than any machine has"),
        ({"gpus": True}, "Compute(gpus=True): expected a number"),
        ({"gpus": 1, "gpu_type": 5}, "Compute(gpu_type=5)"),
        ({"gpus": 1, "gpu_type": ""}, "Compute(gpu_type='')"),
        ({"resources": {"gpu": 1}}, "unknown resource 'gpu': give its full name"),
        ({"resources": {"rdma/hca": "0.5"}}, "invalid amount '0.5' of rdma/hca: use a whole number"),
        ({"resources": {"nvidia.com/gpu": 2}, "gpus": 1}, "nvidia.com/gpu is given twice"),
        ({"image": 5}, "Compute(image=5)"),
        ({"image": Image}, "expected an Image"),
        ({"secrets": "hf-token"}, "Compute(secrets='hf-token'): expected a list"),
        ({"secrets": ["HF Token"]}, "invalid object name 'HF Token'"),
        ({"image_pull_secrets": "registry"}, "Compute(image_pull_secrets='registry'): expected a list"),
        ({"service_account_name": "A B"}, "Compute(service_account_name='A B')"),
        ({"queue_name": "a b"}, "Compute(queue_name='a b')"),
        ({"env_vars": ["A=1"]}, "Compute(env_vars=['A=1']): expected a mapping"),
        ({"node_selector": "zone=a"}, "Compute(node_selector='zone=a'): expected a mapping"),
        ({"labels": {"meshgate.dev/job": "x"}}, "'meshgate.dev/job' is reserved for meshgate; remove it"),
        ({"volumes": "data:/data"}, "Compute(volumes='data:/data'): expected a list"),
        ({"volumes": [5]}, "Compute(volumes=[5])"),
        ({"volumes": ["data:/data:ro"]}, "mount_path"),
        ({"volumes": ["data:/tmp"]}, "mount path '/tmp' is already in use"),
        ({"volumes": ["a:/data", "b:/data/"]}, "mount path '/data' is already in use"),
        (
            {"volumes": [{"mountPath": "/data", "emptyDirectory": {}}]},
            "a volume needs one type, such as emptyDir, configMap or nfs, not emptyDirectory",
        ),
        ({"tolerations": {"key": "gpu"}}, "expected a list"),
        ({"tolerations": [{"keyy": "gpu"}]}, "unknown toleration field 'keyy'"),
        (
            {"pod_spec": {"spec": {"containers": []}}},
            "expected a pod spec, not a whole pod or template: pass its 'spec'",
        ),
        ({"pod_spec": {"containers": "x"}}, "every container needs a name"),
        ({"selector": 5}, "selector=5"),
        ({"selector": {"app": None}}, "the value of 'app' must be text"),
        ({"selector": {"app": "x"}, "gpus": 2, "memory": "1Gi"}, "remove gpus, memory"),
    ],
)
def test_an_invalid_value_is_rejected_by_its_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Compute(**arguments)
    assert message in str(caught.value)


def test_an_unknown_argument_is_rejected() -> None:
    with pytest.raises(TypeError, match="tolerance"):
        Compute(tolerance=[])  # type: ignore[call-arg]


def test_the_image_sets_the_reference() -> None:
    assert Compute(image=Image(name="trainer").from_docker("pytorch:2")).worker.image == "pytorch:2"
    assert Compute(image="pytorch:2").worker.image == "pytorch:2"


def test_a_pod_installs_monarch_only_if_the_compute_says_so() -> None:
    assert not Compute(image="python:3.11-slim").worker.install_monarch
    assert Compute(image="python:3.11-slim", install_monarch=True).worker.install_monarch


def test_the_environment_sets_the_default_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_WORKER_IMAGE", "registry/worker:7")
    assert Compute().worker.image == "registry/worker:7"
    monkeypatch.delenv("MESHGATE_WORKER_IMAGE")
    assert "meshgate-worker:" in Compute().worker.image


def test_a_gpu_type_may_be_any_node_label() -> None:
    assert Compute(gpus=1, gpu_type="cloud.google.com/gke-accelerator: nvidia-l4").worker.gpu_type == (
        "cloud.google.com/gke-accelerator=nvidia-l4"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400), (None, 0), (0.3, 1)]
)
def test_durations_are_numbers_or_text(text: str | None, value: int) -> None:
    assert seconds("Compute", "x", text) == value

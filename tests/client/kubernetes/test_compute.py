"""Compute takes Kubetorch's arguments and refuses, by name, what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate import Compute, Image
from meshgate.jobs.compute import seconds
from meshgate.jobs.given import plain


def test_aliases_mean_the_same() -> None:
    assert Compute(gpu=2, cpu="4").worker == Compute(gpus=2, cpus=4).worker


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpus": -1}, "Compute(gpus=-1)"),
        ({"gpus": "many"}, "Compute(gpus='many')"),
        ({"gpu": 1, "gpus": 2}, "both mean the same"),
        ({"cpus": "lots"}, "Compute(cpu='lots'): 'lots' is not a Kubernetes quantity"),
        ({"memory": "1GB"}, "Compute(memory='1GB')"),
        ({"memory": "0"}, "asks for nothing"),
        ({"gpu_type": "A100"}, "gpu_type without gpus"),
        ({"gpu_memory": "10Gi"}, "whole GPUs"),
        ({"replicas": 0}, "Compute(replicas=0)"),
        ({"replicas": True}, "Compute(replicas=True)"),
        ({"image_pull_policy": "Sometimes"}, "Compute(image_pull_policy='Sometimes')"),
        ({"labels": {"a b": "c"}}, "'a b' is not a label key"),
        ({"node_selector": {"zone": "a b"}}, "'a b', of 'zone', is not a label value"),
        ({"env_vars": {"A=B": "c"}}, "'A=B' is not the name of an environment variable"),
        ({"env_vars": {"POD_IP": "1"}}, "POD_IP is set by meshgate itself"),
        ({"volumes": ["data"]}, "claim:/mount/path"),
        ({"volumes": [{"mountPath": "data", "emptyDir": {}}]}, "Compute(volumes)"),
        ({"launch_timeout": "soon"}, "Compute(launch_timeout='soon')"),
        ({"inactivity_ttl": "5000d"}, "Compute(inactivity_ttl='5000d'): at most 3650 days"),
        ({"memory": 16}, "'16' is less than 1Mi: say the unit as well, as in 16Gi"),
        ({"memory": "500m"}, "'500m' is less than 1Mi"),
        ({"shared_memory_limit": "1"}, "Compute(shared_memory_limit='1')"),
        ({"cpu": "100Gi"}, "more than any machine has"),
        ({"gpus": True}, "Compute(gpus=True): say how many"),
        ({"gpus": 1, "gpu_type": 5}, "Compute(gpu_type=5)"),
        ({"gpus": 1, "gpu_type": ""}, "Compute(gpu_type='')"),
        ({"resources": {"gpu": 1}}, "'gpu' is no resource: write it with its vendor"),
        ({"resources": {"rdma/hca": "0.5"}}, "only whole ones"),
        ({"resources": {"nvidia.com/gpu": 2}, "gpus": 1}, "say it once"),
        ({"image": 5}, "Compute(image=5)"),
        ({"image": Image}, "expected an Image"),
        ({"secrets": "hf-token"}, "Compute(secrets='hf-token'): expected a list"),
        ({"secrets": ["HF Token"]}, "'HF Token' is no name of an object"),
        ({"image_pull_secrets": "registry"}, "Compute(image_pull_secrets='registry'): expected a list"),
        ({"service_account_name": "A B"}, "Compute(service_account_name='A B')"),
        ({"queue_name": "a b"}, "Compute(queue_name='a b')"),
        ({"env_vars": ["A=1"]}, "Compute(env_vars=['A=1']): expected a mapping"),
        ({"node_selector": "zone=a"}, "Compute(node_selector='zone=a'): expected a mapping"),
        ({"labels": {"meshgate.dev/job": "x"}}, "'meshgate.dev/job' is set by meshgate itself"),
        ({"volumes": "data:/data"}, "Compute(volumes='data:/data'): expected a list"),
        ({"volumes": [5]}, "Compute(volumes=[5])"),
        ({"volumes": ["data:/data:ro"]}, "mount_path"),
        ({"volumes": ["data:/tmp"]}, "mount path '/tmp' is taken already"),
        ({"volumes": ["a:/data", "b:/data/"]}, "mount path '/data' is taken already"),
        (
            {"volumes": [{"mountPath": "/data", "emptyDirectory": {}}]},
            "a volume is of one kind, such as emptyDir, configMap or nfs, not of emptyDirectory",
        ),
        ({"tolerations": {"key": "gpu"}}, "expected a list"),
        ({"tolerations": [{"keyy": "gpu"}]}, "a toleration has no 'keyy'"),
        ({"pod_spec": {"spec": {"containers": []}}}, "pass what is under 'spec'"),
        ({"pod_spec": {"containers": "x"}}, "containers have names"),
        ({"selector": 5}, "selector=5"),
        ({"selector": {"app": None}}, "the value of 'app' is text"),
        ({"selector": {"app": "x"}, "gpus": 2, "memory": "1Gi"}, "leave out gpus, memory"),
    ],
)
def test_an_impossible_value_is_refused_by_its_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Compute(**given)
    assert told in str(caught.value)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="tolerance"):
        Compute(tolerance=[])  # type: ignore[call-arg]


def test_the_image_gives_its_reference() -> None:
    assert Compute(image=Image(name="trainer").from_docker("pytorch:2")).worker.image == "pytorch:2"
    assert Compute(image="pytorch:2").worker.image == "pytorch:2"


def test_the_default_image_can_be_set_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_WORKER_IMAGE", "registry/worker:7")
    assert Compute().worker.image == "registry/worker:7"
    monkeypatch.delenv("MESHGATE_WORKER_IMAGE")
    assert "meshgate-worker:" in Compute().worker.image


def test_a_gpu_type_may_be_another_label() -> None:
    assert Compute(gpus=1, gpu_type="cloud.google.com/gke-accelerator: nvidia-l4").worker.gpu_type == (
        "cloud.google.com/gke-accelerator=nvidia-l4"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400), (None, 0), (0.3, 1)]
)
def test_times_in_words(text: str | None, value: int) -> None:
    assert seconds("Compute", "x", text) == value


def test_objects_of_the_kubernetes_package_are_taken_as_json() -> None:
    class V1Thing:
        attribute_map = {"mount_path": "mountPath", "nothing": "nothing"}  # noqa: RUF012
        mount_path = "/data"
        nothing = None

    assert plain([V1Thing(), {"a": (1, "b")}]) == [{"mountPath": "/data"}, {"a": [1, "b"]}]

"""Compute takes Kubetorch's arguments and refuses, by name, what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate import Compute, Image
from meshgate.jobs.compute import plain, seconds


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
    ],
)
def test_an_impossible_value_is_refused_by_its_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
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
    ("text", "value"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400), (None, 0)]
)
def test_times_in_words(text: str | None, value: int) -> None:
    assert seconds("Compute", "x", text) == value


def test_objects_of_the_kubernetes_package_are_taken_as_json() -> None:
    class V1Thing:
        attribute_map = {"mount_path": "mountPath", "nothing": "nothing"}  # noqa: RUF012
        mount_path = "/data"
        nothing = None

    assert plain([V1Thing(), {"a": (1, "b")}]) == [{"mountPath": "/data"}, {"a": [1, "b"]}]

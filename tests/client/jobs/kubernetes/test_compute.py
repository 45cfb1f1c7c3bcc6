"""Compute takes Kubetorch's arguments and names the invalid ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from meshgate import Compute, Image, KubernetesJob
from meshgate.jobs.kubernetes.compute import (
    as_dict,
    as_json,
    as_tuple,
    reject_reserved_labels,
    seconds,
    selector_text,
    validation_text,
)
from meshgate_kubernetes.manifests.spec import JobSpec

TAINT = {"key": "team", "operator": "Exists"}


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


@pytest.mark.parametrize(("value", "converted"), [(None, ()), (["a"], ("a",)), (range(2), (0, 1))])
def test_an_iterable_becomes_a_tuple(value: Any, converted: tuple[Any, ...]) -> None:
    assert as_tuple("Compute", "secrets", value) == converted


@pytest.mark.parametrize("value", ["hf-token", b"x", {"a": 1}, 5])
def test_a_string_a_mapping_or_a_number_is_not_a_list(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Compute\(secrets=.*\): expected a list, such as secrets=\[…\]"):
        as_tuple("Compute", "secrets", value)


def test_only_a_mapping_becomes_a_dict() -> None:
    assert as_dict("Compute", "labels", None) == {}
    with pytest.raises(TypeError, match=r"Compute\(labels=\['a'\]\): expected a mapping"):
        as_dict("Compute", "labels", ["a"])


def test_objects_of_the_kubernetes_package_become_json() -> None:
    class V1Thing:
        attribute_map = {"mount_path": "mountPath", "nothing": "nothing"}  # noqa: RUF012
        mount_path = "/data"
        nothing = None

    assert as_json([V1Thing(), {"a": (1, "b")}]) == [{"mountPath": "/data"}, {"a": [1, "b"]}]


def test_reserved_labels_are_rejected() -> None:
    reject_reserved_labels("add_mesh", {"app": "x"})
    with pytest.raises(ValueError, match=r"add_mesh\(labels\): 'meshgate.dev/mesh' is reserved for meshgate"):
        reject_reserved_labels("add_mesh", {"meshgate.dev/mesh": "x"})


def test_a_selector_is_text_or_a_mapping() -> None:
    assert selector_text("a in (b, c)") == "a in (b, c)"
    assert selector_text({"a": "b", "c": 1}) == "a=b,c=1"
    with pytest.raises(TypeError, match="the value of 'a' must be text, not True"):
        selector_text({"a": True})


def test_the_text_of_a_selection_says_what_is_selected() -> None:
    assert repr(Compute(selector={"a": "b"})) == "Compute(selector='a=b')"
    assert repr(Compute(selector="a=b", replicas=2)) == "Compute(selector='a=b', replicas=2)"
    assert re.fullmatch(r"Compute\(image='.*', replicas=1\)", repr(Compute(image="pytorch/pytorch")))


def test_a_validation_error_names_each_argument() -> None:
    class Model(BaseModel):
        count: int = Field(ge=1)
        names: list[int]

    with pytest.raises(ValidationError) as raised:
        Model.model_validate({"count": 0, "names": ["a"]})
    first, second = validation_text("Job", raised.value).splitlines()
    assert first == "Job(count=0): Input should be greater than or equal to 1"
    assert second.startswith("Job(names.0='a'): Input should be a valid integer")


def job(compute: Compute, gateway: Compute | None = None) -> JobSpec:
    return KubernetesJob(compute=compute, gateway=gateway)._request.spec("trainer")


def test_the_gateway_may_run_where_the_workers_may() -> None:
    compute = Compute(
        labels={"cost": "ml"}, node_selector={"pool": "a"}, tolerations=[TAINT], priority_class_name="high"
    )
    gateway = job(compute).gateway
    assert (gateway.labels, gateway.node_selector) == ({"cost": "ml"}, {"pool": "a"})
    assert (gateway.tolerations, gateway.priority_class_name) == ((TAINT,), "high")
    assert gateway.service_account_name is None


def test_what_is_given_precedes_what_the_workers_have() -> None:
    own = Compute(
        cpus=2, memory="4Gi", node_selector={"pool": "b"}, service_account_name="gateways", image="registry/gateway:2"
    )
    spec = job(Compute(node_selector={"pool": "a"}, tolerations=[TAINT], service_account_name="data"), own)
    assert (spec.gateway.cpu, spec.gateway.memory, spec.gateway.node_selector) == ("2", "4Gi", {"pool": "b"})
    assert (spec.gateway.tolerations, spec.gateway.service_account_name) == ((TAINT,), "gateways")
    assert spec.gateway_image == "registry/gateway:2"


def test_the_gateway_of_gpu_nodes_tolerates_their_taint() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists"}
    assert job(Compute(gpus=1, node_selector={"pool": "gpu"})).gateway.tolerations == (taint,)
    assert job(Compute(gpus=1)).gateway.tolerations == ()
    assert job(Compute(node_selector={"pool": "cpu"})).gateway.tolerations == ()


def test_raw_pod_specs_are_read_too() -> None:
    raw = {"nodeSelector": {"pool": "a"}, "tolerations": [TAINT]}
    assert job(Compute(pod_spec=raw)).gateway.node_selector == {"pool": "a"}
    monarch = KubernetesJob()
    monarch.add_mesh("workers", 1, pod_spec={**raw, "containers": [{"name": "a", "image": "b"}]})
    assert monarch._request.spec("trainer").gateway.tolerations == (TAINT,)


PLAIN = Compute(image="python:3.12-slim", install_monarch=True, env_vars={"PIP_INDEX_URL": "http://x"}, secrets=["pip"])


def test_a_gateway_without_an_image_is_installed_like_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_GATEWAY_IMAGE", raising=False)
    spec = job(PLAIN, Compute(cpus=2))
    assert (spec.gateway_image, spec.gateway.install_monarch, spec.gateway.cpu) == ("python:3.12-slim", True, "2")
    assert (spec.gateway.env_vars, spec.gateway.secrets) == ({"PIP_INDEX_URL": "http://x"}, ("pip",))
    assert not job(Compute(image="registry/worker:1")).gateway.install_monarch


def test_a_gateway_whose_image_is_named_installs_nothing_unless_it_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MESHGATE_GATEWAY_IMAGE", "registry/gateway:1")
    assert job(PLAIN).gateway_image == "registry/gateway:1"
    named = job(PLAIN, Compute(image="registry/gateway:2"))
    assert (named.gateway_image, named.gateway.install_monarch, named.gateway.env_vars) == (
        "registry/gateway:2",
        False,
        {},
    )
    own = job(PLAIN, Compute(image="python:3.12", install_monarch=True, env_vars={"A": "b"}))
    assert (own.gateway_image, own.gateway.install_monarch) == ("python:3.12", True)
    assert (own.gateway.env_vars, own.gateway.secrets) == ({"A": "b"}, ("pip",))


@pytest.mark.parametrize(
    ("compute", "extra"),
    [
        (Compute(gpus=1), "gpus"),
        (Compute(env_vars={"A": "b"}), "env_vars without install_monarch=True"),
        (Compute(selector={"a": "b"}), "selector"),
        (Compute(image=Image().pip_install(["x"])), "image steps"),
        (Compute(pod_spec={"hostNetwork": True}), "pod_spec"),
    ],
)
def test_what_a_gateway_cannot_have_is_named(compute: Compute, extra: str) -> None:
    with pytest.raises(ValueError, match=rf"a gateway cannot have {extra}; remove it"):
        KubernetesJob(compute=Compute(), gateway=compute)


def test_gateways_that_forward_are_replicas() -> None:
    spec = job(Compute(replicas=3), Compute(replicas=2, cpus=2))
    assert (spec.gateway.replicas, spec.gateway.cpu) == (2, "2")
    assert spec.gateway_pods == {"forwarder": 2, "engines": 1}
    assert job(Compute(replicas=3)).gateway_pods == {"gateway": 1}
    with pytest.raises(ValueError, match=r"gateway\(replicas=17\): Input should be less than or equal to 16"):
        job(Compute(), Compute(replicas=17))


def test_the_gateway_is_a_compute() -> None:
    with pytest.raises(TypeError, match=r"gateway='big'\): expected a Compute"):
        KubernetesJob(compute=Compute(), gateway="big")  # type: ignore[arg-type]

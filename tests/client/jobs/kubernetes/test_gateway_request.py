"""The gateway's pod: what is given, and what it takes from the workers."""

from __future__ import annotations

import pytest

from meshgate import Compute, Image, KubernetesJob
from meshgate_kubernetes.manifests.spec import JobSpec

TAINT = {"key": "team", "operator": "Exists"}


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


@pytest.mark.parametrize(
    ("compute", "extra"),
    [
        (Compute(gpus=1), "gpus"),
        (Compute(replicas=2), "replicas"),
        (Compute(selector={"a": "b"}), "selector"),
        (Compute(image=Image().pip_install(["x"])), "image steps"),
        (Compute(pod_spec={"hostNetwork": True}), "pod_spec"),
    ],
)
def test_what_a_gateway_cannot_have_is_named(compute: Compute, extra: str) -> None:
    with pytest.raises(ValueError, match=rf"a gateway cannot have {extra}; remove it"):
        KubernetesJob(compute=Compute(), gateway=compute)


def test_the_gateway_is_a_compute() -> None:
    with pytest.raises(TypeError, match=r"gateway='big'\): expected a Compute"):
        KubernetesJob(compute=Compute(), gateway="big")  # type: ignore[arg-type]

"""Job and mesh requests without a cluster."""

from __future__ import annotations

import pytest

from meshgate import Compute, ImageSpec
from meshgate.jobs.kubernetes.requests import (
    JobRequest,
    MeshRequest,
    mesh_from_compute,
    mesh_from_monarch_arguments,
    mesh_from_selector,
)
from meshgate_kubernetes.manifests.names import POD_INDEX_LABEL


def monarch_mesh(replicas: int, *, image_spec: ImageSpec | None = None, pod_spec: object = None) -> MeshRequest:
    return mesh_from_monarch_arguments(
        "workers",
        replicas,
        label_selector=None,
        pod_rank_label=POD_INDEX_LABEL,
        image_spec=image_spec,
        port=26600,
        pod_spec=pod_spec,
        labels=None,
        annotations=None,
    )


def test_a_mesh_of_the_same_name_is_replaced() -> None:
    one, two, other = (
        mesh_from_selector(name, "a=b", count) for name, count in (("workers", 1), ("workers", 2), ("others", 1))
    )
    assert JobRequest(meshes=(one, other)).with_mesh(two).meshes == (other, two)


def test_a_compute_with_a_selector_uses_existing_pods() -> None:
    mesh = mesh_from_compute("workers", Compute(selector={"a": "b"}, replicas=4))
    assert (mesh.worker, mesh.selector, mesh.replicas) == (None, "a=b", 4)
    assert mesh_from_compute("workers", Compute(selector="a=b")).replicas == 0
    assert mesh_from_compute("workers", Compute(selector="a=b"), 3).replicas == 3


def test_the_job_spec_takes_pull_settings_from_its_workers() -> None:
    compute = Compute(image_pull_policy="Always", image_pull_secrets=["registry"])
    meshes = tuple(mesh_from_compute(name, compute) for name in ("a", "b"))
    spec = JobRequest(meshes=meshes, lease=5).spec("job")
    assert (spec.gateway_pull_policy, spec.image_pull_secrets, spec.lease) == ("Always", ("registry",), 5)


def test_output_is_logged_unless_the_job_says_otherwise() -> None:
    request = JobRequest(meshes=(mesh_from_selector("workers", "a=b", 1),))
    assert request.spec("job").log_output
    assert not request.model_copy(update={"log_output": False}).spec("job").log_output


def test_a_pod_template_may_be_a_bare_pod_spec() -> None:
    pod = {"containers": [{"name": "worker", "image": "x"}]}
    meshes = [monarch_mesh(1, pod_spec=raw) for raw in (pod, {"spec": pod})]
    assert meshes[0] == meshes[1]
    assert meshes[0].worker is not None
    assert meshes[0].worker.image == "x"


def test_an_image_spec_becomes_a_worker_spec() -> None:
    image_spec = ImageSpec("x", resources={"nvidia.com/gpu": 4}, enable_fuse=True, shared_memory_size="1Gi")
    mesh = monarch_mesh(3, image_spec=image_spec)
    assert mesh.worker is not None
    assert (mesh.worker.resources, mesh.worker.fuse, mesh.worker.shared_memory_limit) == (
        {"nvidia.com/gpu": "4"},
        True,
        "1Gi",
    )


@pytest.mark.parametrize(("port_owner", "message"), [("KubernetesJob", "monarch_port=0"), ("add_mesh", "port=0")])
def test_an_invalid_port_is_named_as_its_caller_names_it(port_owner: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{port_owner}\({message}\)"):
        mesh_from_selector("workers", "a=b", 1, port=0, owner=port_owner)


def test_requests_for_the_same_pods_are_the_same_however_they_are_reached() -> None:
    mesh = mesh_from_selector("workers", "a=b", 1)
    request = JobRequest(name="a", meshes=(mesh,), timeout=5, kubeconfig="/a", gateway_url="ws://a:1")
    assert request.same_as(JobRequest(meshes=(mesh,)))
    assert not request.same_as(JobRequest(name="b", meshes=(mesh,)))
    assert not request.same_as(JobRequest(name="a", meshes=(mesh,), namespace="other"))
    assert not request.same_as(JobRequest(name="a", meshes=(mesh_from_selector("workers", "a=b", 2),)))

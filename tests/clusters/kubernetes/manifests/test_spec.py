"""Invalid specifications raise before anything is created."""

from __future__ import annotations

import pytest

from meshgate_gateway.settings import Settings
from meshgate_kubernetes.manifests.spec import MeshSpec, WorkerSpec
from tests.clusters.kubernetes.objects import found_mesh, job, mesh


def test_duplicate_mesh_names_raise() -> None:
    with pytest.raises(ValueError, match="duplicate mesh names: workers"):
        job(mesh(), mesh())


def test_a_mesh_has_either_a_worker_or_existing_pods() -> None:
    with pytest.raises(ValueError, match="give a worker for new pods or way='selector' for existing pods"):
        MeshSpec(name="workers", replicas=1, way="statefulset", selector="a=b")
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        mesh(replicas=0)
    with pytest.raises(ValueError, match="every pod of the namespace"):
        found_mesh(selector=" ")


def test_the_default_lease_is_that_of_the_gateway() -> None:
    assert job().lease == Settings.model_fields["lease"].default


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(ValueError, match="toleration"):
        WorkerSpec.model_validate({"image": "worker:1", "toleration": []})


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"cpu": "0"}, "must be greater than 0"),
        ({"cpu": "100Gi"}, "more CPUs than any machine has"),
        ({"memory": "16"}, "less than 1Mi: give a unit"),
        ({"gpu_type": "A100"}, "gpu_type requires gpus"),
        ({"gpus": 1, "resources": {"nvidia.com/gpu": "1"}}, "nvidia.com/gpu is given twice"),
        ({"resources": {"gpu": "1"}}, "unknown resource 'gpu'"),
        ({"resources": {"rdma/hca": "0.5"}}, "use a whole number"),
        ({"labels": {"a b": "c"}}, "invalid label key 'a b'"),
        ({"labels": {"a": "b c"}}, "invalid value 'b c' of label 'a'"),
        ({"annotations": {"a b": "c"}}, "invalid annotation key 'a b'"),
        ({"env_vars": {"POD_IP": "1"}}, "POD_IP is reserved"),
        ({"secrets": ["HF Token"]}, "invalid object name 'HF Token'"),
        ({"tolerations": [{"keyy": "gpu"}]}, "unknown toleration field 'keyy'"),
        ({"volumes": [{"mount_path": "/a", "source": {"emptyDirectory": {}}}]}, "a volume needs one type"),
        ({"volumes": [{"mount_path": "/tmp", "source": {"emptyDir": {}}}]}, "mount path '/tmp' is already in use"),
        (
            {"volumes": [{"mount_path": "/dev/shm/", "source": {"emptyDir": {}}}], "shared_memory_limit": "1Gi"},
            "/dev/shm",
        ),
    ],
)
def test_an_invalid_worker_raises(fields: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        WorkerSpec.model_validate({"image": "worker:1", **fields})

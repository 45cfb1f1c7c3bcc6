"""Invalid specifications raise before anything is created."""

from __future__ import annotations

from decimal import Decimal

import pytest

from meshgate_gateway.settings import Settings
from meshgate_kubernetes.manifests.spec import MeshSpec, WorkerSpec, format_quantity, parse_quantity
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", "2"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5", "0.5"),
        ("64Gi", str(64 * 2**30)),
        ("1k", "1000"),
        ("1e3", "1000"),
        ("12E", "12000000000000000000"),
        (3, "3"),
        (0.25, "0.25"),
    ],
)
def test_a_valid_quantity_is_parsed(text: str | float, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


HUGE = ["1e24", "-1e999999", f"1e{10**30}", f"1e-{10**30}", "9" * 40, "2000000Ei"]


@pytest.mark.parametrize("amount", HUGE)
def test_an_amount_out_of_range_is_rejected_as_such(amount: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity: it is out of range"):
        WorkerSpec(image="x", resources={"nvidia.com/gpu": amount}, memory=amount)


@pytest.mark.parametrize("text", ["", "lots", "1GB", "1 Gi", "1Gi2", "0x10", "nan", "1mm", *HUGE])
def test_an_invalid_quantity_raises(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "resource", "text"),
    [
        ("8", "nvidia.com/gpu", "8"),
        ("0.25", "cpu", "250m"),
        ("4", "cpu", "4"),
        (str(64 * 2**30), "memory", "64Gi"),
        (str(1536 * 2**20), "memory", "1.5Gi"),
        ("100", "memory", "100"),
        (str(2**31), "ephemeral-storage", "2Gi"),
    ],
)
def test_quantities_are_formatted_for_people(value: str, resource: str, text: str) -> None:
    assert format_quantity(Decimal(value), resource) == text

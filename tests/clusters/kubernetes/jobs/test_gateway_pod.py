"""The gateway pod of a job, and why a known gateway is gone."""

from __future__ import annotations

from typing import cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.jobs.gateway_pod import GatewayPod, find_gateway, gateway_gone_reason
from tests.clusters.kubernetes.fake_api import FakeApi, IgnoreProgress
from tests.clusters.kubernetes.objects import Object, job

POD = "trainer-gateway-0"


@pytest.fixture
def cluster() -> FakeApi:
    """A running job."""
    fake = FakeApi()
    api = cast("Api", fake)
    objects.create_owned(api, job(), objects.create_parent(api, job()), IgnoreProgress())
    return fake


def find(cluster: FakeApi) -> GatewayPod:
    found = find_gateway(cast("Api", cluster), "trainer", "team")
    assert found is not None
    return found


def gone_reason(cluster: FakeApi, known: GatewayPod | None) -> str | None:
    return gateway_gone_reason(cast("Api", cluster), "trainer", "team", known)


def copy_of(pod: Object, **metadata: str) -> Object:
    return {**pod, "metadata": {**pod["metadata"], **metadata}}


def test_the_ready_gateway_is_found(cluster: FakeApi) -> None:
    found = find(cluster)
    assert (found.name, found.host, found.port) == (POD, "10.0.0.1", 8650)


def test_the_newest_ready_gateway_is_found(cluster: FakeApi) -> None:
    old = cluster.get("Pod", POD, "team")
    cluster.create(copy_of(old, name="new", uid="new", creationTimestamp="2026-01-02T00:00:00Z"))
    cluster.create(
        copy_of(old, name="newer", uid="newer", creationTimestamp="2026-01-03T00:00:00Z", deletionTimestamp="now")
    )
    assert find(cluster).name == "new"


def test_a_job_without_a_ready_gateway_has_none(cluster: FakeApi) -> None:
    cluster.delete("Pod", POD, "team")
    assert find_gateway(cast("Api", cluster), "trainer", "team") is None


def test_a_running_gateway_is_not_gone(cluster: FakeApi) -> None:
    assert gone_reason(cluster, find(cluster)) is None
    assert gone_reason(cluster, None) is None


def test_a_gateway_is_gone_with_its_pod_or_its_job(cluster: FakeApi) -> None:
    known = find(cluster)
    pod = cluster.get("Pod", POD, "team")
    cluster.delete("Pod", POD, "team")
    assert gone_reason(cluster, known) == f"its pod {POD} was deleted"
    cluster.create(copy_of(pod, uid="another"))
    assert gone_reason(cluster, known) == f"its pod {POD} was replaced"
    cluster.delete("ConfigMap", "trainer", "team")
    assert gone_reason(cluster, known) == "the job was deleted"

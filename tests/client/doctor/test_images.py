"""With pods that a test describes; ``tests/kubernetes/test_waiting.py`` pulls images."""

from __future__ import annotations

from typing import Any, cast

import pytest

from meshgate import Compute
from meshgate.doctor.images import check_pulls
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound, Rejected
from meshgate_kubernetes.manifests.spec import JobSpec, Object

SCHEDULED = [{"type": "PodScheduled", "status": "True"}]
ENDED = {"phase": "Succeeded", "containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 0}}}]}


def waiting(reason: str) -> Object:
    state = {"waiting": {"reason": reason, "message": "a reason"}}
    return {"phase": "Pending", "conditions": SCHEDULED, "containerStatuses": [{"name": "worker", "state": state}]}


class Cluster:
    """Creates pods with the ``statuses`` of their images, one after the other; rejects those whose images have none."""

    def __init__(self, **statuses: list[Object]) -> None:
        self.statuses = statuses
        self.pods: dict[str, Object] = {}
        self.deleted: list[str] = []

    def create(self, pod: Object) -> Object:
        if pod["spec"]["containers"][0]["image"] not in self.statuses:
            raise Rejected("no")
        self.pods[pod["metadata"]["name"]] = pod
        return {**pod, "metadata": {**pod["metadata"], "uid": pod["metadata"]["name"]}}

    def get(self, kind: str, name: str, namespace: str) -> Object:
        pod = self.pods[name]
        statuses = self.statuses[pod["spec"]["containers"][0]["image"]]
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return {**pod, "metadata": {**pod["metadata"], "uid": name}, "status": status}

    def list_objects(self, kind: str, namespace: str, fields: str) -> tuple[list[Object], str]:
        return [], "1"

    def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        self.deleted.append(name)
        if len(self.deleted) == 1:
            raise NotFound("another has deleted it")


def job(gateway_image: str = "gateway", **gateway: Any) -> JobSpec:
    compute = Compute(image="worker", gpus=8, cpus=4, image_pull_secrets=["registry"], node_selector={"pool": "a"})
    request = JobRequest(namespace="team").with_mesh(mesh_from_compute("workers", compute))
    spec = request.spec("doctor")
    pod = spec.gateway.model_copy(update=gateway)
    return spec.model_copy(update={"gateway_image": gateway_image, "gateway": pod})


def check(cluster: Cluster, spec: JobSpec, timeout: float = 600.0) -> dict[str, str]:
    return check_pulls(cast("Api", cluster), spec, timeout)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.doctor.images.LOOK_EVERY", 0.0)


def test_pods_are_placed_as_those_of_the_job_and_need_no_gpu() -> None:
    cluster = Cluster(worker=[{}, waiting("ContainerCreating"), ENDED], gateway=[ENDED])
    assert check(cluster, job()) == {"gateway": "", "worker": ""}
    assert sorted(cluster.deleted) == sorted(cluster.pods) == ["doctor-gateway-image", "doctor-workers-image"]
    spec = cluster.pods["doctor-workers-image"]["spec"]
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == ({"pool": "a"}, [{"name": "registry"}])
    assert set(spec["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
    assert "serviceAccountName" not in cluster.pods["doctor-gateway-image"]["spec"]  # the job would create it


def test_an_image_of_both_is_pulled_once_and_with_the_account_of_the_gateway() -> None:
    cluster = Cluster(worker=[ENDED])
    assert check(cluster, job("worker")) == {"worker": ""}
    assert len(cluster.pods) == 1
    cluster = Cluster(worker=[ENDED], gateway=[ENDED])
    check(cluster, job(service_account_name="gateways"))
    assert cluster.pods["doctor-gateway-image"]["spec"]["serviceAccountName"] == "gateways"


def test_what_keeps_an_image_from_a_node_is_the_answer() -> None:
    cluster = Cluster(worker=[waiting("InvalidImageName")], gateway=[ENDED])
    hint = "Set $MESHGATE_WORKER_IMAGE or Compute(image=…) to an image that the cluster can pull"
    found = check(cluster, job())
    assert found == {"gateway": "", "worker": f"pod doctor-workers-image: InvalidImageName: a reason. {hint}"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (waiting("ContainerCreating"), "it was not pulled within 0 s"),
        (waiting("ImagePullBackOff"), "pod doctor-workers-image: ImagePullBackOff: a reason"),
    ],
)
def test_waiting_ends(status: Object, reason: str) -> None:
    cluster = Cluster(worker=[status], gateway=[ENDED])
    assert check(cluster, job(), timeout=0) == {"gateway": "", "worker": reason}
    assert len(cluster.deleted) == 2


def test_a_rejected_pod_leaves_none_behind() -> None:
    cluster = Cluster(gateway=[ENDED])
    with pytest.raises(Rejected):
        check(cluster, job())
    assert cluster.deleted == ["doctor-gateway-image"]

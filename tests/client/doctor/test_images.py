"""With pods that a test describes; ``tests/kubernetes/test_waiting.py`` pulls images."""

from __future__ import annotations

from typing import Any, cast

import pytest

from meshgate import Compute
from meshgate.doctor.images import check_pulls
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound, Rejected, Unreachable
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.diagnosis import PULL_TIMEOUT

SCHEDULED = [{"type": "PodScheduled", "status": "True"}]
ENDED = {  # a pod of either image
    "phase": "Succeeded",
    "containerStatuses": [{"name": name, "state": {"terminated": {"exitCode": 0}}} for name in ("gateway", "worker")],
}


def waiting(reason: str, *sidecars: Object) -> Object:
    state = {"waiting": {"reason": reason, "message": "a reason"}}
    containers = [*sidecars, {"name": "worker", "state": state}]
    return {"phase": "Pending", "conditions": SCHEDULED, "containerStatuses": containers}


SIDECAR = {"name": "proxy", "state": {"running": {}}}  # as injectors add it, before the others
LOST = Unreachable("the API server does not respond")


class Cluster:
    """Creates pods with the ``statuses`` of their images, one after the other; rejects those whose images have none.
    ``interrupted``: the image whose pod it creates without an answer, until Ctrl-C."""

    def __init__(self, interrupted: str = "", **statuses: list[Object | Unreachable]) -> None:
        self.statuses = statuses
        self.interrupted = interrupted
        self.pods: dict[str, Object] = {}
        self.deleted: list[str] = []

    def create(self, pod: Object) -> None:
        image = pod["spec"]["containers"][0]["image"]
        if image not in self.statuses:
            raise Rejected("no")
        self.pods[pod["metadata"]["name"]] = pod
        if image == self.interrupted:
            raise KeyboardInterrupt

    def get(self, kind: str, name: str, namespace: str) -> Object:
        pod = self.pods[name]
        statuses = self.statuses[pod["spec"]["containers"][0]["image"]]
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        if isinstance(status, Unreachable):
            raise status
        return {**pod, "metadata": {**pod["metadata"], "uid": name}, "status": status}

    def list_objects(self, kind: str, namespace: str, fields: str) -> tuple[list[Object], str]:
        return [], "1"

    def delete(self, kind: str, name: str, namespace: str) -> None:
        if name not in self.pods:
            raise NotFound("it does not exist")
        self.deleted.append(name)


class Clock:
    """The time of a check, which passes only while it sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def job(gateway_image: str = "gateway", **gateway: Any) -> JobSpec:
    compute = Compute(image="worker", gpus=8, cpus=4, image_pull_secrets=["registry"], node_selector={"pool": "a"})
    request = JobRequest(namespace="team").with_mesh(mesh_from_compute("workers", compute))
    spec = request.spec("doctor")
    pod = spec.gateway.model_copy(update=gateway)
    return spec.model_copy(update={"gateway_image": gateway_image, "gateway": pod})


def check(cluster: Cluster, spec: JobSpec, timeout: float = 600.0) -> dict[str, str]:
    return check_pulls(cast("Api", cluster), spec, timeout)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("meshgate.doctor.images.time", clock)
    return clock


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
        (waiting("ContainerCreating", SIDECAR), "it was not pulled within 0 s"),
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


def test_a_pod_is_deleted_if_its_creation_is_interrupted() -> None:
    cluster = Cluster("worker", worker=[ENDED], gateway=[ENDED])
    with pytest.raises(KeyboardInterrupt):
        check(cluster, job())
    assert sorted(cluster.deleted) == sorted(cluster.pods) == ["doctor-gateway-image", "doctor-workers-image"]


def test_an_api_server_that_does_not_respond_is_asked_again_until_the_timeout() -> None:
    assert check(Cluster(worker=[LOST, LOST, ENDED], gateway=[ENDED]), job()) == {"gateway": "", "worker": ""}
    cluster = Cluster(worker=[LOST], gateway=[ENDED])
    with pytest.raises(Unreachable):
        check(cluster, job(), timeout=0)
    assert len(cluster.deleted) == 2


def test_a_problem_that_passes_does_not_count_towards_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.doctor.images.LOOK_EVERY", 0.75 * PULL_TIMEOUT)
    failing, pulling = waiting("ErrImagePull"), waiting("ContainerCreating")
    cluster = Cluster(worker=[failing, pulling, failing, ENDED], gateway=[ENDED])
    assert check(cluster, job()) == {"gateway": "", "worker": ""}
    cluster = Cluster(worker=[failing, failing, failing, ENDED], gateway=[ENDED])
    assert check(cluster, job())["worker"] == "pod doctor-workers-image: ErrImagePull: a reason"

"""Why a container has ended; other containers of its pod do not count."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate_kubernetes.status.discovery import container_id, present_hosts
from meshgate_kubernetes.status.termination import restart_reason, termination_reason
from tests.clusters.kubernetes.objects import Object, mesh, pod

OURS = "containerd://ours"


def status(name: str, identity: str, **state: Any) -> Object:
    return {"name": name, "containerID": identity, "state": state or {"running": {}}}


def with_sidecar(ours: Object, sidecar: Object, **more: Any) -> Object:
    """Statuses are ordered by name; an injector puts its container first or last."""
    made = pod(containerStatuses=[sidecar, ours], **more)
    ports = [{"containerPort": 26600}]
    made["spec"] = {"nodeName": "node0", "containers": [{"name": "istio"}, {"name": "worker", "ports": ports}]}
    return made


def test_the_container_of_a_host_is_the_one_that_declares_its_port() -> None:
    running = with_sidecar(status("worker", OURS), status("istio", "containerd://istio"))
    assert container_id(running, 26600) == OURS
    (host,) = present_hosts(mesh(), [running])
    assert host.container == OURS


def test_a_sidecar_that_restarts_or_ends_does_not_count() -> None:
    restarted = with_sidecar(status("worker", OURS), status("istio", "containerd://another"))
    assert termination_reason(restarted, restarted["metadata"]["uid"], OURS) is None
    ended = with_sidecar(status("worker", OURS), status("istio", "x", terminated={"exitCode": 0}))
    assert termination_reason(ended, ended["metadata"]["uid"], OURS) is None


OOM = {"exitCode": 137, "reason": "OOMKilled", "containerID": OURS}


@pytest.mark.parametrize(
    ("ours", "more", "reason"),
    [
        (status("worker", OURS, terminated=OOM), {}, "ended: OOMKilled, exit code 137 (node node0)"),
        (
            {**status("worker", "containerd://next"), "lastState": {"terminated": OOM}},
            {},
            "ended: OOMKilled, exit code 137 (node node0)",
        ),
        (
            status("worker", OURS, terminated={"exitCode": 137, "reason": "Error"}),
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. "},
            "ended: Evicted: The node was low on resource: memory. (node node0)",
        ),
        (status("worker", "containerd://next"), {}, "ended: its container no longer exists (node node0)"),
        (
            status("worker", OURS, terminated={"exitCode": 1, "reason": "Error", "containerID": OURS}),
            {},
            "ended: exit code 1 (node node0)",
        ),
    ],
)
def test_an_ended_container_is_reported_with_reason_and_node(ours: Object, more: Any, reason: str) -> None:
    sidecar = status("istio", "x", **({} if "no longer exists" in reason else {"terminated": {"exitCode": 9}}))
    gone = with_sidecar(ours, sidecar, **more)
    assert termination_reason(gone, gone["metadata"]["uid"], OURS) == reason
    gone["status"]["containerStatuses"].reverse()
    assert termination_reason(gone, gone["metadata"]["uid"], OURS) == reason


def test_a_replaced_or_terminating_pod_is_reported() -> None:
    there = pod()
    assert termination_reason(there, "another", "") == "was replaced"
    there["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert termination_reason(there, there["metadata"]["uid"], "") == "is being deleted"


def gateway(created: str, *statuses: Object) -> Object:
    return {"metadata": {"creationTimestamp": created}, "status": {"containerStatuses": list(statuses)}}


def test_a_first_gateway_has_replaced_none() -> None:
    assert restart_reason(gateway("2026-01-31T12:00:09Z", {"name": "gateway"}), "gateway", "2026-01-31T12:00:00Z") == ""
    assert restart_reason({**gateway("2026-01-31T12:00:09Z"), "status": {}}, "gateway", "2026-01-31T12:00:00Z") == ""


def test_a_gateway_knows_how_its_container_ended_before() -> None:
    killed = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-31T13:00:00Z", "containerID": "1"}
    sidecar = {"name": "istio", "lastState": {"terminated": {"exitCode": 1, "finishedAt": "…"}}}
    started = "2026-01-31T12:00:09Z"
    restarted = gateway(started, sidecar, {"name": "gateway", "lastState": {"terminated": killed}})
    assert restart_reason(restarted, "gateway", "2026-01-31T12:00:00Z") == (
        "the gateway's container ended at 2026-01-31T13:00:00Z (OOMKilled, exit code 137) and was started again"
    )
    assert restart_reason(gateway(started, sidecar), "gateway", "2026-01-31T12:00:00Z") == ""


def test_a_gateway_that_is_much_younger_than_its_job_follows_another() -> None:
    reason = restart_reason(gateway("2026-01-31T12:05:00Z"), "gateway", "2026-01-31T12:00:00Z")
    assert reason.startswith("the gateway's pod was created at 2026-01-31T12:05:00Z, long after the job")

"""How a process in a pod has ended, as its pod tells it; other containers of the pod do not count."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate_kubernetes.discovery import container_id, present_hosts
from meshgate_kubernetes.gateway_pod import why_lost
from tests.gateway.kubernetes.objects import Object, mesh, pod

OURS = "containerd://ours"


def status(name: str, identity: str, **state: Any) -> Object:
    return {"name": name, "containerID": identity, "state": state or {"running": {}}}


def with_sidecar(ours: Object, sidecar: Object, **more: Any) -> Object:
    """Statuses come in the order of names; injectors put their container first or last."""
    made = pod(containerStatuses=[sidecar, ours], **more)
    ports = [{"containerPort": 26600}]
    made["spec"] = {"nodeName": "node0", "containers": [{"name": "istio"}, {"name": "worker", "ports": ports}]}
    return made


def test_a_host_is_the_container_that_serves_its_port() -> None:
    there = with_sidecar(status("worker", OURS), status("istio", "containerd://istio"))
    assert container_id(there, 26600) == OURS
    (host,) = present_hosts(mesh(), [there])
    assert host.container == OURS


def test_a_sidecar_that_is_restarted_or_has_ended_takes_nothing_along() -> None:
    restarted = with_sidecar(status("worker", OURS), status("istio", "containerd://another"))
    assert why_lost(restarted, restarted["metadata"]["uid"], OURS) is None
    ended = with_sidecar(status("worker", OURS), status("istio", "x", terminated={"exitCode": 0}))
    assert why_lost(ended, ended["metadata"]["uid"], OURS) is None


OOM = {"exitCode": 137, "reason": "OOMKilled", "containerID": OURS}


@pytest.mark.parametrize(
    ("ours", "more", "told"),
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
        (status("worker", "containerd://next"), {}, "ended: its container is not there any more (node node0)"),
        (status("worker", OURS, terminated={"exitCode": 1, "reason": "Error"}), {}, "ended: exit code 1 (node node0)"),
    ],
)
def test_the_end_of_a_container_is_told_with_its_reason_and_node(ours: Object, more: Any, told: str) -> None:
    gone = with_sidecar(ours, status("istio", "x", terminated={"exitCode": 9}), **more)
    gone["status"]["containerStatuses"].reverse()
    if told.endswith("any more (node node0)"):
        gone["status"]["containerStatuses"].pop()
    assert why_lost(gone, gone["metadata"]["uid"], OURS) == told


def test_a_pod_that_is_another_or_on_its_way_out_is_told_so() -> None:
    there = pod()
    assert why_lost(there, "another", "") == "was replaced"
    there["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert why_lost(there, there["metadata"]["uid"], "") == "is being deleted"

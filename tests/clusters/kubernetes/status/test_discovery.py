"""The hosts of a mesh and their ranks."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate_kubernetes.status.discovery import (
    ZONE_LABEL,
    WorkerHost,
    container_id,
    grace_period,
    pods_by_rank,
    present_hosts,
    ready_hosts,
    replacement_hosts,
    restart_reason,
    stop_period,
    termination_reason,
)
from tests.clusters.kubernetes.objects import STARTED, Object, event, found_mesh, mesh, pod

OURS = "containerd://ours"


def names(found: object) -> list[str]:
    assert found is not None
    return [host.name for host in found]  # type: ignore[attr-defined]


def test_ordinals_beyond_nine_are_sorted_as_numbers() -> None:
    pods = [pod(f"trainer-workers-{ordinal}") for ordinal in reversed(range(12))]
    assert names(ready_hosts(mesh(replicas=12), pods)) == [f"trainer-workers-{ordinal}" for ordinal in range(12)]


def test_a_rank_label_takes_precedence_over_the_ordinal() -> None:
    pods = [pod("a-0"), pod("a-1")]
    pods[0]["metadata"]["labels"]["rank"] = "1"
    pods[1]["metadata"]["labels"]["rank"] = "0"
    assert names(ready_hosts(found_mesh(rank_label="rank"), pods)) == ["a-1", "a-0"]


def test_pods_without_ranks_are_ordered_by_name() -> None:
    pods = [pod("deployment-x7", owner="ReplicaSet"), pod("deployment-b2", owner="ReplicaSet")]
    assert names(ready_hosts(found_mesh(), pods)) == ["deployment-b2", "deployment-x7"]


def test_a_number_in_the_name_of_another_controllers_pod_is_not_an_ordinal() -> None:
    pods = [pod("deployment-7", owner="ReplicaSet"), pod("deployment-2", owner="ReplicaSet")]
    assert names(ready_hosts(found_mesh(), pods)) == ["deployment-2", "deployment-7"]


def test_a_pod_without_a_rank_does_not_belong_to_a_stateful_set() -> None:
    pods = [pod("debug", owner="ReplicaSet"), pod("trainer-workers-0"), pod("trainer-workers-1")]
    assert names(ready_hosts(mesh(), pods)) == ["trainer-workers-0", "trainer-workers-1"]


def test_a_mesh_is_ready_when_all_ranks_are() -> None:
    first, second = pod("trainer-workers-0"), pod("trainer-workers-1", ready=False)
    assert ready_hosts(mesh(), [first]) is None
    assert ready_hosts(mesh(), [first, second]) is None
    assert names(present_hosts(mesh(), [first, second])) == ["trainer-workers-0"]
    assert ready_hosts(mesh(), []) is None


def test_terminating_pods_and_ranks_beyond_the_mesh_are_not_hosts() -> None:
    leaving, ended, third = pod("trainer-workers-0"), pod("trainer-workers-1", phase="Failed"), pod("trainer-workers-2")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pods_by_rank(mesh(), [leaving, ended, third]) == {}


def test_the_identity_is_the_uid_of_pods_that_derive_theirs_from_it() -> None:
    plain, derived = pod("trainer-workers-0"), pod("trainer-workers-1")
    derived["spec"]["containers"][0]["env"] = [{"name": "MONARCH_POD_UID", "valueFrom": {}}]
    assert [host.identity for host in present_hosts(mesh(), [plain, derived])] == ["", derived["metadata"]["uid"]]


def test_the_identity_is_the_one_listed_for_the_rank() -> None:
    listed, broken = pod("trainer-workers-1"), pod("trainer-workers-0")
    for known, value in ((listed, '["service<a>", "service<b>"]'), (broken, "service<a>")):
        known["spec"]["containers"][0]["env"] = [{"name": "MONARCH_SERVICE_PROC_IDS", "value": value}]
    assert [host.identity for host in present_hosts(mesh(), [broken, listed])] == ["", "service<b>"]


def test_the_port_of_the_pod_takes_precedence() -> None:
    known = pod("trainer-workers-0")
    known["spec"]["containers"][0]["env"] = [{"name": "MONARCH_PORT", "value": "7000"}]
    (host,) = present_hosts(mesh(), [known])
    assert host.address == "tcp://10.0.0.1:7000"
    (host,) = present_hosts(mesh(), [pod(podIP="fd00::1")])
    assert host.address == "tcp://[fd00::1]:26600"


def the_host(of: object) -> WorkerHost:
    (host,) = present_hosts(mesh(), [of])  # type: ignore[list-item]
    return host


def test_a_host_has_the_node_and_zone_of_its_pod() -> None:
    known = pod("trainer-workers-0")
    assert (the_host(known).node, the_host(known).zone) == ("", "")
    known["spec"]["nodeName"] = "node-7"
    known["metadata"]["labels"][ZONE_LABEL] = "zone-b"
    assert (the_host(known).node, the_host(known).zone) == ("node-7", "zone-b")


def test_a_recreated_pod_replaces_the_lost_host_of_its_rank() -> None:
    first, second = pod("trainer-workers-0"), pod("trainer-workers-1")
    second["metadata"]["uid"] = "another"
    known = {0: the_host(first), 1: None}
    assert replacement_hosts(mesh(), known, [first]) == {}
    assert {rank: host.uid for rank, host in replacement_hosts(mesh(), known, [first, second]).items()} == {
        1: "another"
    }
    assert replacement_hosts(mesh(), {0: the_host(first)}, [first, second]) == {}  # rank 1 was never handed out


def test_a_restarted_container_replaces_its_host() -> None:
    restarted = pod("trainer-workers-0", containerStatuses=[{"name": "worker", "containerID": "second"}])
    assert list(replacement_hosts(mesh(), {0: None}, [restarted])) == [0]


def test_pods_without_ranks_replace_any_lost_host() -> None:
    stayed, new = pod("deployment-b2", owner="ReplicaSet"), pod("deployment-a1", owner="ReplicaSet")
    (known,) = present_hosts(found_mesh(), [stayed])
    found = replacement_hosts(found_mesh(), {0: known, 1: None}, [stayed, new])
    assert {rank: host.name for rank, host in found.items()} == {1: "deployment-a1"}


def test_pods_without_ranks_keep_the_rank_that_they_have() -> None:
    first, second, third = (pod(f"deployment-{name}", owner="ReplicaSet") for name in ("b2", "d4", "f6"))
    known = dict(enumerate(present_hosts(found_mesh(3), [first, second, third])))
    new, further = (pod(f"deployment-{name}", owner="ReplicaSet") for name in ("a1", "c3"))
    assert names(ready_hosts(found_mesh(3), [new, second, third], known)) == [
        "deployment-a1",
        "deployment-d4",
        "deployment-f6",
    ]
    assert ready_hosts(found_mesh(3), [second, third], known) is None
    assert list(pods_by_rank(found_mesh(3), [further, third, new], known).values()) == [new, further, third]
    assert [host.rank for host in present_hosts(found_mesh(3), [third, first], known)] == [0, 2]


def test_a_ready_pod_takes_a_free_rank_before_one_that_starts() -> None:
    first, second = (pod(f"deployment-{name}", owner="ReplicaSet") for name in ("b2", "d4"))
    known = dict(enumerate(present_hosts(found_mesh(), [first, second])))
    starting, spare = pod("deployment-a1", owner="ReplicaSet", ready=False), pod("deployment-e5", owner="ReplicaSet")
    assert names(ready_hosts(found_mesh(), [starting, second, spare], known)) == ["deployment-e5", "deployment-d4"]


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


def test_a_pod_that_kubernetes_deletes_is_reported_with_what_for() -> None:
    there = pod()
    there["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "PodReady"}
    preempted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "team-b"}
    there["status"]["conditions"] = [ready, preempted]
    expected = "is being deleted (PreemptionByScheduler: team-b)"
    assert termination_reason(there, there["metadata"]["uid"], "") == expected
    preempted["status"] = "False"
    assert termination_reason(there, there["metadata"]["uid"], "") == "is being deleted"


def test_a_pod_that_is_being_deleted_has_its_grace_period_while_its_container_runs() -> None:
    there = pod()
    ours = there["status"]["containerStatuses"][0]["containerID"]
    assert grace_period(there, ours) == 0
    there["metadata"].update(deletionTimestamp="2026-01-01T00:00:30Z", deletionGracePeriodSeconds=30)
    assert grace_period(there, ours) == 30
    assert grace_period(there, "containerd://another") == 0
    there["metadata"]["deletionGracePeriodSeconds"] = 0  # it is deleted by force
    assert grace_period(there, ours) == 0
    there["metadata"]["deletionGracePeriodSeconds"] = 30
    there["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    assert grace_period(there, ours) == 0


def test_a_container_that_its_kubelet_stops_has_at_most_the_grace_period_of_its_pod() -> None:
    there = pod()
    (status,) = there["status"]["containerStatuses"]
    ours = status["containerID"]
    stopping = event(there, "Killing", container="worker")
    assert stop_period(there, ours, stopping) == 30
    without_time = {**stopping, "lastTimestamp": None, "metadata": {"creationTimestamp": stopping["lastTimestamp"]}}
    assert stop_period(there, ours, without_time) == 30
    assert stop_period(there, ours, event(there, "Killing", container="sidecar")) == 0
    assert stop_period(there, "containerd://another", stopping) == 0
    assert stop_period(there, ours, event(there, "Killing", at=STARTED, container="worker")) == 0  # of an earlier one
    there["spec"]["terminationGracePeriodSeconds"] = 0
    assert stop_period(there, ours, stopping) == 0
    there["spec"]["terminationGracePeriodSeconds"] = 30
    status["state"] = {"terminated": {"exitCode": 0}}
    assert stop_period(there, ours, stopping) == 0
    deleted = pod()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    assert stop_period(deleted, ours, stopping) == 0


def gateway(created: str, *statuses: Object) -> Object:
    return {"metadata": {"name": "gw", "creationTimestamp": created}, "status": {"containerStatuses": list(statuses)}}


def test_a_first_gateway_has_replaced_none() -> None:
    assert restart_reason(gateway("2026-01-31T12:00:09Z", {"name": "gateway"}), "gateway", "2026-01-31T12:00:00Z") == ""
    assert restart_reason({**gateway("2026-01-31T12:00:09Z"), "status": {}}, "gateway", "2026-01-31T12:00:00Z") == ""


def test_a_gateway_knows_how_its_container_ended_before() -> None:
    killed = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-31T13:00:00Z", "containerID": "1"}
    sidecar = {"name": "istio", "lastState": {"terminated": {"exitCode": 1, "finishedAt": "…"}}}
    started = "2026-01-31T12:00:09Z"
    restarted = gateway(started, sidecar, {"name": "gateway", "lastState": {"terminated": killed}})
    assert restart_reason(restarted, "gateway", "2026-01-31T12:00:00Z") == (
        "the container of pod gw ended at 2026-01-31T13:00:00Z (OOMKilled, exit code 137) and was started again"
    )
    assert restart_reason(gateway(started, sidecar), "gateway", "2026-01-31T12:00:00Z") == ""


def test_a_gateway_that_is_much_younger_than_its_job_follows_another() -> None:
    reason = restart_reason(gateway("2026-01-31T12:05:00Z"), "gateway", "2026-01-31T12:00:00Z")
    assert reason.startswith("pod gw was created at 2026-01-31T12:05:00Z, long after the job")

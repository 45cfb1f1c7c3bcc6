"""The hosts of a mesh and their ranks."""

from __future__ import annotations

from meshgate_kubernetes.status.discovery import (
    ZONE_LABEL,
    WorkerHost,
    pods_by_rank,
    present_hosts,
    ready_hosts,
    replacement_hosts,
)
from tests.clusters.kubernetes.objects import found_mesh, mesh, pod


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

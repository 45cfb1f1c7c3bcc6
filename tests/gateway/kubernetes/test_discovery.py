"""Which pods are the hosts of a mesh, and in which order."""

from __future__ import annotations

from meshgate_kubernetes.discovery import ZONE_LABEL, Host, present_hosts, ranked, ready_hosts, successors
from tests.gateway.kubernetes.objects import found_mesh, mesh, pod


def names(found: object) -> list[str]:
    assert found is not None
    return [host.name for host in found]  # type: ignore[attr-defined]


def test_ranks_follow_the_ordinal_beyond_nine() -> None:
    pods = [pod(f"trainer-workers-{ordinal}") for ordinal in reversed(range(12))]
    assert names(ready_hosts(mesh(replicas=12), pods)) == [f"trainer-workers-{ordinal}" for ordinal in range(12)]


def test_a_rank_label_counts_more_than_the_ordinal() -> None:
    pods = [pod("a-0"), pod("a-1")]
    pods[0]["metadata"]["labels"]["rank"] = "1"
    pods[1]["metadata"]["labels"]["rank"] = "0"
    assert names(ready_hosts(found_mesh(rank_label="rank"), pods)) == ["a-1", "a-0"]


def test_pods_without_any_rank_are_ordered_by_name() -> None:
    pods = [pod("deployment-x7", owner="ReplicaSet"), pod("deployment-b2", owner="ReplicaSet")]
    assert names(ready_hosts(found_mesh(), pods)) == ["deployment-b2", "deployment-x7"]


def test_a_mesh_is_ready_when_every_rank_is() -> None:
    first, second = pod("trainer-workers-0"), pod("trainer-workers-1", ready=False)
    assert ready_hosts(mesh(), [first]) is None
    assert ready_hosts(mesh(), [first, second]) is None
    assert names(present_hosts(mesh(), [first, second])) == ["trainer-workers-0"]
    assert ready_hosts(mesh(), []) is None


def test_pods_on_their_way_out_and_ranks_beyond_the_mesh_are_not_hosts() -> None:
    leaving, ended, third = pod("trainer-workers-0"), pod("trainer-workers-1", phase="Failed"), pod("trainer-workers-2")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ranked(mesh(), [leaving, ended, third]) == {}


def test_the_port_is_the_pods_own_where_it_says_one() -> None:
    known = pod("trainer-workers-0")
    known["spec"]["containers"][0]["env"] = [{"name": "MONARCH_PORT", "value": "7000"}]
    (host,) = present_hosts(mesh(), [known])
    assert host.address == "tcp://10.0.0.1:7000"
    (host,) = present_hosts(mesh(), [pod(podIP="fd00::1")])
    assert host.address == "tcp://[fd00::1]:26600"


def the_host(of: object) -> Host:
    (host,) = present_hosts(mesh(), [of])  # type: ignore[list-item]
    return host


def test_a_host_says_its_node_and_the_zone_that_its_pod_is_labelled_with() -> None:
    known = pod("trainer-workers-0")
    assert (the_host(known).node, the_host(known).zone) == ("", "")
    known["spec"]["nodeName"] = "node-7"
    known["metadata"]["labels"][ZONE_LABEL] = "zone-b"
    assert (the_host(known).node, the_host(known).zone) == ("node-7", "zone-b")


def test_a_pod_made_anew_takes_the_place_of_the_one_that_ended() -> None:
    first, second = pod("trainer-workers-0"), pod("trainer-workers-1")
    second["metadata"]["uid"] = "another"
    known = {0: the_host(first), 1: None}
    assert successors(mesh(), known, [first]) == {}
    assert {rank: host.uid for rank, host in successors(mesh(), known, [first, second]).items()} == {1: "another"}
    assert successors(mesh(), {0: the_host(first)}, [first, second]) == {}  # nobody asked for rank 1


def test_a_container_started_again_takes_its_own_place() -> None:
    again = pod("trainer-workers-0", containerStatuses=[{"name": "worker", "containerID": "second"}])
    assert list(successors(mesh(), {0: None}, [again])) == [0]


def test_pods_without_ranks_of_their_own_take_any_place() -> None:
    stayed, new = pod("deployment-b2", owner="ReplicaSet"), pod("deployment-a1", owner="ReplicaSet")
    (known,) = present_hosts(found_mesh(), [stayed])
    found = successors(found_mesh(), {0: known, 1: None}, [stayed, new])
    assert {rank: host.name for rank, host in found.items()} == {1: "deployment-a1"}

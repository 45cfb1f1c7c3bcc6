"""Which pods are the hosts of a mesh, and in which order."""

from __future__ import annotations

from meshgate_kubernetes.discovery import present_hosts, ranked, ready_hosts
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

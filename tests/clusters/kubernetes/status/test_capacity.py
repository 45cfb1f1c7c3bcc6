"""The requests of pods, and what unschedulable ones lack."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from meshgate_kubernetes.status.capacity import Cluster, requests, shortages
from tests.clusters.kubernetes.objects import Object, node, pod, unschedulable

MESSAGE = "0/2 nodes are available: 2 Insufficient memory, 1 Insufficient cpu."


def running(memory: str, phase: str = "Running") -> Object:
    """A pod on node0."""
    other = pod("other", phase=phase)
    other["spec"] |= {"nodeName": "node0", "containers": [{"resources": {"requests": {"memory": memory}}}]}
    return other


def test_a_shortage_counts_the_pods_of_each_node() -> None:
    cluster = Cluster([node("node0", memory="8Gi"), node("node1", memory="1Gi")], [running("6Gi")])
    (shortage,) = shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE)
    assert not shortage.impossible
    assert str(shortage) == "Insufficient memory: the pod requests 4Gi, no node has more than 2Gi free (2Gi short)"


class CountedPods(list[Object]):
    passes = 0

    def __iter__(self) -> Iterator[Object]:
        self.passes += 1
        return super().__iter__()


def test_the_pods_of_the_cluster_are_counted_once_for_any_number_of_pending_pods() -> None:
    others = CountedPods([running("6Gi")])
    cluster = Cluster([node("node0", memory="8Gi")], others)
    for _ in range(100):
        assert shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE)
    assert others.passes == 1


def test_finished_pods_use_no_resources() -> None:
    cluster = Cluster([node("node0", memory="8Gi")], [running("6Gi", phase="Succeeded")])
    assert shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE) == []


def test_a_request_beyond_the_largest_node_is_impossible() -> None:
    (shortage,) = shortages(unschedulable(MESSAGE, memory="16Gi"), Cluster([node(memory="8Gi")]), MESSAGE)
    assert shortage.impossible
    assert str(shortage) == "Insufficient memory: the pod requests 16Gi, the largest node has 8Gi (8Gi short)"


def test_without_access_to_the_nodes_there_are_no_shortages() -> None:
    assert shortages(unschedulable(MESSAGE, memory="16Gi"), None, MESSAGE) == []


def test_requests_are_those_of_all_containers_or_of_the_largest_init_container() -> None:
    def container(cpu: str) -> Object:
        return {"resources": {"requests": {"cpu": cpu}}}

    made = pod()
    made["spec"] = {"containers": [container("1"), container("500m")], "initContainers": [container("1")]}
    assert requests(made) == {"cpu": Decimal("1.5")}
    made["spec"]["initContainers"].append(container("4"))
    assert requests(made) == {"cpu": Decimal("4")}

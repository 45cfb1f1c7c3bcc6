"""What a pod requires of its node and no node has: labels, node affinity and tolerated taints."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate_kubernetes.manifests.pods import worker_template
from meshgate_kubernetes.manifests.spec import Spot
from meshgate_kubernetes.status.placement import mismatches
from tests.clusters.kubernetes.objects import Object, job, mesh, node, pod

NO_MATCH = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."


def labelled(name: str, labels: dict[str, str], *taints: tuple[str, str, str]) -> Object:
    found = node(name)
    found["metadata"]["labels"] = labels
    found["spec"] = {"taints": [dict(zip(("key", "value", "effect"), taint, strict=True)) for taint in taints]}
    return found


def requiring(*terms: list[dict[str, Any]], **selector: str) -> Object:
    """A pod with this node selector, and a node affinity of these terms."""
    made = pod(ready=False)
    made["spec"]["nodeSelector"] = selector
    if terms:
        required = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
        made["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return made


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


NODES = [labelled("one", {"gpu": "A100", "zone": "a", "cores": "8"}), labelled("two", {"gpu": "L4", "zone": "b"})]


def test_a_label_that_no_node_has_is_named_with_the_values_that_there_are() -> None:
    assert list(mismatches(requiring(gpu="H100", zone="a", pool="fast"), NODES, NO_MATCH)) == [
        "No node has the label gpu=H100: nodes have A100, L4",
        "No node has the label pool=fast: no node has this label",
    ]


def test_labels_that_different_nodes_have_are_named_with_the_node_that_has_most_of_them() -> None:
    closest = "No node has all the labels that the pod requires: node"
    assert list(mismatches(requiring(gpu="A100", zone="b"), NODES, NO_MATCH)) == [
        f"{closest} one comes closest, but lacks zone=b (it has a)"
    ]
    assert list(mismatches(requiring(gpu="L4", zone="b", cores="8"), NODES, NO_MATCH)) == [
        f"{closest} two comes closest, but lacks cores=8"
    ]
    excluding = requiring([expression("cores", "DoesNotExist")], gpu="A100", zone="a")
    assert list(mismatches(excluding, NODES, NO_MATCH)) == [
        f"{closest} one comes closest, but has cores=8, which the pod's node affinity excludes"
    ]


@pytest.mark.parametrize(
    ("required", "said"),
    [
        (("gpu", "In", "H100", "H200"), "No node has the label gpu=H100 or H200: nodes have A100, L4"),
        (("gpu", "NotIn", "A100", "L4"),
         "Every node has the label gpu=A100 or L4, which the pod's node affinity excludes"),
        (("pool", "Exists"), "No node has the label pool: no node has this label"),
        (("zone", "DoesNotExist"), "Every node has the label zone=a or b, which the pod's node affinity excludes"),
        (("cores", "Gt", "8"), "No node has the label cores>8: nodes have 8"),
        (("cores", "Lt", "8"), "No node has the label cores<8: nodes have 8"),
        (("gpu", "Gt", "1"), "No node has the label gpu>1: nodes have A100, L4"),
        (("gpu", "In", "A100"), None),
        (("gpu", "NotIn", "A100"), None),
        (("pool", "NotIn", "fast"), None),
        (("cores", "Exists"), None),
        (("cores", "DoesNotExist"), None),
        (("cores", "Gt", "7"), None),
        (("cores", "Lt", "9"), None),
    ],
)  # fmt: skip
def test_each_operator_of_a_node_affinity(required: tuple[str, ...], said: str | None) -> None:
    found = list(mismatches(requiring([expression(*required)]), NODES, NO_MATCH))
    assert found == ([said] if said else [])


def test_one_of_several_terms_is_enough() -> None:
    fast, high = [expression("pool", "Exists")], [expression("gpu", "In", "H100")]
    assert not list(mismatches(requiring(fast, [expression("zone", "In", "b")]), NODES, NO_MATCH))
    assert len(list(mismatches(requiring(fast, high, fast), NODES, NO_MATCH))) == 2


@pytest.mark.parametrize(("spot", "said"), [("never", 1), ("avoid", 0), ("allow", 0)])
def test_a_worker_that_avoids_spot_nodes_says_so(spot: Spot, said: int) -> None:
    template = worker_template(job(), mesh(spot=spot))
    nodes = [labelled(name, {"karpenter.sh/capacity-type": "spot"}) for name in ("one", "two")]
    found = list(mismatches(template, nodes, NO_MATCH))
    assert found == ['Every node has the label karpenter.sh/capacity-type=spot, which spot="never" excludes'] * said


def test_a_taint_that_keeps_a_pod_away_is_named_with_what_tolerates_it() -> None:
    made = pod(ready=False)
    made["spec"]["tolerations"] = [{"key": "spot", "operator": "Exists"}, {"key": "team", "value": "a"}]
    infra = ("dedicated", "infra", "NoSchedule")
    nodes = [
        labelled("one", {}, infra, ("spot", "", "NoExecute"), ("soft", "", "PreferNoSchedule")),
        labelled("two", {}, infra, ("team", "a", "NoSchedule")),
        labelled("three", {}, ("team", "b", "NoSchedule")),
    ]
    assert list(mismatches(made, nodes, "3 node(s) had taint {dedicated: infra}, that it didn't tolerate.")) == [
        '2 nodes have the taint dedicated=infra:NoSchedule, which tolerations=[{"key": "dedicated", "operator": '
        '"Exists"}] tolerates',
        'A node has the taint team=b:NoSchedule, which tolerations=[{"key": "team", "operator": "Exists"}] tolerates',
    ]


def test_cordoned_nodes_are_named_with_what_ends_that() -> None:
    nodes = [labelled(name, {}, ("node.kubernetes.io/unschedulable", "", "NoSchedule")) for name in ("two", "one")]
    for each in nodes:
        each["spec"]["unschedulable"] = True
    nodes.append(labelled("three", {}, ("dedicated", "infra", "NoSchedule")))
    message = (
        "0/3 nodes are available: 1 node(s) had taint {dedicated: infra}, that the pod didn't tolerate, "
        "2 node(s) were unschedulable."
    )
    assert list(mismatches(pod(ready=False), nodes, message)) == [
        'A node has the taint dedicated=infra:NoSchedule, which tolerations=[{"key": "dedicated", "operator": '
        '"Exists"}] tolerates',
        "2 nodes are cordoned, which kubectl uncordon one two ends",
    ]
    for reason in (
        "were unschedulable",
        "had taint {node.kubernetes.io/unschedulable: }, that the pod didn't tolerate",
    ):
        assert list(mismatches(pod(ready=False), nodes[:1], f"0/1 nodes are available: 1 node(s) {reason}.")) == [
            "A node is cordoned, which kubectl uncordon two ends"
        ]


def test_labels_are_named_without_nodes_too_and_not_for_other_reasons() -> None:
    assert not list(mismatches(requiring(gpu="H100"), NODES, "0/2 nodes are available: 2 Insufficient cpu."))
    assert list(mismatches(requiring(gpu="H100"), [], NO_MATCH)) == [
        "No node has the label gpu=H100: no node has this label"
    ]

"""The resources that nodes have and pods request, and what an unschedulable pod lacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from meshgate_kubernetes.manifests.quantity import format_quantity, parse_quantity
from meshgate_kubernetes.manifests.spec import Object

_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+?)(?=[,.;]?(?:\s|$))")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes, and the pods of all namespaces (empty if listing them is forbidden)."""

    nodes: Sequence[Object]
    pods: Sequence[Object] = ()
    known_shortages: dict[tuple[str, str], list[Shortage]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By the scheduler's message and the pod's resources, which a thousand pods have in common."""

    def most(self, resource: str) -> tuple[Decimal, Decimal]:
        """The most that a node has of ``resource``, in total and free."""
        total = {node["metadata"]["name"]: _allocatable(node, resource) for node in self.nodes}
        free = dict(total)
        for pod in self.pods:
            node = pod["spec"].get("nodeName")
            if node in free and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                free[node] -= requests(pod).get(resource, Decimal(0))
        return max(total.values(), default=Decimal(0)), max([*free.values(), Decimal(0)])


@dataclass(frozen=True, slots=True)
class Shortage:
    """A pod requests more of ``resource`` than any node has free (``most_free``) or in total (``largest``)."""

    resource: str
    requested: Decimal
    largest: Decimal
    most_free: Decimal

    @property
    def impossible(self) -> bool:
        """Whether not even an empty node could run the pod."""
        return self.requested > self.largest

    def __str__(self) -> str:
        requested, largest = (
            format_quantity(self.requested, self.resource),
            format_quantity(self.largest, self.resource),
        )
        if self.impossible:
            missing = format_quantity(self.requested - self.largest, self.resource)
            return (
                f"Insufficient {self.resource}: the pod requests {requested}, the largest node has {largest} "
                f"({missing} short)"
            )
        free = format_quantity(self.most_free, self.resource)
        missing = format_quantity(self.requested - self.most_free, self.resource)
        return (
            f"Insufficient {self.resource}: the pod requests {requested}, no node has more than {free} free "
            f"({missing} short)"
        )


def shortages(pod: Object, cluster: Cluster | None, scheduler_message: str) -> list[Shortage]:
    """The resources that the scheduler's message calls insufficient, with amounts."""
    if cluster is None:
        return []
    containers = [pod["spec"].get(key) or [] for key in ("containers", "initContainers")]
    key = scheduler_message, repr([[each.get("resources") for each in group] for group in containers])
    if key not in cluster.known_shortages:
        cluster.known_shortages[key] = _shortages(pod, cluster, scheduler_message)
    return cluster.known_shortages[key]


def _shortages(pod: Object, cluster: Cluster, scheduler_message: str) -> list[Shortage]:
    requested = requests(pod)
    found = []
    for resource in dict.fromkeys(_INSUFFICIENT.findall(scheduler_message)):
        if resource not in requested:
            continue
        largest, most_free = cluster.most(resource)
        if requested[resource] > most_free:
            found.append(Shortage(resource, requested[resource], largest, most_free))
    return found


def requests(pod: Object) -> dict[str, Decimal]:
    """The requests that the scheduler counts: the sum of the containers, or the largest init container if larger."""
    total: dict[str, Decimal] = {}
    for container in pod["spec"].get("containers") or []:
        for resource, amount in _requests(container).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in pod["spec"].get("initContainers") or []:
        for resource, amount in _requests(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def _requests(container: Object) -> dict[str, Decimal]:
    amounts = (container.get("resources") or {}).get("requests") or {}
    return {resource: parse_quantity(amount) for resource, amount in amounts.items()}


def _allocatable(node: Object, resource: str) -> Decimal:
    return parse_quantity(node.get("status", {}).get("allocatable", {}).get(resource, "0"))

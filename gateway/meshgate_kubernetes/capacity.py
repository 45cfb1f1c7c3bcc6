"""What the nodes of a cluster have, what is left of it, and what a pod lacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from meshgate_kubernetes.quantity import format_quantity, parse_quantity
from meshgate_kubernetes.spec import Object

__all__ = ["Cluster", "Shortage", "requests", "shortages"]

_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+?)(?=[,.;]?(?:\s|$))")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes, and the pods of all namespaces (none where they may not be listed)."""

    nodes: Sequence[Object]
    pods: Sequence[Object] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """A pod asks for more of ``resource`` than any node has free (``most_free``), or has at all (``largest``)."""

    resource: str
    wanted: Decimal
    largest: Decimal
    most_free: Decimal

    @property
    def impossible(self) -> bool:
        """No node could ever hold the pod, however idle."""
        return self.wanted > self.largest

    def __str__(self) -> str:
        wanted, largest = format_quantity(self.wanted, self.resource), format_quantity(self.largest, self.resource)
        if self.impossible:
            lacking = format_quantity(self.wanted - self.largest, self.resource)
            return (
                f"Insufficient {self.resource}: it asks for {wanted}, the largest node has {largest} ({lacking} short)"
            )
        free = format_quantity(self.most_free, self.resource)
        lacking = format_quantity(self.wanted - self.most_free, self.resource)
        return (
            f"Insufficient {self.resource}: it asks for {wanted}, no node has more than {free} free ({lacking} short)"
        )


def shortages(pod: Object, cluster: Cluster | None, said: str) -> list[Shortage]:
    """The resources that the scheduler's message ``said`` calls insufficient, with the numbers."""
    if cluster is None:
        return []
    wanted = requests(pod)
    found = []
    for resource in dict.fromkeys(_INSUFFICIENT.findall(said)):
        if resource not in wanted:
            continue
        has = {node["metadata"]["name"]: _allocatable(node, resource) for node in cluster.nodes}
        free = dict(has)
        for other in cluster.pods:
            node = other["spec"].get("nodeName")
            if node in free and other.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                free[node] -= requests(other).get(resource, Decimal(0))
        largest = max(has.values(), default=Decimal(0))
        most_free = max(max(free.values(), default=Decimal(0)), Decimal(0))
        if wanted[resource] > most_free:
            found.append(Shortage(resource, wanted[resource], largest, most_free))
    return found


def requests(pod: Object) -> dict[str, Decimal]:
    """What the scheduler counts for a pod: its containers together, or its largest init container if that is more."""
    total: dict[str, Decimal] = {}
    for container in pod["spec"].get("containers") or []:
        for resource, amount in _requests(container).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in pod["spec"].get("initContainers") or []:
        for resource, amount in _requests(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def _requests(container: Object) -> dict[str, Decimal]:
    asked = (container.get("resources") or {}).get("requests") or {}
    return {resource: parse_quantity(amount) for resource, amount in asked.items()}


def _allocatable(node: Object, resource: str) -> Decimal:
    return parse_quantity(node.get("status", {}).get("allocatable", {}).get(resource, "0"))

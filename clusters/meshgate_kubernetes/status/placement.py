"""Why no node takes a pod whatever is free: labels, node affinity, taints and cordons. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshgate_kubernetes.manifests.pods import SPOT_LABELS
from meshgate_kubernetes.manifests.spec import Object

_VALUES_SHOWN = 8
_CORDON = "node.kubernetes.io/unschedulable"  # the taint of a cordoned node


def mismatches(pod: Object, nodes: Sequence[Object], message: str) -> Iterator[str]:
    """What the pod requires and no node has, with the values that there are, and taints and cordons that keep it
    away.

    ``message`` is the scheduler's.
    """
    if "didn't match" in message:
        yield from dict.fromkeys(_unmatched(pod, nodes))
    if "taint" in message:
        tolerations = pod["spec"].get("tolerations") or []
        taints = [taint for node in nodes for taint in _taints(node)]
        kept = Counter(
            (_taint_text(each), each["key"])
            for each in taints
            if each["key"] != _CORDON and not _tolerated(each, tolerations)
        )
        for (text, key), count in sorted(kept.items()):
            having = "A node has" if count == 1 else f"{count} nodes have"
            yield f'{having} the taint {text}, which tolerations=[{{"key": "{key}", "operator": "Exists"}}] tolerates'
    if "were unschedulable" in message or _CORDON in message:
        cordoned = sorted(node["metadata"]["name"] for node in nodes if node.get("spec", {}).get("unschedulable"))
        if cordoned:
            named = " ".join([*cordoned[:_VALUES_SHOWN], *(["…"] if len(cordoned) > _VALUES_SHOWN else [])])
            are = "A node is" if len(cordoned) == 1 else f"{len(cordoned)} nodes are"
            yield f"{are} cordoned, which kubectl uncordon {named} ends"


@dataclass(frozen=True, slots=True)
class _Requirement:
    """What a pod requires of a label of its node: a NodeSelectorRequirement of Kubernetes."""

    key: str
    operator: str
    values: tuple[str, ...]

    @property
    def excludes(self) -> bool:
        """Whether a node without the label meets it."""
        return self.operator in ("NotIn", "DoesNotExist")

    def met_by(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if value is None:
            return self.excludes
        if self.operator in ("Gt", "Lt"):
            try:
                difference = int(value) - int(self.values[0])
            except ValueError:
                return False
            return difference > 0 if self.operator == "Gt" else difference < 0
        if self.operator in ("Exists", "DoesNotExist"):
            return self.operator == "Exists"
        return (value in self.values) is (self.operator == "In")

    def __str__(self) -> str:
        sign = {"Gt": ">", "Lt": "<"}.get(self.operator, "=")
        return f"{self.key}{sign}{' or '.join(self.values)}" if self.values else self.key


def _alternatives(pod: Object) -> list[list[_Requirement]]:
    """A node has to meet all of one of these."""
    spec = pod["spec"]
    selector = [_Requirement(key, "In", (value,)) for key, value in (spec.get("nodeSelector") or {}).items()]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [term.get("matchExpressions") or [] for term in required.get("nodeSelectorTerms") or [{}]]
    return [
        [*selector, *(_Requirement(each["key"], each["operator"], tuple(each.get("values") or ())) for each in term)]
        for term in terms
    ]


def _unmatched(pod: Object, nodes: Sequence[Object]) -> Iterator[str]:
    labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in nodes}
    alternatives = _alternatives(pod)
    if any(all(each.met_by(of) for each in wanted) for wanted in alternatives for of in labels.values()):
        return  # something else is wrong with that node
    for wanted in alternatives:
        unmet = [each for each in wanted if not any(each.met_by(of) for of in labels.values())]
        for each in unmet:
            known = sorted({of[each.key] for of in labels.values() if each.key in of})[:_VALUES_SHOWN]
            if each.excludes:
                yield f"Every node has the label {each.key}={' or '.join(known)}, which {_excluder(each)} excludes"
            else:
                others = f"nodes have {', '.join(known)}" if known else "no node has this label"
                yield f"No node has the label {each}: {others}"
        if labels and not unmet:
            name = max(labels, key=lambda name: sum(each.met_by(labels[name]) for each in wanted))
            lacks = [_lacks(each, labels[name]) for each in wanted if not each.met_by(labels[name])]
            yield f"No node has all the labels that the pod requires: node {name} comes closest, but {'; '.join(lacks)}"


def _lacks(requirement: _Requirement, labels: Mapping[str, str]) -> str:
    value = labels.get(requirement.key)
    if requirement.excludes:
        return f"has {requirement.key}={value}, which {_excluder(requirement)} excludes"
    return f"lacks {requirement}" + (f" (it has {value})" if value is not None else "")


def _excluder(requirement: _Requirement) -> str:
    return 'spot="never"' if requirement.key in SPOT_LABELS else "the pod's node affinity"


def _taints(node: Object) -> list[Object]:
    """Those that keep pods away."""
    return [each for each in node.get("spec", {}).get("taints") or [] if each["effect"] != "PreferNoSchedule"]


def _taint_text(taint: Object) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def _tolerated(taint: Object, tolerations: Sequence[Object]) -> bool:
    return any(
        each.get("effect") in (None, "", taint["effect"])
        and (
            each.get("key") in (None, "", taint["key"])
            if each.get("operator") == "Exists"
            else each.get("key") == taint["key"] and each.get("value", "") == taint.get("value", "")
        )
        for each in tolerations
    )

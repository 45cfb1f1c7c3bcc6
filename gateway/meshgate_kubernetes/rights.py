"""The rights that making a job takes, and which of them a user lacks: asked before anything is made.

What is only nice to have (events, logs, nodes) is not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshgate_kubernetes import manifests
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden
from meshgate_kubernetes.kinds import KINDS
from meshgate_kubernetes.spec import JobSpec, Object

__all__ = ["Right", "needed", "require"]


@dataclass(frozen=True, slots=True)
class Right:
    """To ``verb`` objects of ``kind``, or their ``subresource``, in a namespace."""

    verb: str
    kind: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """As people and RBAC write it: ``statefulsets.apps``, ``pods/portforward``."""
        return f"{KINDS[self.kind].plural}/{self.subresource}" if self.subresource else KINDS[self.kind].resource

    def granted_by(self, rules: Iterable[Object]) -> bool:
        """Whether one of ``rules`` grants it for every object."""
        known = KINDS[self.kind]
        resource = f"{known.plural}/{self.subresource}" if self.subresource else known.plural
        wanted = (("verbs", self.verb), ("apiGroups", known.group), ("resources", resource))
        return any(
            not rule.get("resourceNames") and all({value, "*"} & set(rule.get(key) or []) for key, value in wanted)
            for rule in rules
        )

    def deed(self, namespace: str) -> dict[str, str]:
        """As a review of access wants it (resourceAttributes)."""
        known = KINDS[self.kind]
        subresource = {"subresource": self.subresource} if self.subresource else {}
        return {
            "namespace": namespace,
            "verb": self.verb,
            "group": known.group,
            "resource": known.plural,
            **subresource,
        }


def needed(spec: JobSpec, *, forward: bool) -> Iterator[Right]:
    """What making, watching, reaching and ending ``spec`` takes; ``forward``: by a port-forward."""
    objects = [*manifests.gateway_objects(spec)]
    objects += [obj for mesh in spec.meshes for obj in manifests.mesh_objects(spec, mesh)]
    for kind in dict.fromkeys(["ConfigMap", "Secret", *(obj["kind"] for obj in objects)]):
        yield Right("create", kind)
    # The gateway's own rights are among these: nobody may give away what they have not.
    for kind in ("ConfigMap", "Pod"):
        for verb in ("get", "list", "watch"):
            yield Right(verb, kind)
    yield Right("get", "Secret")
    yield Right("delete", "ConfigMap")
    if forward:  # a websocket is a GET; newer servers want the right to create as well
        yield Right("get", "Pod", "portforward")
        yield Right("create", "Pod", "portforward")


def require(api: Api, spec: JobSpec, *, forward: bool) -> None:
    """Raises Forbidden with every right that is missing."""
    rules = api.rules(spec.namespace)
    unlisted = [right for right in needed(spec, forward=forward) if not right.granted_by(rules)]
    missing = [right for right in unlisted if not api.may(right.deed(spec.namespace))]
    if missing:
        first = missing[0]
        user = api.user_who_may_not(first.verb, first.kind, spec.namespace) if not first.subresource else ""
        raise Forbidden(first.verb, first.resource, spec.namespace, user=user, detail=_others(missing))


def _others(missing: Sequence[Right]) -> str:
    by_verb: dict[str, list[str]] = {}
    for right in missing[1:]:
        by_verb.setdefault(right.verb, []).append(right.resource)
    told = [f"nor {verb} {', '.join(resources)}" for verb, resources in by_verb.items()]
    return "; ".join([*told, "docs/kubernetes.md has a Role that suffices"])

"""The permissions that a job needs, checked before anything is created.

Permissions that only improve diagnostics (events, logs, nodes) are not required.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshgate_kubernetes.api.client import KINDS, Api
from meshgate_kubernetes.errors import Forbidden
from meshgate_kubernetes.manifests import job_objects as manifests
from meshgate_kubernetes.manifests.spec import JobSpec, Object


@dataclass(frozen=True, slots=True)
class Permission:
    """The permission to ``verb`` objects of ``kind``, or their ``subresource``, in a namespace."""

    verb: str
    kind: str
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The name that kubectl prints: ``statefulsets.apps``, ``pods/portforward``."""
        return f"{KINDS[self.kind].plural}/{self.subresource}" if self.subresource else KINDS[self.kind].resource

    def granted_by(self, rules: Iterable[Object]) -> bool:
        """Whether one of the RBAC ``rules`` grants it for every object name."""
        known = KINDS[self.kind]
        resource = f"{known.plural}/{self.subresource}" if self.subresource else known.plural
        required = (("verbs", self.verb), ("apiGroups", known.group), ("resources", resource))
        return any(
            not rule.get("resourceNames") and all({value, "*"} & set(rule.get(key) or []) for key, value in required)
            for rule in rules
        )

    def resource_attributes(self, namespace: str) -> dict[str, str]:
        """The resourceAttributes of an access review."""
        known = KINDS[self.kind]
        subresource = {"subresource": self.subresource} if self.subresource else {}
        return {
            "namespace": namespace,
            "verb": self.verb,
            "group": known.group,
            "resource": known.plural,
            **subresource,
        }


def required_permissions(spec: JobSpec, *, forward: bool) -> Iterator[Permission]:
    """The permissions to create, watch, reach and delete ``spec``; ``forward``: reach it by port-forward."""
    objects = [*manifests.gateway_objects(spec)]
    objects += [obj for mesh in spec.meshes for obj in manifests.mesh_objects(spec, mesh)]
    for kind in dict.fromkeys(["ConfigMap", "Secret", *(obj["kind"] for obj in objects)]):
        if kind not in manifests.OPTIONAL_KINDS:
            yield Permission("create", kind)
    # These include the permissions of the gateway's Role, because users can only grant permissions they have.
    for kind in ("ConfigMap", "Pod"):
        for verb in ("get", "list", "watch"):
            yield Permission(verb, kind)
    yield Permission("get", "Secret")
    yield Permission("delete", "ConfigMap")
    if forward:  # a websocket is a GET request, but newer API servers also require create
        yield Permission("get", "Pod", "portforward")
        yield Permission("create", "Pod", "portforward")


def require_permissions(api: Api, spec: JobSpec, *, forward: bool) -> None:
    """Raises Forbidden with all missing permissions."""
    rules = api.list_rules(spec.namespace)
    unlisted = [each for each in required_permissions(spec, forward=forward) if not each.granted_by(rules)]
    missing = [each for each in unlisted if not api.is_allowed(each.resource_attributes(spec.namespace))]
    if missing:
        first = missing[0]
        user = api.denied_user(first.verb, first.kind, spec.namespace) if not first.subresource else ""
        raise Forbidden(first.verb, first.resource, spec.namespace, user=user, detail=_others(missing))


def _others(missing: Sequence[Permission]) -> str:
    by_verb: dict[str, list[str]] = {}
    for permission in missing[1:]:
        by_verb.setdefault(permission.verb, []).append(permission.resource)
    others = [f"nor {verb} {', '.join(resources)}" for verb, resources in by_verb.items()]
    hint = "docs/kubernetes.md has a Role with the required permissions"
    if any(KINDS[permission.kind].group == "rbac.authorization.k8s.io" for permission in missing):
        hint += "; without permissions for roles, name an existing account: gateway=Compute(service_account_name=…)"
    return "; ".join([*others, hint])

"""The permissions that a job needs, and the error for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden
from meshgate_kubernetes.jobs.permissions import Permission, require_permissions, required_permissions
from tests.clusters.kubernetes.objects import Object, found_mesh, job, mesh


class Server:
    """Lists ``rules``; also grants ``unlisted`` permissions, as a webhook authorizer does."""

    def __init__(self, *rules: Object, unlisted: tuple[tuple[str, str], ...] = ()) -> None:
        self._rules, self._unlisted = list(rules), unlisted
        self.checked: list[Mapping[str, str]] = []

    def list_rules(self, namespace: str) -> list[Object]:
        return self._rules

    def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        self.checked.append(attributes)
        return (attributes["verb"], attributes["resource"]) in self._unlisted

    def denied_user(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


ALL = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
CORE = {"verbs": ["create", "get", "list", "watch", "delete"], "apiGroups": [""]}
ALL_OF_CORE = {**CORE, "resources": ["configmaps", "secrets", "services", "serviceaccounts", "pods"]}
APPS = {"verbs": ["*"], "apiGroups": ["apps"], "resources": ["*"]}
RBAC = {"verbs": ["*"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]}
NETWORK = {"verbs": ["*"], "apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"]}


def missing(server: Server, *, forward: bool = False) -> str:
    with pytest.raises(Forbidden) as caught:
        require_permissions(cast("Api", server), job(), forward=forward)
    return str(caught.value)


def test_a_user_with_all_permissions_needs_no_further_checks() -> None:
    server = Server(ALL)
    require_permissions(cast("Api", server), job(), forward=True)
    assert server.checked == []


def test_all_missing_permissions_are_reported_together() -> None:
    assert missing(Server(ALL_OF_CORE, APPS)) == (
        "bob may not create roles.rbac.authorization.k8s.io in namespace 'team': "
        "nor create rolebindings.rbac.authorization.k8s.io, networkpolicies.networking.k8s.io; "
        "docs/kubernetes.md has a Role with the required permissions; without permissions for roles, name an existing "
        "account: gateway=Compute(service_account_name=…)"
    )


def test_a_single_missing_verb_is_reported() -> None:
    without_delete = {**ALL_OF_CORE, "verbs": ["create", "get", "list", "watch"]}
    assert "bob may not delete configmaps in namespace 'team'" in missing(Server(without_delete, APPS, RBAC, NETWORK))


def test_a_port_forward_needs_its_own_permission() -> None:
    server = Server(ALL_OF_CORE, APPS, RBAC, NETWORK)
    require_permissions(cast("Api", server), job(), forward=False)
    assert "may not get pods/portforward in namespace 'team'" in missing(server, forward=True)


def test_a_permission_for_named_objects_does_not_cover_all() -> None:
    by_name = {**ALL_OF_CORE, "resourceNames": ["one"]}
    assert not Permission("create", "Secret").granted_by([by_name])


def test_permissions_that_the_server_does_not_list_are_checked_one_by_one() -> None:
    every = tuple(
        (each.verb, each.resource_attributes("team")["resource"]) for each in required_permissions(job(), forward=True)
    )
    server = Server(unlisted=every)
    require_permissions(cast("Api", server), job(), forward=True)
    assert {"namespace": "team", "verb": "create", "group": "apps", "resource": "statefulsets"} in server.checked
    assert server.checked[-1]["subresource"] == "portforward"


def test_only_the_kinds_that_the_job_creates_are_required() -> None:
    def kinds(*meshes: object) -> set[str]:
        return {each.kind for each in required_permissions(job(*meshes), forward=False) if each.verb == "create"}  # type: ignore[arg-type]

    assert "StatefulSet" in kinds(mesh())
    assert "StatefulSet" not in kinds(found_mesh())
    assert "MonarchMesh" in kinds(mesh().model_copy(update={"way": "monarchmesh"}))

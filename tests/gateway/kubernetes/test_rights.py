"""Which rights making a job takes, and how those are told that a user lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden
from meshgate_kubernetes.rights import Right, needed, require
from tests.gateway.kubernetes.objects import Object, found_mesh, job, mesh


class Server:
    """Lists ``rules``; ``unlisted`` are rights that it grants all the same, as a webhook does."""

    def __init__(self, *rules: Object, unlisted: tuple[tuple[str, str], ...] = ()) -> None:
        self._rules, self._unlisted = list(rules), unlisted
        self.asked: list[Mapping[str, str]] = []

    def rules(self, namespace: str) -> list[Object]:
        return self._rules

    def may(self, deed: Mapping[str, str]) -> bool:
        self.asked.append(deed)
        return (deed["verb"], deed["resource"]) in self._unlisted

    def user_who_may_not(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


ALL = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
CORE = {"verbs": ["create", "get", "list", "watch", "delete"], "apiGroups": [""]}
ALL_OF_CORE = {**CORE, "resources": ["configmaps", "secrets", "services", "serviceaccounts", "pods"]}
APPS = {"verbs": ["*"], "apiGroups": ["apps"], "resources": ["*"]}
RBAC = {"verbs": ["*"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]}
NETWORK = {"verbs": ["*"], "apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"]}


def missing(server: Server, *, forward: bool = False) -> str:
    with pytest.raises(Forbidden) as caught:
        require(cast("Api", server), job(), forward=forward)
    return str(caught.value)


def test_who_may_do_all_is_asked_about_nothing_more() -> None:
    server = Server(ALL)
    require(cast("Api", server), job(), forward=True)
    assert server.asked == []


def test_every_right_that_is_missing_is_named_at_once() -> None:
    assert missing(Server(ALL_OF_CORE, APPS)) == (
        "bob may not create roles.rbac.authorization.k8s.io in namespace 'team': "
        "nor create rolebindings.rbac.authorization.k8s.io, networkpolicies.networking.k8s.io; "
        "docs/kubernetes.md has a Role that suffices"
    )


def test_one_verb_that_is_missing_is_named() -> None:
    without_delete = {**ALL_OF_CORE, "verbs": ["create", "get", "list", "watch"]}
    assert "bob may not delete configmaps in namespace 'team'" in missing(Server(without_delete, APPS, RBAC, NETWORK))


def test_a_port_forward_takes_a_right_of_its_own() -> None:
    server = Server(ALL_OF_CORE, APPS, RBAC, NETWORK)
    require(cast("Api", server), job(), forward=False)
    assert "may not get pods/portforward in namespace 'team'" in missing(server, forward=True)


def test_a_right_for_some_objects_by_name_is_not_one_for_all() -> None:
    by_name = {**ALL_OF_CORE, "resourceNames": ["one"]}
    assert not Right("create", "Secret").granted_by([by_name])


def test_rights_that_the_server_cannot_list_are_asked_for_one_by_one() -> None:
    every = tuple((right.verb, right.deed("team")["resource"]) for right in needed(job(), forward=True))
    server = Server(unlisted=every)
    require(cast("Api", server), job(), forward=True)
    assert {"namespace": "team", "verb": "create", "group": "apps", "resource": "statefulsets"} in server.asked
    assert server.asked[-1]["subresource"] == "portforward"


def test_only_what_the_job_makes_is_needed() -> None:
    def kinds(*meshes: object) -> set[str]:
        return {right.kind for right in needed(job(*meshes), forward=False) if right.verb == "create"}  # type: ignore[arg-type]

    assert "StatefulSet" in kinds(mesh())
    assert "StatefulSet" not in kinds(found_mesh())
    assert "MonarchMesh" in kinds(mesh().model_copy(update={"way": "monarchmesh"}))

"""The text and the facts of a missing permission."""

from __future__ import annotations

from meshgate_kubernetes.errors import Forbidden


def test_a_missing_permission_names_user_verb_resource_and_namespace() -> None:
    error = Forbidden("create", "statefulsets.apps", "team", user="bob", detail="see the docs")
    assert str(error) == "bob may not create statefulsets.apps in namespace 'team': see the docs"
    assert (error.user, error.verb, error.resource, error.namespace) == ("bob", "create", "statefulsets.apps", "team")


def test_user_and_namespace_are_optional() -> None:
    assert str(Forbidden("list", "nodes", "")) == "the current user may not list nodes"

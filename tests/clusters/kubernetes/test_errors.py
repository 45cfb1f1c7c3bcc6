"""The text and the facts of a missing permission."""

from __future__ import annotations

import json

import pytest

from meshgate_kubernetes.errors import (
    Conflict,
    Forbidden,
    KubernetesError,
    NotFound,
    Rejected,
    Unauthenticated,
    rejection_error,
)


def test_a_missing_permission_names_user_verb_resource_and_namespace() -> None:
    error = Forbidden("create", "statefulsets.apps", "team", user="bob", detail="see the docs")
    assert str(error) == "bob may not create statefulsets.apps in namespace 'team': see the docs"
    assert (error.user, error.verb, error.resource, error.namespace) == ("bob", "create", "statefulsets.apps", "team")


def test_user_and_namespace_are_optional() -> None:
    assert str(Forbidden("list", "nodes", "")) == "the current user may not list nodes"


def translate(code: int, message: str = "", **status: object) -> KubernetesError:
    data = json.dumps({"kind": "Status", "message": message, **status}).encode()
    return rejection_error(
        code, data, host="https://cluster", source="the kubeconfig here", request="POST /api/v1/pods"
    )


def test_a_missing_permission_is_parsed_from_the_message() -> None:
    error = translate(
        403,
        'statefulsets.apps is forbidden: User "bob" cannot create resource "statefulsets" in API group "apps" in the '
        'namespace "team"',
    )
    assert isinstance(error, Forbidden)
    assert (error.user, error.verb, error.resource, error.namespace) == ("bob", "create", "statefulsets.apps", "team")


def test_a_role_that_grants_what_its_creator_may_not_do_is_a_missing_permission() -> None:
    error = translate(
        403,
        'roles.rbac.authorization.k8s.io "trainer-gateway" is forbidden: user "bob" (groups=["all"]) is '
        "attempting to grant RBAC permissions not currently held:\n"
        '{APIGroups:[""], Resources:["events"], Verbs:["list" "watch"]}',
    )
    assert isinstance(error, Forbidden)
    assert (error.verb, error.resource) == ("create", "roles.rbac.authorization.k8s.io")
    assert 'Resources:["events"]' in str(error)


@pytest.mark.parametrize(
    "what", ['list resource "pods" in API group "" in the namespace "team"', 'get path "/apis/monarch.pytorch.org/v1"']
)
def test_missing_credentials_are_an_authentication_error(what: str) -> None:
    error = translate(403, f'forbidden: User "system:anonymous" cannot {what}')
    assert isinstance(error, Unauthenticated)
    assert "the kubeconfig here provides no credentials" in str(error)


def test_rejected_credentials_are_reported_with_their_source() -> None:
    error = translate(401, "Unauthorized")
    assert isinstance(error, Unauthenticated)
    assert "https://cluster does not accept the credentials of the kubeconfig here" in str(error)


def test_the_error_for_a_missing_namespace_says_how_to_create_it() -> None:
    error = translate(404, 'namespaces "team" not found', details={"kind": "namespaces", "name": "team"})
    assert isinstance(error, NotFound)
    assert "namespace 'team' does not exist in the cluster at https://cluster" in str(error)
    assert "kubectl create namespace team" in str(error)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", Conflict),
        (409, "Conflict", Conflict),
        (409, "Other", Rejected),
        (422, "Invalid", Rejected),
        (500, "InternalError", Rejected),
    ],
)
def test_other_errors_keep_the_message_of_the_server(code: int, reason: str, kind: type[KubernetesError]) -> None:
    error = translate(code, "because", reason=reason)
    assert type(error) is kind
    assert "because" in str(error)


def test_a_response_that_is_not_a_status_object_is_quoted() -> None:
    error = rejection_error(502, b"Bad Gateway\n", host="h", source="s", request="GET /version")
    assert str(error) == "Bad Gateway (HTTP 502 for GET /version)"


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (
            429,
            "too many requests",
            ". The API server, or a proxy before it, is overloaded or restarting: try again later",
        ),
        (503, "unavailable", ". The API server, or a proxy before it, is overloaded or restarting: try again later"),
        (
            403,
            "unable to create new content in namespace team because it is being terminated",
            ". Choose another namespace, or wait until this one is gone and create it again",
        ),
        (422, "the name is too long", ""),
    ],
)
def test_a_rejection_has_its_remedy(code: int, message: str, remedy: str) -> None:
    error = translate(code, message)
    assert isinstance(error, Rejected)
    assert str(error) == f"{message} (HTTP {code} for POST /api/v1/pods){remedy}"

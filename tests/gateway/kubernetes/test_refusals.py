"""What an API server's answers mean, in a sentence for a person."""

from __future__ import annotations

import json

import pytest

from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Refused, Unauthenticated
from meshgate_kubernetes.refusals import refusal


def told(code: int, message: str = "", **status: object) -> KubernetesError:
    data = json.dumps({"kind": "Status", "message": message, **status}).encode()
    return refusal(code, data, host="https://cluster", source="the kubeconfig here", request="POST /api/v1/pods")


def test_a_right_that_is_missing_is_read_out_of_the_message() -> None:
    error = told(
        403,
        'statefulsets.apps is forbidden: User "bob" cannot create resource "statefulsets" in API group "apps" in the '
        'namespace "team"',
    )
    assert isinstance(error, Forbidden)
    assert (error.user, error.verb, error.resource, error.namespace) == ("bob", "create", "statefulsets.apps", "team")


@pytest.mark.parametrize(
    "what", ['list resource "pods" in API group "" in the namespace "team"', 'get path "/apis/monarch.pytorch.org/v1"']
)
def test_nobody_is_told_to_log_in(what: str) -> None:
    error = told(403, f'forbidden: User "system:anonymous" cannot {what}')
    assert isinstance(error, Unauthenticated)
    assert "the kubeconfig here gives no credentials" in str(error)


def test_credentials_that_are_not_accepted_name_where_they_are_from() -> None:
    error = told(401, "Unauthorized")
    assert isinstance(error, Unauthenticated)
    assert "https://cluster does not accept the credentials of the kubeconfig here" in str(error)


def test_a_namespace_that_is_not_there_says_how_to_make_it() -> None:
    error = told(404, 'namespaces "team" not found', details={"kind": "namespaces", "name": "team"})
    assert isinstance(error, NotFound)
    assert "no namespace 'team' in the cluster at https://cluster" in str(error)
    assert "kubectl create namespace team" in str(error)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", Conflict),
        (409, "Conflict", Conflict),
        (409, "Other", Refused),
        (422, "Invalid", Refused),
        (500, "InternalError", Refused),
    ],
)
def test_others_keep_the_servers_words(code: int, reason: str, kind: type[KubernetesError]) -> None:
    error = told(code, "because", reason=reason)
    assert type(error) is kind
    assert "because" in str(error)


def test_an_answer_that_is_no_status_is_told_as_it_is() -> None:
    error = refusal(502, b"Bad Gateway\n", host="h", source="s", request="GET /version")
    assert str(error) == "Bad Gateway (HTTP 502 to GET /version)"

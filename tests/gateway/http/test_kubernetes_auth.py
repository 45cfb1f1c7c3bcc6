"""Kubernetes identities that the gateway accepts besides its token."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast

import pytest
from pydantic import SecretStr

from meshgate_gateway.http import kubernetes_auth
from meshgate_gateway.http.auth import Denied, Identity, TokenAuthenticator
from meshgate_gateway.http.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_gateway.http.messages import HeadParser, Request
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, Unreachable
from tests.clusters.kubernetes.fake_api import FakeApi

TOKEN = "correct-horse-battery-staple"
EXEC = ("alice", "create", "pods/exec")


@pytest.fixture
def api() -> FakeApi:
    """Alice may exec into pods, Bob may not."""
    api = FakeApi()
    api.users = {"alices": {"username": "alice", "groups": ["dev"]}, "bobs": {"username": "bob"}}
    api.permissions = {EXEC}
    return api


def request(token: str | None) -> Request:
    lines = ["GET / HTTP/1.1", *([f"Authorization: Bearer {token}"] if token else []), "", ""]
    parsed = HeadParser().feed("\r\n".join(lines).encode())
    assert parsed is not None
    return parsed


def authenticate(api: FakeApi, *tokens: str | None) -> list[Identity | Denied]:
    """The results of one authenticator for the tokens, in order."""
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def run() -> list[Identity | Denied]:
        return [await authenticator.authenticate(request(token)) for token in tokens]

    return asyncio.run(run())


def denied(api: FakeApi, token: str | None) -> Denied:
    (result,) = authenticate(api, token)
    assert isinstance(result, Denied)
    return result


def test_the_gateways_token_is_accepted_without_an_api_call(api: FakeApi) -> None:
    assert authenticate(api, TOKEN) == [Identity("job")]
    assert api.reviews == 0


def test_an_identity_that_may_exec_into_pods_is_accepted_by_name(api: FakeApi) -> None:
    assert authenticate(api, "alices") == [Identity("kubernetes:alice")]


def test_an_identity_without_permission_gets_the_missing_verb(api: FakeApi) -> None:
    result = denied(api, "bobs")
    assert result.status is HTTPStatus.FORBIDDEN
    assert result.reason == (
        "bob may not create pods/exec in namespace 'team', which running code in the job's pods requires"
    )


def test_an_expired_token_is_denied(api: FakeApi) -> None:
    result = denied(api, "expired")
    assert result.status is HTTPStatus.UNAUTHORIZED
    assert "it may have expired" in result.reason


def test_a_request_without_a_token_causes_no_api_call(api: FakeApi) -> None:
    assert "no token was presented" in denied(api, None).reason
    assert api.reviews == 0


@pytest.mark.parametrize("token", ["alices", "bobs", "expired"])
def test_an_unavailable_api_server_is_a_temporary_error(api: FakeApi, token: str) -> None:
    api.down = Unreachable("the API server does not answer")
    result = denied(api, token)
    assert result.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert "the API server does not answer" in result.reason
    assert result.response().headers == {"Retry-After": "1"}


def test_the_gateways_token_is_accepted_while_the_api_server_is_unavailable(api: FakeApi) -> None:
    api.down = Unreachable("the API server does not answer")
    assert authenticate(api, TOKEN) == [Identity("job")]


def test_a_gateway_without_the_reviewer_role_names_it(api: FakeApi) -> None:
    api.down = Forbidden("create", "tokenreviews.authentication.k8s.io", "")
    result = denied(api, "alices")
    assert result.status is HTTPStatus.UNAUTHORIZED
    assert "bind its service account to the cluster role system:auth-delegator" in result.reason


@pytest.mark.parametrize("review", ["review_token", "is_user_allowed"])
def test_the_advice_to_bind_the_role_is_a_command(api: FakeApi, review: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise Forbidden("create", "any", "", user="system:serviceaccount:team:trainer-gateway")

    monkeypatch.setattr(api, review, fail)
    assert denied(api, "alices").reason.endswith(
        "kubectl create clusterrolebinding team-trainer-gateway-reviews --clusterrole=system:auth-delegator "
        "--serviceaccount=team:trainer-gateway"
    )


def test_the_identity_of_a_token_is_cached_but_its_permission_is_not(api: FakeApi) -> None:
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def authenticate_twice() -> tuple[Identity | Denied, Identity | Denied]:
        first = await authenticator.authenticate(request("alices"))
        del api.users["alices"]
        api.permissions.clear()
        return first, await authenticator.authenticate(request("alices"))

    first, second = asyncio.run(authenticate_twice())
    assert first == Identity("kubernetes:alice")
    assert isinstance(second, Denied)
    assert second.status is HTTPStatus.FORBIDDEN
    assert api.reviews == 3


def test_a_cached_identity_expires(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "CACHE_TTL", 0.0)
    authenticate(api, "alices", "alices")
    assert api.reviews == 4


def test_the_cache_is_bounded(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "CACHE_SIZE", 2)
    users = KubernetesUsers(cast("Api", api))

    async def identify_many() -> None:
        for number in range(5):
            await users.identify(f"unknown-{number}")

    asyncio.run(identify_many())
    assert len(users._cache) == 2


def test_a_failed_review_is_not_cached(api: FakeApi) -> None:
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def fail_and_recover() -> list[Identity | Denied]:
        api.down = Unreachable("away")
        first = await authenticator.authenticate(request("alices"))
        api.down = None
        return [first, await authenticator.authenticate(request("alices"))]

    first, second = asyncio.run(fail_and_recover())
    assert isinstance(first, Denied)
    assert second == Identity("kubernetes:alice")

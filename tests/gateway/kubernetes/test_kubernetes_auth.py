"""Who comes in beside the holder of the job's token: identities of the cluster that may do the deed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast

import pytest
from pydantic import SecretStr

from meshgate_gateway import kubernetes_auth
from meshgate_gateway.auth import Identity, Refusal, TokenAuthenticator
from meshgate_gateway.http import HeadParser, Request
from meshgate_gateway.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden, Unreachable
from tests.gateway.kubernetes.fake_api import FakeApi

TOKEN = "correct-horse-battery-staple"
EXEC = ("alice", "create", "pods/exec")


@pytest.fixture
def api() -> FakeApi:
    """Alice may run code in the pods, Bob may not."""
    api = FakeApi()
    api.users = {"alices": {"username": "alice", "groups": ["dev"]}, "bobs": {"username": "bob"}}
    api.rights = {EXEC}
    return api


def request(token: str | None) -> Request:
    lines = ["GET / HTTP/1.1", *([f"Authorization: Bearer {token}"] if token else []), "", ""]
    parsed = HeadParser().feed("\r\n".join(lines).encode())
    assert parsed is not None
    return parsed


def check(api: FakeApi, *tokens: str | None) -> list[Identity | Refusal]:
    """What one authenticator says to each of the tokens, one after the other."""
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def all_of_them() -> list[Identity | Refusal]:
        return [await authenticator.check(request(token)) for token in tokens]

    return asyncio.run(all_of_them())


def refused(api: FakeApi, token: str | None) -> Refusal:
    (verdict,) = check(api, token)
    assert isinstance(verdict, Refusal)
    return verdict


def test_the_jobs_token_opens_and_the_cluster_is_not_asked(api: FakeApi) -> None:
    assert check(api, TOKEN) == [Identity("job")]
    assert api.reviews == 0


def test_an_identity_that_may_run_code_in_the_pods_comes_in_under_its_name(api: FakeApi) -> None:
    assert check(api, "alices") == [Identity("kubernetes:alice")]


def test_an_identity_without_the_right_is_told_the_verb_it_lacks(api: FakeApi) -> None:
    verdict = refused(api, "bobs")
    assert verdict.status is HTTPStatus.FORBIDDEN
    assert verdict.reason == "bob may not create pods/exec in namespace 'team', which running code in its pods takes"


def test_a_token_that_has_expired_is_nobodys(api: FakeApi) -> None:
    verdict = refused(api, "expired")
    assert verdict.status is HTTPStatus.UNAUTHORIZED
    assert "or it has expired" in verdict.reason


def test_without_a_token_the_cluster_is_not_asked(api: FakeApi) -> None:
    assert "no token was presented" in refused(api, None).reason
    assert api.reviews == 0


@pytest.mark.parametrize("token", ["alices", "bobs", "expired"])
def test_a_cluster_that_cannot_be_asked_sends_nobody_off_for_good(api: FakeApi, token: str) -> None:
    api.down = Unreachable("the API server does not answer")
    verdict = refused(api, token)
    assert verdict.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert "the API server does not answer" in verdict.reason
    assert verdict.answer().headers == {"Retry-After": "1"}


def test_the_jobs_token_opens_while_the_cluster_cannot_be_asked(api: FakeApi) -> None:
    api.down = Unreachable("the API server does not answer")
    assert check(api, TOKEN) == [Identity("job")]


def test_a_gateway_that_may_not_ask_says_what_it_lacks(api: FakeApi) -> None:
    api.down = Forbidden("create", "tokenreviews.authentication.k8s.io", "")
    verdict = refused(api, "alices")
    assert verdict.status is HTTPStatus.UNAUTHORIZED
    assert "bind its service account to the cluster role system:auth-delegator" in verdict.reason


@pytest.mark.parametrize("deed", ["user_of_token", "user_may"])
def test_what_to_bind_to_which_account_is_told_as_a_command(
    api: FakeApi, deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise Forbidden("create", "any", "", user="system:serviceaccount:team:trainer-gateway")

    monkeypatch.setattr(api, deed, refuse)
    assert refused(api, "alices").reason.endswith(
        "kubectl create clusterrolebinding team-trainer-gateway-reviews --clusterrole=system:auth-delegator "
        "--serviceaccount=team:trainer-gateway"
    )


def test_whose_a_token_is_is_remembered_and_what_its_owner_may_is_not(api: FakeApi) -> None:
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def asked_twice() -> tuple[Identity | Refusal, Identity | Refusal]:
        first = await authenticator.check(request("alices"))
        del api.users["alices"]
        api.rights.clear()
        return first, await authenticator.check(request("alices"))

    first, second = asyncio.run(asked_twice())
    assert first == Identity("kubernetes:alice")
    assert isinstance(second, Refusal)
    assert second.status is HTTPStatus.FORBIDDEN
    assert api.reviews == 3


def test_a_token_is_forgotten_after_a_while(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "REMEMBER_FOR", 0.0)
    check(api, "alices", "alices")
    assert api.reviews == 4


def test_strangers_do_not_fill_the_memory(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "REMEMBERED", 2)
    users = KubernetesUsers(cast("Api", api))

    async def ask_many() -> None:
        for number in range(5):
            await users.user(f"stranger-{number}")

    asyncio.run(ask_many())
    assert len(users._remembered) == 2


def test_a_cluster_that_was_away_is_asked_again_at_once(api: FakeApi) -> None:
    users = KubernetesUsers(cast("Api", api))
    authenticator = KubernetesAuthenticator(TokenAuthenticator(SecretStr(TOKEN)), users, "team")

    async def away_and_back() -> list[Identity | Refusal]:
        api.down = Unreachable("away")
        first = await authenticator.check(request("alices"))
        api.down = None
        return [first, await authenticator.check(request("alices"))]

    first, second = asyncio.run(away_and_back())
    assert isinstance(first, Refusal)
    assert second == Identity("kubernetes:alice")

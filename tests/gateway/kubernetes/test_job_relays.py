"""The way through a provisioning gateway to the gateways of jobs: for whom, and what a stranger learns of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar, cast

import pytest

from meshgate_gateway import job_relays
from meshgate_gateway.http import HeadParser, Request, Response
from meshgate_gateway.job_relays import JobRelays
from meshgate_gateway.kubernetes_auth import KubernetesUsers
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden, Unreachable
from meshgate_kubernetes.manifests import token_secret
from tests.gateway.kubernetes.fake_api import FakeApi
from tests.gateway.kubernetes.objects import job

T = TypeVar("T")
JOBS_TOKEN = "the-token-of-this-very-job"


@pytest.fixture
def api() -> FakeApi:
    """A job whose gateway is not ready. Alice may run code in the namespace's pods, Bob may not."""
    api = FakeApi()
    api.create(token_secret(job(), JOBS_TOKEN))
    api.users = {"alices": {"username": "alice"}, "bobs": {"username": "bob"}}
    api.rights = {("alice", "create", "pods/exec")}
    return api


def request(token: str | None) -> Request:
    lines = ["GET /v1/job HTTP/1.1", *([f"Authorization: Bearer {token}"] if token else []), "", ""]
    parsed = HeadParser().feed("\r\n".join(lines).encode())
    assert parsed is not None
    return parsed


def with_relays(api: FakeApi, deed: Callable[[JobRelays, socket.socket], Awaitable[T]]) -> T:
    async def run() -> T:
        seen = cast("Api", api)
        relays = JobRelays(seen, KubernetesUsers(seen))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                return await asyncio.wait_for(deed(relays, ours), 10)
            finally:
                await relays.close()

    return asyncio.run(run())


def told(response: Response | None) -> tuple[HTTPStatus, str]:
    assert response is not None
    return response.status, json.dumps(response.body)


def answers(api: FakeApi, *tokens: str | None, name: str = "trainer") -> list[tuple[HTTPStatus, str]]:
    """What is said to each of the tokens, one after the other."""

    async def deed(relays: JobRelays, connection: socket.socket) -> list[tuple[HTTPStatus, str]]:
        return [told(await relays.answer("team", name, "/v1/job", request(each), connection)) for each in tokens]

    return with_relays(api, deed)


@pytest.mark.parametrize("token", [JOBS_TOKEN, "alices"])
def test_who_opens_the_job_hears_of_its_gateway(api: FakeApi, token: str) -> None:
    ((status, reason),) = answers(api, token)
    assert status is HTTPStatus.BAD_GATEWAY
    assert "no gateway of a job 'trainer' is ready" in reason


@pytest.mark.parametrize("token", [None, "guessed", "bobs"])
def test_a_stranger_is_told_the_same_of_a_job_that_is_there_and_one_that_is_not(
    api: FakeApi, token: str | None
) -> None:
    there, elsewhere = answers(api, token), answers(api, token, name="missing")
    assert there[0][0] in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    assert there == [(status, reason.replace("missing", "trainer")) for status, reason in elsewhere]


def test_without_a_token_the_cluster_is_asked_nothing(api: FakeApi) -> None:
    ((status, _),) = answers(api, None)
    assert status is HTTPStatus.UNAUTHORIZED
    assert (api.reads, api.reviews) == (0, 0)


def test_the_token_of_one_job_opens_no_other(api: FakeApi) -> None:
    api.create(token_secret(job(name="other"), "the-token-of-another-job"))
    statuses = [status for status, _ in answers(api, JOBS_TOKEN, "the-token-of-another-job")]
    assert statuses == [HTTPStatus.BAD_GATEWAY, HTTPStatus.UNAUTHORIZED]


def test_who_comes_back_at_once_is_not_checked_again(api: FakeApi) -> None:
    answers(api, JOBS_TOKEN)
    once = api.reads
    answers(api, JOBS_TOKEN, JOBS_TOKEN)
    assert api.reads - once == once + 1  # where its gateway is, and no more


def test_a_cluster_that_is_away_sends_nobody_off_for_good(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise Unreachable("the API server is away")

    monkeypatch.setattr(api, "get", fail)
    assert answers(api, JOBS_TOKEN)[0][0] is HTTPStatus.SERVICE_UNAVAILABLE


def test_a_gateway_that_may_not_verify_identities_says_what_to_bind(api: FakeApi) -> None:
    api.down = Forbidden("create", "tokenreviews", "", user="system:serviceaccount:team:meshgate")
    ((status, reason),) = answers(api, "alices")
    assert status is HTTPStatus.UNAUTHORIZED
    assert "--serviceaccount=team:meshgate" in reason


def test_only_so_many_are_checked_at_a_time(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_relays, "MAX_CHECKS", 2)

    async def deed(relays: JobRelays, connection: socket.socket) -> list[HTTPStatus]:
        with api._changed:  # nobody is answered by the cluster until all have asked
            asking = [
                asyncio.create_task(relays.answer("team", "trainer", "/v1/job", request(f"guess{n}"), connection))
                for n in range(5)
            ]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        return sorted([told(await each)[0] for each in asking])

    assert with_relays(api, deed) == [HTTPStatus.UNAUTHORIZED] * 2 + [HTTPStatus.SERVICE_UNAVAILABLE] * 3


def test_only_so_many_connections_pass(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_relays, "MAX_RELAYS", 0)
    ((status, reason),) = answers(api, JOBS_TOKEN)
    assert status is HTTPStatus.SERVICE_UNAVAILABLE
    assert "0 connections to jobs pass through this gateway already" in reason

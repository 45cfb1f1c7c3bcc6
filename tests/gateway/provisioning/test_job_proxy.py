"""Access to the gateways of jobs through the proxy, and what callers without access find out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import Any, cast

import pytest
from pydantic import SecretStr

from meshgate_gateway.http import kubernetes_auth
from meshgate_gateway.http.auth import TokenAuthenticator
from meshgate_gateway.http.kubernetes_auth import KubernetesUsers
from meshgate_gateway.http.messages import HeadParser, Request, Response
from meshgate_gateway.http.server import listen
from meshgate_gateway.provisioning import job_proxy
from meshgate_gateway.provisioning.access import Access
from meshgate_gateway.provisioning.job_proxy import JobProxy
from meshgate_gateway.provisioning.policy import Policy
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, Unreachable
from meshgate_kubernetes.jobs.lifecycle import GatewayPod
from meshgate_kubernetes.manifests.job_objects import parent, token_secret
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import job
from tests.gateway.captured_logs import capture_logs

JOB_TOKEN = "the-token-of-this-job"
OPERATORS_TOKEN = "the-token-of-the-provisioning-gateway"
POLICY = Policy(callers=("carol", "dave"), namespaces=("team",), gateway_image="gateway:1")


@pytest.fixture
def api() -> FakeApi:
    """Carol's job, whose gateway is not ready. The policy allows Carol and Dave to create jobs. Alice may exec into the
    pods of its namespace, Bob may not."""
    api = FakeApi()
    api.create(parent(job(), "kubernetes:carol"))
    api.create(token_secret(job(), JOB_TOKEN))
    api.users = {f"{name}s": {"username": name} for name in ("alice", "bob", "carol", "dave")}
    api.permissions = {("alice", "create", "pods/exec")}
    return api


def request(token: str | None, method: str = "GET") -> Request:
    length = ["Content-Length: 0"] if method == "POST" else []
    lines = [f"{method} /v1/job HTTP/1.1", *length, *([f"Authorization: Bearer {token}"] if token else []), "", ""]
    parsed = HeadParser().feed("\r\n".join(lines).encode())
    assert parsed is not None
    return parsed


@contextlib.asynccontextmanager
async def proxying(api: FakeApi, policy: Policy = POLICY) -> AsyncIterator[tuple[JobProxy, socket.socket]]:
    """A proxy, and a connection that it may forward."""
    seen = cast("Api", api)
    access = Access(seen, policy, TokenAuthenticator(SecretStr(OPERATORS_TOKEN)), KubernetesUsers(seen))
    proxy = JobProxy(seen, access)
    near, far = socket.socketpair()
    with near, far:
        try:
            yield proxy, near
        finally:
            await proxy.close()


def status_and_body(response: Response | None) -> tuple[HTTPStatus, str]:
    assert response is not None
    return response.status, json.dumps(response.body)


async def responses(api: FakeApi, *tokens: str | None, name: str = "trainer") -> list[tuple[HTTPStatus, str]]:
    """The responses to the tokens, in order."""
    async with proxying(api) as (proxy, connection):
        return [
            status_and_body(await proxy.respond("team", name, "/v1/job", request(token), connection))
            for token in tokens
        ]


@pytest.mark.parametrize("token", [OPERATORS_TOKEN, "alices", "carols"])
async def test_a_caller_with_access_gets_the_state_of_the_gateway(api: FakeApi, token: str) -> None:
    ((status, reason),) = await responses(api, token)
    assert status is HTTPStatus.BAD_GATEWAY
    assert "the gateway of job 'trainer' in namespace 'team' is not ready" in reason


@pytest.mark.parametrize("token", [None, "guessed", "bobs", JOB_TOKEN])
async def test_a_caller_without_access_cannot_find_out_whether_a_job_exists(api: FakeApi, token: str | None) -> None:
    existing, missing = await responses(api, token), await responses(api, token, name="missing")
    assert existing[0][0] in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    assert existing == [(status, reason.replace("missing", "trainer")) for status, reason in missing]


async def test_a_caller_that_may_create_jobs_learns_whose_a_job_is_or_that_there_is_none(api: FakeApi) -> None:
    ((status, reason),) = await responses(api, "daves")
    assert status is HTTPStatus.FORBIDDEN
    assert "job 'trainer' in namespace 'team' belongs to kubernetes:carol" in reason
    ((status, reason),) = await responses(api, "daves", name="missing")
    assert status is HTTPStatus.NOT_FOUND
    assert "there is no job 'missing' in namespace 'team' (it may have ended)" in reason


async def test_the_session_of_a_job_that_is_gone_is_over(api: FakeApi) -> None:
    async with proxying(api) as (proxy, connection):
        path = f"/v1/sessions/{'0' * 32}"
        status, body = status_and_body(await proxy.respond("team", "missing", path, request("carols"), connection))
    assert status is HTTPStatus.GONE
    assert json.loads(body)["kind"] == "unknown"


async def test_a_request_without_a_token_causes_no_api_call(api: FakeApi) -> None:
    ((status, _),) = await responses(api, None)
    assert status is HTTPStatus.UNAUTHORIZED
    assert (api.reads, api.reviews) == (0, 0)


async def test_a_successful_check_is_cached(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_auth, "CACHE_TTL", 0.0)
    await responses(api, "alices")
    reviews = api.reviews
    await responses(api, "alices", "alices")
    assert api.reviews == 2 * reviews


async def test_a_check_of_a_job_does_not_hold_for_another_one_of_its_name(
    api: FakeApi, ready: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_proxy, "CACHE_TTL", 1000.0)
    async with proxying(api) as (proxy, connection):
        _, client, upstream = await forwarded(proxy, ready)
        client.close(), upstream.close()
        recreate(api, "kubernetes:carol")
        head, client, upstream = await forwarded(proxy, ready)
        client.close(), upstream.close()
        recreate(api, "kubernetes:dave")
        refused = await proxy.respond("team", "trainer", "/v1/job", request("carols"), connection)
    assert "Authorization: Bearer the-token-of-dave-or-carol" in head.split("\r\n")
    assert status_and_body(refused)[0] is HTTPStatus.FORBIDDEN


async def test_a_check_of_a_job_that_is_not_there_is_not_cached(api: FakeApi) -> None:
    async with proxying(api) as (proxy, connection):
        for name, status in (("missing", HTTPStatus.NOT_FOUND), ("trainer", HTTPStatus.BAD_GATEWAY)):
            found = await proxy.respond("team", name, "/v1/job", request(OPERATORS_TOKEN), connection)
            assert status_and_body(found)[0] is status
        assert len(proxy._authenticated) == 1


def recreate(api: FakeApi, owner: str) -> None:
    """The job, deleted and created again under its name."""
    for made in (parent(job(), owner), token_secret(job(), "the-token-of-dave-or-carol")):
        api.delete(made["kind"], made["metadata"]["name"], "team")
        api.create(made)


@pytest.mark.parametrize(
    ("token", "path", "refused"),
    [
        ("carols", "/v1/runs", True),
        ("daves", "/v1/runs", False),
        (OPERATORS_TOKEN, "/v1/runs", False),
        ("carols", "/v1/runs/night/stop", False),
        ("carols", "/v1/job", False),
    ],
)
async def test_the_policy_says_who_may_submit_programs(api: FakeApi, token: str, path: str, refused: bool) -> None:
    policy = POLICY.model_copy(update={"submitters": ("dav*",)})
    api.permissions.add(("dave", "create", "pods/exec"))
    asked = request(token, method="GET" if path == "/v1/job" else "POST")
    with capture_logs() as events:
        async with proxying(api, policy) as (proxy, connection):
            status, reason = status_and_body(await proxy.respond("team", "trainer", path, asked, connection))
    if not refused:
        assert status is HTTPStatus.BAD_GATEWAY
        return
    assert status is HTTPStatus.CONFLICT
    assert "does not allow kubernetes:carol to submit programs (submitters: dav*): ask its operator" in reason
    (audited,) = [each for each in events if each["event"] == "audit"]
    assert (audited["caller"], audited["verb"], audited["outcome"]) == ("kubernetes:carol", "submit run", "refused")


async def test_an_unavailable_api_server_is_a_temporary_error(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise Unreachable("the API server is away")

    monkeypatch.setattr(api, "get", fail)
    assert (await responses(api, "carols"))[0][0] is HTTPStatus.SERVICE_UNAVAILABLE


async def test_a_gateway_that_cannot_verify_tokens_says_which_role_to_bind(api: FakeApi) -> None:
    api.down = Forbidden("create", "tokenreviews", "", user="system:serviceaccount:team:meshgate")
    ((status, reason),) = await responses(api, "alices")
    assert status is HTTPStatus.UNAUTHORIZED
    assert "--serviceaccount=team:meshgate" in reason


async def test_the_number_of_concurrent_checks_is_limited(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_proxy, "MAX_CHECKS", 2)
    async with proxying(api) as (proxy, connection):
        with api._changed:  # blocks the API until every request has started
            requests = [
                asyncio.create_task(proxy.respond("team", "trainer", "/v1/job", request(f"guess{n}"), connection))
                for n in range(5)
            ]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        statuses = sorted([status_and_body(await each)[0] for each in requests])
    assert statuses == [HTTPStatus.UNAUTHORIZED] * 2 + [HTTPStatus.SERVICE_UNAVAILABLE] * 3


async def test_the_number_of_forwarded_connections_is_limited(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_proxy, "MAX_CONNECTIONS", 0)
    ((status, reason),) = await responses(api, "carols")
    assert status is HTTPStatus.SERVICE_UNAVAILABLE
    assert "at its limit of 0 forwarded connections" in reason


async def test_a_failed_check_is_not_cached(api: FakeApi) -> None:
    assert [status for status, _ in await responses(api, "guessed", "guessed")] == [HTTPStatus.UNAUTHORIZED] * 2


# --- forwarded connections


@pytest.fixture
def ready(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener of a gateway of the job that is ready. Open connections are checked all the time."""
    with listen("127.0.0.1", 0) as listener:
        found = GatewayPod("trainer-gateway", "127.0.0.1", "1", "c", listener.getsockname()[1])
        monkeypatch.setattr(job_proxy, "find_gateway", lambda *arguments: found)
        for module, name in ((job_proxy, "CHECK_INTERVAL"), (job_proxy, "CACHE_TTL"), (kubernetes_auth, "CACHE_TTL")):
            monkeypatch.setattr(module, name, 0.0)
        yield listener


async def forwarded(proxy: JobProxy, listener: socket.socket, *, token: str = "carols") -> tuple[Any, ...]:
    """The head that the job's gateway receives, and both ends of the connection."""
    loop = asyncio.get_running_loop()
    client, connection = socket.socketpair()
    with connection:
        assert await proxy.respond("team", "trainer", "/v1/job", request(token), connection) is None
    upstream, _ = await loop.sock_accept(listener)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await loop.sock_recv(upstream, 4096)
    for each in (client, upstream):
        each.setblocking(False)
    return head.decode(), client, upstream


@pytest.mark.parametrize(("token", "caller"), [("carols", "kubernetes:carol"), (OPERATORS_TOKEN, "token")])
async def test_a_request_is_forwarded_with_the_token_of_the_job_and_the_name_of_the_caller(
    api: FakeApi, ready: socket.socket, token: str, caller: str
) -> None:
    async with proxying(api) as (proxy, _):
        head, client, upstream = await forwarded(proxy, ready, token=token)
        client.close(), upstream.close()
    lines = head.split("\r\n")
    assert f"Authorization: Bearer {JOB_TOKEN}" in lines
    assert f"Meshgate-Caller: {caller}" in lines


async def test_an_open_connection_is_closed_when_its_caller_loses_access(api: FakeApi, ready: socket.socket) -> None:
    with capture_logs() as events:
        async with proxying(api) as (proxy, _):
            _, client, upstream = await forwarded(proxy, ready)
            with client, upstream:
                del api.users["carols"]
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
                assert await asyncio.get_running_loop().sock_recv(upstream, 1) == b""
    (refused,) = [each for each in events if each["event"] == "audit" and each["outcome"] == "refused"]
    assert (refused["action"], refused["verb"], refused["job"]) == ("forward", "describe job", "trainer")
    assert "the open connection is closed: no job 'trainer'" in refused["reason"]


async def test_an_open_connection_outlasts_an_api_server_that_is_away(api: FakeApi, ready: socket.socket) -> None:
    async with proxying(api) as (proxy, _):
        _, client, upstream = await forwarded(proxy, ready)
        with client, upstream:
            loop = asyncio.get_running_loop()
            api.down = Unreachable("the API server is away")
            checked = api.reviews
            while api.reviews < checked + 3:  # noqa: ASYNC110 - the connection is checked in between
                await asyncio.sleep(0)
            await loop.sock_sendall(upstream, b"alive")
            assert await loop.sock_recv(client, 5) == b"alive"

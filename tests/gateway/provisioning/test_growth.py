"""Callers change the numbers of hosts of their jobs through a provisioning gateway: who may, within which limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

import pytest
from websockets.asyncio.client import ClientConnection

from meshgate_gateway.http.messages import CALLER_HEADER
from meshgate_gateway.provisioning.growth import Growth
from meshgate_gateway.provisioning.policy import Policy
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.lifecycle import GatewayPod
from meshgate_kubernetes.jobs.provisioning_messages import (
    JobProgress,
    JobUp,
    ProvisioningReply,
    RequestRejected,
    ScaleJob,
    StartJob,
    parse_reply,
)
from meshgate_kubernetes.manifests.job_objects import OWNER_ANNOTATION, SPEC_KEY
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_kubernetes.status import readiness
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.gateway.captured_logs import capture_logs
from tests.gateway.provisioning.provisioning_gateway import (
    POLICY,
    TOKEN,
    dial,
    fake_api,
    provisioning_gateway,
    replies,
    request,
    requested_job,
)
from tests.ports import closed_port
from tests.waiting import wait_for

STATUS = {"gateway_version": "0.1.0", "python": "3.11", "meshes": {}, "sessions": []}


class JobGateway(ThreadingHTTPServer):
    """The gateway of a job. ``asked``: the requests, with the token and the caller that each has presented."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.answers: dict[str, tuple[int, bytes]] = {"/v1/job": (200, b"{}"), "/v1/status": _json(200, STATUS)}
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def pod(self) -> GatewayPod:
        return GatewayPod("trainer-gateway-1", "127.0.0.1", "1", "1", self.server_port)


class _Handler(BaseHTTPRequestHandler):
    server: JobGateway

    def do_GET(self) -> None:
        told = self.headers["Authorization"].removeprefix("Bearer "), self.headers[CALLER_HEADER]
        self.server.asked.append((f"{self.command} {self.path}", *told))
        status, body = self.server.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


def _json(status: int, answer: object) -> tuple[int, bytes]:
    return status, json.dumps(answer).encode()


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobGateway]:
    with JobGateway() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setattr(lifecycle, "find_gateway", lambda api, job, namespace: server.pod)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def api(gateway: JobGateway, monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Alice's job of two hosts with one GPU each."""
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)
    found = fake_api()
    start(found, requested_job(gpus=1))
    return found


def start(api: FakeApi, spec: JobSpec, token: str = "alices", policy: Policy = POLICY) -> None:
    assert isinstance(request(api, StartJob(job=spec), token, policy)[-1], JobUp)


def to(hosts: int, *, mesh: str = "workers", name: str = "trainer", timeout: float = 10) -> ScaleJob:
    return ScaleJob(name=name, namespace="team", mesh=mesh, hosts=hosts, timeout=timeout)


def scaled(api: FakeApi, asked: ScaleJob, token: str = "alices", policy: Policy = POLICY) -> dict[str, int]:
    *_, up = request(api, asked, token, policy)
    assert isinstance(up, JobUp), up
    assert up.job.token == ""
    return up.job.meshes


def refusal(api: FakeApi, asked: ScaleJob, token: str = "alices", policy: Policy = POLICY) -> str:
    """The reason, when nothing was changed."""
    before = replicas(api)
    *_, reply = request(api, asked, token, policy)
    assert isinstance(reply, RequestRejected), reply
    assert replicas(api) == before
    return reply.reason


def replicas(api: FakeApi) -> int:
    return int(api.get("StatefulSet", "trainer-workers", "team")["spec"]["replicas"])


def limited(**limits: Any) -> Policy:
    return POLICY.model_copy(update=limits)


# --- who may --------------------------------------------------------------------------------------------------


def test_the_owner_grows_and_shrinks_its_job_and_sees_its_progress(api: FakeApi, gateway: JobGateway) -> None:
    with capture_logs() as events:
        *progress, up = request(api, to(3))
    assert isinstance(up, JobUp)
    assert (up.job.meshes, up.job.token, replicas(api)) == ({"workers": 3}, "", 3)
    assert progress
    assert all(isinstance(each, JobProgress) for each in progress)
    (audited,) = [event for event in events if event["event"] == "audit"]
    recorded = [audited[key] for key in ("action", "caller", "outcome", "job", "namespace")]
    assert recorded == ["scale job", "kubernetes:alice", "allowed", "trainer", "team"]
    assert scaled(api, to(1)) == {"workers": 1}
    assert replicas(api) == 1
    (told,) = {(token, caller) for _, token, caller in gateway.asked}
    assert told == (lifecycle.find(cast("Api", api), "trainer", "team").token, "kubernetes:alice")
    reads = ["POST /v1/job", "POST /v1/job"]
    assert [asked for asked, *_ in gateway.asked] == [*reads, "POST /v1/job", "GET /v1/status", "POST /v1/job"]


def test_a_later_job_of_the_same_name_is_not_scaled(api: FakeApi, gateway: JobGateway) -> None:
    now = lifecycle.find(cast("Api", api), "trainer", "team").uid
    replaced = "job 'trainer' in namespace 'team' has ended, and another job has its name now"
    for token in ("alices", TOKEN):
        assert refusal(api, to(3).model_copy(update={"uid": "earlier"}), token) == replaced
    assert scaled(api, to(3).model_copy(update={"uid": now})) == {"workers": 3}


def test_only_callers_that_may_end_or_patch_a_job_scale_it(api: FakeApi, gateway: JobGateway) -> None:
    belongs = "job 'trainer' in namespace 'team' belongs to kubernetes:alice, and carol may not patch statefulsets.apps"
    with capture_logs() as events:
        assert belongs in refusal(api, to(3), "trainers")
    (audited,) = [event for event in events if event["event"] == "audit"]
    assert (audited["action"], audited["outcome"]) == ("scale job", "refused")
    assert "bob may not patch statefulsets.apps" in refusal(api, to(3), "bobs")
    assert gateway.asked == []
    api.permissions = {("bob", "patch", "statefulsets")}
    assert scaled(api, to(3), "bobs") == {"workers": 3}
    assert scaled(api, to(2), TOKEN) == {"workers": 2}
    shared = limited(sharing_groups=("trainers",))
    start(api, requested_job().model_copy(update={"name": "shared"}), "trainers", shared)
    api.users["daves"] = {"username": "dave", "groups": ["trainers"]}
    assert scaled(api, to(3, name="shared"), "daves", shared) == {"workers": 3}


def test_a_job_that_does_not_exist_is_missing(api: FakeApi) -> None:
    (reply,) = request(api, to(3, name="other"))
    assert isinstance(reply, RequestRejected)
    assert (reply.missing, "there is no job 'other'" in reply.reason) == (True, True)


# --- limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_replicas": 2}, "3 pods exceed the limit of 2"),
        ({"images": ("other:",)}, "mesh 'workers': image 'worker:1' is not allowed (allowed prefixes: other:)"),
        (
            {"max_gpus_per_caller": 2},
            "kubernetes:alice asks for 3 GPUs and has none yet, and the limit per caller is 2",
        ),
    ],
)
@pytest.mark.parametrize("token", ["alices", TOKEN])
def test_growth_stays_within_the_policy_and_hosts_can_always_be_given_back(
    api: FakeApi, gateway: JobGateway, limits: dict[str, Any], reason: str, token: str
) -> None:
    policy = limited(**limits)
    with capture_logs() as events:
        assert reason in refusal(api, to(3), token, policy)
    (audited,) = [event for event in events if event["event"] == "audit"]
    assert (audited["outcome"], gateway.asked) == ("refused", [])
    assert scaled(api, to(1), token, policy) == {"workers": 1}


def test_a_namespace_that_the_policy_names_no_more_does_not_grow(api: FakeApi) -> None:
    api.permissions = {("bob", "patch", "statefulsets")}
    assert "namespace 'team' is not allowed" in refusal(api, to(3), "bobs", limited(namespaces=("others",)))


def test_the_gpus_of_all_jobs_of_the_owner_count_if_another_caller_asks(api: FakeApi) -> None:
    api.permissions = {("bob", "patch", "statefulsets")}
    policy = limited(max_gpus_per_caller=4)
    start(api, requested_job(replicas=1, gpus=1).model_copy(update={"name": "second"}))
    assert scaled(api, to(3), "bobs", policy) == {"workers": 3}
    assert "kubernetes:alice asks for 4 GPUs and has 1 in team/second" in refusal(api, to(4), "bobs", policy)


def test_jobs_that_were_created_with_a_kubeconfig_have_no_owner_whose_gpus_count(api: FakeApi) -> None:
    api.permissions = {("bob", "patch", "statefulsets")}
    del api.get("ConfigMap", "trainer", "team")["metadata"]["annotations"][OWNER_ANNOTATION]
    assert scaled(api, to(3), "bobs", limited(max_gpus_per_caller=2)) == {"workers": 3}


def test_a_growth_that_another_job_has_made_impossible_meanwhile_is_refused(
    api: FakeApi, gateway: JobGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Growth.why_not

    def start_another_job(growth: Growth, asked: ScaleJob) -> str | None:
        refused = check(growth, asked)
        second = requested_job(gpus=1).model_copy(update={"name": "second"})
        objects.create_parent(cast("Api", api), second, owner="kubernetes:alice")
        return refused

    monkeypatch.setattr(Growth, "why_not", start_another_job)
    reason = refusal(api, to(3), policy=limited(max_gpus_per_caller=4))
    assert ("kubernetes:alice asks for 3 GPUs and has 2 in team/second" in reason, gateway.asked) == (True, [])


# --- several requests, and connections that are cut -------------------------------------------------------------


async def ask(connection: ClientConnection, asked: ScaleJob) -> None:
    """Sends the request and returns at the first progress report."""
    await connection.send(asked.model_dump_json())
    assert isinstance(parse_reply(await connection.recv()), JobProgress)


async def last_reply(connection: ClientConnection, message: ScaleJob | StartJob) -> ProvisioningReply:
    await connection.send(message.model_dump_json())
    return (await replies(connection))[-1]


async def test_a_job_that_is_growing_counts_with_the_gpus_that_it_will_have(api: FakeApi) -> None:
    second = StartJob(job=requested_job(replicas=1, gpus=1).model_copy(update={"name": "second"}))
    api.pods_come_up = False
    async with (
        provisioning_gateway(api, limited(max_gpus_per_caller=4)) as url,
        dial(url, "alices") as growing,
        dial(url, "alices") as starting,
    ):
        await ask(growing, to(4))
        refused = await last_reply(starting, second)
        assert isinstance(refused, RequestRejected)
        assert "kubernetes:alice asks for 1 GPUs and has 4 in team/trainer" in refused.reason
        api.bring_up()
        assert isinstance((await replies(growing))[-1], JobUp)


async def test_a_job_is_changed_by_one_request_at_a_time_and_a_repeated_one_follows_the_change(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url:
        async with dial(url, "alices") as first, dial(url, "alices") as other, dial(url, "alices") as again:
            await ask(first, to(3))
            refused = await last_reply(other, to(4))
            assert isinstance(refused, RequestRejected)
            assert "another request is changing its number of hosts: repeat" in refused.reason
            first.transport.abort()
            await ask(again, to(3))
            api.bring_up()
            up = (await replies(again))[-1]
            assert isinstance(up, JobUp)
            assert up.job.meshes == {"workers": 3}
        async with dial(url, "alices") as later:
            assert isinstance(await last_reply(later, to(4)), JobUp)


async def test_a_growth_whose_caller_leaves_is_taken_back(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url:
        async with dial(url, "alices") as leaving:
            await ask(leaving, to(3))
        await asyncio.to_thread(wait_for, lambda: replicas(api) == 2, "the end of the growth")
    assert lifecycle.find(cast("Api", api), "trainer", "team").meshes == {"workers": 2}


# --- what the job itself refuses --------------------------------------------------------------------------------


def test_a_mesh_that_cannot_be_scaled_is_reported_as_with_a_kubeconfig(api: FakeApi) -> None:
    assert "it has no such mesh, only workers" in refusal(api, to(3, mesh="others"))
    api.merge_patch("ConfigMap", "trainer", "team", {"data": {SPEC_KEY: "{}"}})
    assert "created by another version of meshgate" in refusal(api, to(3))


def test_hosts_in_use_stay(api: FakeApi, gateway: JobGateway) -> None:
    session = {"session": "ab" * 16, "owner": "job", "pid": 7, "connected": False, "problem": "its engine is silent"}
    gateway.answers["/v1/status"] = _json(200, {**STATUS, "sessions": [session]})
    assert "not known what runs on trainer-workers-1: session abababab: its engine" in refusal(api, to(1))
    gateway.answers["/v1/status"] = _json(200, {"hosts": []})
    assert "gateway is of another version of meshgate and does not say what runs on its hosts" in refusal(api, to(1))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_json(405, {"error": "use GET"}), 'the job\'s gateway answered /v1/job with HTTP 405: {"error": "use GET"}'),
        ((200, b"<html>"), "the job's gateway did not answer /v1/job: "),
    ],
)
def test_a_gateway_that_cannot_read_the_number_is_reported(
    api: FakeApi, gateway: JobGateway, answer: tuple[int, bytes], reason: str
) -> None:
    gateway.answers["/v1/job"] = answer
    assert reason in refusal(api, to(3))


def test_a_gateway_that_is_away_is_reported(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    away: GatewayPod | None = None
    monkeypatch.setattr(lifecycle, "find_gateway", lambda *job: away)
    assert "the job's gateway is not ready: repeat" in refusal(api, to(3))
    away = GatewayPod("trainer-gateway-1", "::1", "1", "1", closed_port())
    assert "the job's gateway did not answer /v1/job: " in refusal(api, to(3))

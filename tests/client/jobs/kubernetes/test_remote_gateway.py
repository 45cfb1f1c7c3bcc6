"""A remote gateway: its replies, its errors, and connections that break."""

from __future__ import annotations

import asyncio
import http
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection
from websockets.sync.server import ServerConnection, serve

from meshgate import Compute
from meshgate.errors import (
    AuthenticationError,
    ConnectionFailedError,
    JobError,
    JobNotRunning,
    JobStartFailed,
    JobUnsupported,
)
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate.session import gateway_client
from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobsListed,
    JobUp,
    ListJobs,
    ObjectCreated,
    ProvisioningRequest,
    RequestRejected,
    ScaleJob,
    StartJob,
    parse_request,
    rejection,
)
from meshgate_kubernetes.status.readiness import Progress
from tests.client.proofs import proof_for, prove_handshake
from tests.ports import closed_port

JOB = RunningJob(name="trainer", namespace="team", uid="1", token="secret", meshes={"workers": 1})
REQUEST = JobRequest(name="trainer", namespace="team", meshes=(mesh_from_compute("workers", Compute()),))


class FakeGateway:
    """Sends ``scripts[n]`` on its n-th connection, then closes it. ``about`` is the reply of ``/v1/job``,
    and ``health`` that of ``/healthz``."""

    def __init__(self, *scripts: tuple[BaseModel, ...], about: dict[str, int] | None = None, status: int = 0) -> None:
        self.scripts = list(scripts)
        self.about = {"meshes": about or {}}
        self.health = b""
        self.status = status
        self.proves = True
        self.cuts = 0  # connections that are closed without an answer
        self.redirects_to: RemoteGateway | None = None
        self.asked: list[str] = []
        self.requests: list[ProvisioningRequest] = []

    def respond(self, connection: ServerConnection, request: Request) -> Response | None:
        self.asked.append(request.path)
        if self.cuts:
            self.cuts -= 1
            connection.socket.shutdown(socket.SHUT_RDWR)
            return None
        if self.redirects_to is not None:
            url = self.redirects_to._url
            url = url if "Upgrade" in request.headers else url.replace("ws", "http")
            return Response(307, "Temporary Redirect", Headers({"Location": url + request.path}))
        if self.status:
            body = json.dumps({"error": "token rejected"}).encode()
            headers = Headers(proof_for(request.headers, self.status, body) if self.proves else {})
            return Response(self.status, http.HTTPStatus(self.status).phrase, headers, body)
        if request.path in ("/v1/job", "/healthz"):
            body = json.dumps(self.about).encode() if request.path == "/v1/job" else self.health
            proof = proof_for(request.headers, 200, body) if self.proves else {}
            return Response(200, "OK", Headers({"Content-Length": str(len(body)), **proof}), body)
        return None

    def serve(self, connection: ServerConnection) -> None:
        self.requests.append(parse_request(connection.recv()))
        for message in self.scripts.pop(0) if self.scripts else ():
            connection.send(message.model_dump_json())


@contextmanager
def running(gateway: FakeGateway) -> Iterator[RemoteGateway]:
    prove = prove_handshake if gateway.proves else None
    server = serve(
        gateway.serve, "127.0.0.1", 0, process_request=gateway.respond, process_response=prove, close_timeout=1
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield RemoteGateway(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", "token")
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    monkeypatch.setattr(gateway_client, "LONGEST_DELAY", 0.01)
    monkeypatch.setattr(gateway_client, "FIRST_DELAY", 0.01)


def test_a_job_is_started_through_the_gateway() -> None:
    gateway = FakeGateway((ObjectCreated(kind="Secret", name="a"), JobUp(job=JOB)))
    with running(gateway) as remote:
        assert remote.start(REQUEST) == JOB
    [request] = gateway.requests
    assert isinstance(request, StartJob)
    assert request.job.name == "trainer"


def test_a_request_is_repeated_after_a_lost_connection() -> None:
    gateway = FakeGateway((ObjectCreated(kind="Secret", name="a"),), (), (JobUp(job=JOB),))
    with running(gateway) as remote:
        assert remote.start(REQUEST) == JOB
    assert len(gateway.requests) == 3


def test_a_first_connection_that_an_ingress_cuts_is_opened_again_but_not_for_ever() -> None:
    gateway = FakeGateway((JobUp(job=JOB),))
    with running(gateway) as remote:
        gateway.cuts = gateway_client.CUTS - 1
        assert remote.start(REQUEST) == JOB
        gateway.cuts = gateway_client.CUTS
        with pytest.raises(ConnectionFailedError, match="cannot reach"):
            remote.start(REQUEST)
    assert gateway.cuts == 0


def test_a_question_is_repeated_after_an_ingress_has_cut_its_connection_but_not_for_ever() -> None:
    gateway = FakeGateway(about={"workers": 1})
    running_job = RunningJob(name="", namespace="team", uid="", token="token", meshes={"workers": 1})
    with running(gateway) as remote:
        gateway.cuts = gateway_client.CUTS - 1
        assert remote.refreshed(running_job)
        gateway.cuts = gateway_client.CUTS
        with pytest.raises(ConnectionFailedError, match="cannot reach"):
            remote.refreshed(running_job)
    assert gateway.cuts == 0


def test_a_gateway_that_was_reached_once_may_be_unreachable_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter(["closed", "unreachable", "up"])

    def ask(self: RemoteGateway, request: ProvisioningRequest, timeout: float) -> Iterator[BaseModel]:
        match next(attempts):
            case "unreachable":
                raise ConnectionFailedError("connection refused")
            case "up":
                yield JobUp(job=JOB)

    monkeypatch.setattr(RemoteGateway, "_ask", ask)
    assert RemoteGateway("ws://127.0.0.1:1", "token").start(REQUEST) == JOB


def test_the_client_gives_up_on_a_gateway_that_stays_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "RECONNECT_TIMEOUT", 0.1)
    message = r"lost the connection to the gateway at .* could not reconnect within 0\.1 s: it closes each connection"
    with running(FakeGateway()) as remote, pytest.raises(ConnectionFailedError, match=message):
        remote.start(REQUEST)


class Clock:
    """Stands in for ``time``; sleeping takes none."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("held", "cuts", "problem"),
    [
        (30.0, 6, ""),  # an ingress cuts each connection, for three minutes
        (30.0, None, "did not reply within 260 s, over several connections"),
        (0.0, None, r"could not reconnect within 60 s: it closes each connection"),
    ],
)
def test_only_the_time_without_a_connection_counts_as_such(
    monkeypatch: pytest.MonkeyPatch, held: float, cuts: int | None, problem: str
) -> None:
    clock, asked = Clock(), list[float]()

    def ask(self: RemoteGateway, request: ProvisioningRequest, timeout: float) -> Iterator[BaseModel]:
        asked.append(clock.now)
        clock.now += held
        if cuts is not None and len(asked) > cuts:
            yield JobUp(job=JOB)

    monkeypatch.setattr(gateway_client, "time", clock)
    monkeypatch.setattr(gateway_client, "LONGEST_DELAY", 5.0)
    monkeypatch.setattr(RemoteGateway, "_ask", ask)
    replies = RemoteGateway("ws://127.0.0.1:1", "token")._ask_with_retries(ListJobs(namespace=None), 200)
    with pytest.raises(ConnectionFailedError, match=problem) if problem else nullcontext():
        assert next(replies) == JobUp(job=JOB)


def test_a_request_to_a_gateway_that_hangs_up_before_it_is_sent_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = iter([ConnectionClosedError(None, None)])

    def send(self: ClientConnection, message: str) -> None:
        if error := next(sent, None):
            self.close()
            raise error
        original(self, message)

    original = ClientConnection.send
    monkeypatch.setattr(ClientConnection, "send", send)
    with running(FakeGateway((JobUp(job=JOB),))) as remote:
        assert remote.start(REQUEST) == JOB


def test_a_rejected_start_carries_the_reason() -> None:
    gateway = FakeGateway((RequestRejected(reason="17 pods are more than 16"),))
    with (
        running(gateway) as remote,
        pytest.raises(JobStartFailed, match=r"the gateway at .*: 17 pods are more than 16"),
    ):
        remote.start(REQUEST)


def test_the_gateway_of_one_job_creates_none() -> None:
    with (
        running(FakeGateway(status=404)) as remote,
        pytest.raises(
            JobError, match=r"the gateway at .* serves one job and creates none\. To use its job, omit compute="
        ),
    ):
        remote.start(REQUEST)


def test_the_gateway_of_one_job_is_used_without_a_name() -> None:
    with running(FakeGateway(about={"workers": 2})) as remote:
        job = remote.find_job(None, "team")
        assert (job.meshes, job.uid) == ({"workers": 2}, "")
        assert remote.refreshed(job)
        assert remote.dialer(job) is remote._dialer
        remote.end(job)  # it was not started through this gateway, so it keeps running


def test_a_job_is_found_by_its_name() -> None:
    gateway = FakeGateway((JobUp(job=JOB),), (RequestRejected(reason="there is no such job", missing=True),))
    with running(gateway) as remote:
        assert remote.find_job("trainer", "team") == JOB
        with pytest.raises(JobNotRunning, match="there is no such job"):
            remote.find_job("trainer", "team")
        assert str(remote.dialer(JOB)).endswith("/v1/jobs/team/trainer")
    assert gateway.requests[0] == FindJob(name="trainer", namespace="team")


def test_a_job_is_reached_with_the_drivers_own_token_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    monkeypatch.delenv("MESHGATE_TOKEN", raising=False)
    monkeypatch.setenv("MESHGATE_TOKEN_FILE", str(file))
    dialer = RemoteGateway("ws://127.0.0.1:1", None).dialer(JOB.model_copy(update={"token": ""}))
    route = asyncio.run(dialer.dial())
    assert (route.token, route.renews_token) == ("first", True)
    file.write_text("renewed\n")
    assert asyncio.run(dialer.dial()).token == "renewed"
    file.unlink()
    with pytest.raises(ConnectionFailedError, match="MESHGATE_TOKEN_FILE"):
        asyncio.run(dialer.dial())
    monkeypatch.setenv("MESHGATE_TOKEN", "constant")
    route = asyncio.run(RemoteGateway("ws://127.0.0.1:1", None)._dialer.dial())
    assert (route.token, route.renews_token) == ("constant", False)


def test_a_variable_that_the_program_sets_again_counts_for_the_next_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", "first")
    remote = RemoteGateway("ws://127.0.0.1:1", None)
    for dialer in (remote._dialer, remote.dialer(JOB.model_copy(update={"token": ""}))):
        monkeypatch.setenv("MESHGATE_TOKEN", "first")
        assert asyncio.run(dialer.dial()).token == "first"
        monkeypatch.setenv("MESHGATE_TOKEN", "second")
        route = asyncio.run(dialer.dial())
        assert (route.token, route.renews_token) == ("second", False)


LISTED = ListedJob(name="trainer", namespace="team", uid="1", meshes={"workers": 1}, created=0.0, owner="alice")
REPLACED = LISTED.model_copy(update={"uid": "2"})  # a later job of its name


def test_jobs_are_listed_in_parts() -> None:
    other = LISTED.model_copy(update={"name": "other", "uid": "2"})
    gateway = FakeGateway((JobsListed(jobs=(LISTED,), more=True), JobsListed(jobs=(other,))))
    with running(gateway) as remote:
        assert remote.list_jobs("team") == [LISTED, other]
    assert gateway.requests == [ListJobs(namespace="team")]


def test_a_list_that_was_cut_off_is_requested_again() -> None:
    gateway = FakeGateway((JobsListed(jobs=(LISTED,), more=True),), (JobsListed(jobs=(LISTED,)),))
    with running(gateway) as remote:
        assert remote.list_jobs("") == [LISTED]
    assert gateway.requests[-1] == ListJobs(namespace=None)


def test_a_provisioning_gateway_without_a_name_lists_what_can_be_named() -> None:
    with (
        running(FakeGateway((JobsListed(jobs=(LISTED,)),))) as remote,
        pytest.raises(JobError, match=r"pass KubernetesJob\(name=…\).* in namespace 'team': trainer"),
    ):
        remote.find_job(None, "team")


def test_a_job_with_another_uid_is_not_the_same_job() -> None:
    gateway = FakeGateway((JobUp(job=JOB.model_copy(update={"uid": "2"})),), (JobUp(job=JOB),))
    with running(gateway) as remote:
        assert not remote.refreshed(JOB)
        assert remote.refreshed(JOB)


def test_ending_a_job_that_is_gone_succeeds() -> None:
    gateway = FakeGateway(
        (JobEnded(),), (RequestRejected(reason="there is no such job", missing=True),), (RequestRejected(reason="no"),)
    )
    with running(gateway) as remote:
        remote.end(JOB)
        remote.end(JOB)
        with pytest.raises(JobError, match=": no"):
            remote.end(JOB)


def too_old(ask: str) -> RequestRejected:
    """The answer to a ``uid`` of a gateway from before it; that of this version, in a message that has none."""
    with pytest.raises(ValidationError) as error:
        parse_request('{"ask": "find", "name": "trainer", "namespace": "team", "uid": "1"}')
    return RequestRejected(reason=rejection(error.value).reason.replace("find", ask))


def test_the_job_to_end_is_named_with_its_uid() -> None:
    gateway = FakeGateway((JobEnded(),))
    with running(gateway) as remote:
        remote.end(JOB)
    assert gateway.requests == [EndJob(name="trainer", namespace="team", uid="1")]


def test_a_gateway_that_does_not_know_uids_is_asked_whose_the_name_is_before_the_job_is_ended() -> None:
    of_another_version = LISTED.model_copy(update={"meshes": None})
    neighbour = LISTED.model_copy(update={"name": "other", "uid": "2"})
    by_name = EndJob(name="trainer", namespace="team")
    for listed, then in ((LISTED, [by_name]), (of_another_version, [by_name]), (neighbour, [by_name]), (REPLACED, [])):
        gateway = FakeGateway((too_old("end"),), (JobsListed(jobs=(listed,)),), (JobEnded(),))
        with running(gateway) as remote:
            remote.end(JOB)
        assert gateway.requests[1:] == [ListJobs(namespace="team"), *then]
    unknown = FakeGateway((too_old("end"),), (RequestRejected(reason="the API server is busy"),))
    with running(unknown) as remote, pytest.raises(JobError, match="the API server is busy"):
        remote.end(JOB)
    denied = FakeGateway((too_old("end"),), (JobsListed(jobs=()),), (RequestRejected(reason="denied"),))
    with running(denied) as remote, pytest.raises(JobError, match="denied"):
        remote.end(JOB)


def test_a_gateway_that_does_not_know_uids_is_asked_whose_the_name_is_before_the_job_is_scaled() -> None:
    grown = JOB.model_copy(update={"meshes": {"workers": 4}})
    gateway = FakeGateway((too_old("scale"),), (JobsListed(jobs=(LISTED,)),), (JobUp(job=grown),))
    with running(gateway) as remote:
        assert remote.scale(JOB, "workers", 4, 60) == grown
    assert gateway.requests[2] == ScaleJob(name=JOB.name, namespace="team", mesh="workers", hosts=4, timeout=60)
    replaced = FakeGateway((too_old("scale"),), (JobsListed(jobs=(REPLACED,)),))
    with running(replaced) as remote, pytest.raises(JobNotRunning, match="and another job has its name now"):
        remote.scale(JOB, "workers", 4, 60)


def test_a_rejected_token_is_an_authentication_error() -> None:
    with running(FakeGateway(status=401)) as remote:
        for call in (lambda: remote.find_job(None, "team"), lambda: remote.start(REQUEST)):
            with pytest.raises(AuthenticationError, match="token rejected"):
                call()


def test_an_unreachable_gateway_is_reported_at_once() -> None:
    with closed_port() as port:
        remote = RemoteGateway(f"ws://127.0.0.1:{port}", "token")
        for call in (lambda: remote.find_job(None, "team"), lambda: remote.start(REQUEST)):
            with pytest.raises(ConnectionFailedError, match=r"^cannot reach the gateway at"):
                call()


@pytest.mark.parametrize("status", [200, 401, 404, 410])
def test_an_answer_of_an_ingress_says_nothing_about_the_job(status: int) -> None:
    ingress = FakeGateway(about={"other": 3}, status=0 if status == 200 else status)
    ingress.proves = False
    with running(ingress) as remote, pytest.raises(ConnectionFailedError, match="is not a meshgate gateway"):
        remote.refreshed(RunningJob(name="", namespace="team", uid="", token="token", meshes={"workers": 1}))


def test_another_server_that_opens_a_websocket_gets_no_job() -> None:
    other = FakeGateway((JobUp(job=JOB),))
    other.proves = False
    with running(other) as remote, pytest.raises(ConnectionFailedError, match="HTTP 101 and is not a meshgate gateway"):
        remote.start(REQUEST)
    assert other.requests == []


def test_a_redirect_is_not_followed() -> None:
    """It would lead the token, and the job to start, to another server."""
    ingress, other = FakeGateway(), FakeGateway((JobUp(job=JOB),))
    with running(other) as ingress.redirects_to, running(ingress) as remote:
        with pytest.raises(ConnectionFailedError, match="responded with HTTP 307 and is not a meshgate gateway"):
            remote.refreshed(RunningJob(name="", namespace="team", uid="", token="token", meshes={"workers": 1}))
        with pytest.raises(ConnectionFailedError, match="responded with HTTP 307 and is not a meshgate gateway"):
            remote.start(REQUEST)
    assert ingress.asked == ["/v1/job", "/v1/jobs"]
    assert other.asked == []


def test_a_job_is_scaled_through_the_gateway_and_its_progress_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "plain")
    grown = JOB.model_copy(update={"meshes": {"workers": 4}, "token": ""})
    gateway = FakeGateway((JobProgress(progress=Progress(meshes=(), problems=())), JobUp(job=grown)))
    with running(gateway) as remote:
        assert remote.scale(JOB, "workers", 4, 60) == grown.model_copy(update={"token": JOB.token})
    assert gateway.requests == [ScaleJob(name=JOB.name, namespace="team", uid="1", mesh="workers", hosts=4, timeout=60)]
    assert "has 4 hosts in mesh 'workers'" in capfd.readouterr().err


def test_a_refused_change_of_the_number_of_hosts_says_which_and_why() -> None:
    refused = RequestRejected(reason="5 pods exceed the limit of 4")
    message = rf"cannot scale mesh 'workers' of job '{JOB.name}' from 1 to 5 hosts: the gateway at .*: 5 pods exceed"
    with running(FakeGateway((refused,))) as remote, pytest.raises(JobError, match=message):
        remote.scale(JOB, "workers", 5, 60)


@pytest.mark.parametrize(
    ("health", "runs"),
    [(b'{"version": "0.0.9"}', "meshgate 0.0.9"), (b"<html>an ingress</html>", "an older version of meshgate")],
)
def test_a_gateway_that_is_too_old_to_scale_says_so_with_its_version(health: bytes, runs: str) -> None:
    unknown = "Input tag 'scale' found using 'ask' does not match any of the expected tags: 'start', 'find', 'list'"
    gateway = FakeGateway((RequestRejected(reason=unknown),))
    gateway.health = health
    message = (
        rf"to 5 hosts: the gateway at .*: this gateway runs {runs}, which cannot .* ask its operator to upgrade it"
    )
    with running(gateway) as remote, pytest.raises(JobError, match=message):
        remote.scale(JOB, "workers", 5, 60)


def test_the_numbers_of_hosts_are_the_present_ones_but_the_gateway_of_a_job_does_not_change_them() -> None:
    own = RunningJob(name="", namespace="team", uid="", token="token", meshes={"workers": 1})
    with running(FakeGateway(about={"workers": 3})) as remote:
        assert remote.refreshed(own) == own.model_copy(update={"meshes": {"workers": 3}})
        assert remote.refreshed(own.model_copy(update={"meshes": {"others": 1}})) is None
        with pytest.raises(
            JobUnsupported, match=r"the gateway at .* serves one job, .* scale\(\) needs a provisioning"
        ):
            remote.scale(own, "workers", 2, 1)
    scaled = JOB.model_copy(update={"meshes": {"workers": 4}, "token": ""})
    with running(FakeGateway((JobUp(job=scaled),))) as remote:
        assert remote.refreshed(JOB) == scaled.model_copy(update={"token": JOB.token})

"""The responses of the gateway over real sockets, with a stub engine."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from meshgate_gateway.hosts.provider import HostsUnavailable
from meshgate_gateway.http import routes as routes_module
from meshgate_gateway.http.auth import Origin, TokenAuthenticator
from meshgate_gateway.http.messages import HeadParser, Response
from meshgate_gateway.http.routes import Routes
from meshgate_gateway.sessions.session_manager import ConnectRequest
from meshgate_gateway.sessions.session_table import Admission, Gone, Sessions
from meshgate_wire import PROTOCOL_VERSION
from meshgate_wire.proof import Prover, gateway_name, new_nonce
from meshgate_wire.status import JobStatus, SlurmAllocation
from tests.gateway.captured_logs import capture_logs
from tests.gateway.server_process import TOKEN, ServerProcess, handshake, request


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a,ipc:///nowhere/b", "--max-sessions", "64") as server:
        yield server


# --- health and status ------------------------------------------------------------------------------------


def test_health_needs_no_token(server: ServerProcess) -> None:
    assert server.ask("/healthz").status == 200
    assert server.ask("/readyz").status == 200


def test_a_response_to_head_has_no_body(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(request("/healthz", method="HEAD"))
        status, headers = connection.head()
        assert status == 200
        assert int(headers["Content-Length"]) > 0
        assert connection.rest() == b""


def test_the_job_is_described_with_the_token(server: ServerProcess) -> None:
    answer = server.ask("/v1/job", token=TOKEN)
    assert answer.status == 200
    assert answer.body["meshes"] == {"workers": 2}
    assert answer.body["version"] == "0.1.0"


def test_an_unknown_path_is_not_found(server: ServerProcess) -> None:
    assert server.ask("/admin").status == 404
    assert server.ask("/v1/sessions/short").status == 404
    assert server.ask(f"/v1/sessions/{uuid.uuid4().hex.upper()}").status == 404


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/job"), ("POST", "/v1/job"), ("DELETE", "/v1/runs")])
def test_other_methods_are_not_allowed(server: ServerProcess, method: str, path: str) -> None:
    answer = server.ask(path, method=method, token=TOKEN)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_the_hosts_of_a_mesh_are_listed(server: ServerProcess) -> None:
    hosts = server.ask("/v1/hosts?mesh=workers", token=TOKEN).body["hosts"]
    assert [host["address"] for host in hosts] == ["ipc:///nowhere/a", "ipc:///nowhere/b"]
    unknown = server.ask("/v1/hosts?mesh=others", token=TOKEN)
    assert (unknown.status, unknown.error) == (404, "the job has no mesh 'others'; its meshes: workers")
    assert server.ask("/v1/hosts?mesh=workers").status == 401


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: ServerProcess) -> None:
    answer = server.ask("/v1/runs", method="POST", token=TOKEN, Content_Length=str(49 * 1024))
    assert answer.status == 413


# --- proofs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/v1/job", TOKEN, 200), ("/v1/job", "wrong", 401), ("/v1/job", None, 401), ("/admin", TOKEN, 404)],
)
def test_a_response_proves_that_it_is_the_gateways(
    server: ServerProcess, path: str, token: str | None, status: int
) -> None:
    nonce = new_nonce()
    with server.connect() as connection:
        connection.send(request(path, token=token, Meshgate_Nonce=nonce))
        received, headers = connection.head()
        body = connection.rest()
    prover = Prover.of_request(nonce, token)
    assert prover is not None
    assert received == status
    assert prover.prover_of(headers["Meshgate-Proof"], status, body) == gateway_name(TOKEN)
    assert "Meshgate-Proof" not in server.ask(path, token=token).headers  # without a nonce


def test_the_end_of_a_session_is_proven(server: ServerProcess) -> None:
    nonce = new_nonce()
    with server.dial(resume=True, Meshgate_Nonce=nonce) as connection:
        status, headers = connection.head()
        body = connection.rest()
    prover = Prover.of_request(nonce, TOKEN)
    assert prover is not None
    assert status == 410
    assert prover.prover_of(headers["Meshgate-Proof"], 410, body) == gateway_name(TOKEN)


def test_the_engine_can_prove_its_response(server: ServerProcess) -> None:
    nonce = new_nonce()
    with server.dial(Meshgate_Nonce=nonce) as connection:
        assert connection.head()[0] == 101
        described = connection.command("describe")
    prover = Prover.of_request(nonce, TOKEN)
    assert prover is not None
    assert (described["gateway"], described["proof_key"]) == (gateway_name(TOKEN), prover.key)


# --- authentication ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", "", "\xff"])
def test_requests_without_the_token_are_rejected(server: ServerProcess, token: str | None) -> None:
    for path in ("/v1/job", f"/v1/sessions/{uuid.uuid4().hex}"):
        with server.connect() as connection:
            connection.send(handshake(path.rpartition("/")[2], token=token) if "sessions" in path else request(path))
            answer = connection.http()
        assert answer.status == 401
        assert "MESHGATE_TOKEN" in answer.error
        assert "\n" not in answer.error
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_another_authentication_scheme_is_rejected(server: ServerProcess) -> None:
    assert server.ask("/v1/job", Authorization=f"Basic {TOKEN}").status == 401


def test_repeated_credentials_are_malformed(server: ServerProcess) -> None:
    with server.connect() as connection:
        head = request("/v1/job", token=TOKEN)
        connection.send(head[:-2] + b"Authorization: Bearer other\r\n\r\n")
        assert connection.http().status == 400


def test_the_engine_receives_neither_token_nor_credentials(server: ServerProcess) -> None:
    with server.join() as session:
        facts = session.command("describe")
    assert "MESHGATE_TOKEN" not in facts["environment"]
    assert TOKEN not in facts["head"]
    assert "authorization" not in facts["head"].lower()
    assert "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==" in facts["head"]


# --- versions ---------------------------------------------------------------------------------------------


def test_the_error_for_a_newer_client_asks_to_upgrade_the_gateway(server: ServerProcess) -> None:
    answer = server.failed(Meshgate_Protocol="7", Meshgate_Version="9.9")
    assert answer.status == 426
    assert f"protocol {PROTOCOL_VERSION}" in answer.error
    assert "protocol 7 (meshgate 9.9)" in answer.error
    assert answer.error.endswith("upgrade the gateway")


@pytest.mark.parametrize("protocol", ["0", "", "one", "1.0", "-1"])
def test_the_error_for_an_older_client_asks_to_upgrade_the_client(server: ServerProcess, protocol: str) -> None:
    answer = server.failed(Meshgate_Protocol=protocol)
    assert answer.status == 426
    assert answer.error.endswith("upgrade the client")


# --- malformed, slow and large ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nfive and more",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n1",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n1",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\nmore",
        b"\r\n\r\n",
    ],
)
def test_a_malformed_head_is_rejected_and_the_server_continues(server: ServerProcess, head: bytes) -> None:
    with server.connect() as connection:
        connection.send(head)
        assert connection.http().status == 400
    assert server.ask("/healthz").status == 200


def test_too_many_headers_are_rejected(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n")
        assert connection.http().status == 431


def test_an_oversized_head_is_rejected_before_its_end(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nA: " + b"b" * 40_000)
        assert connection.http().status == 431


def test_a_session_needs_a_websocket(server: ServerProcess) -> None:
    answer = server.ask(f"/v1/sessions/{uuid.uuid4().hex}", token=TOKEN)
    assert answer.status == 400
    assert "websocket" in answer.error


@pytest.mark.parametrize("missing", ["Sec-WebSocket-Key", "Sec-WebSocket-Version", "Connection"])
def test_an_incomplete_handshake_starts_no_session(server: ServerProcess, missing: str) -> None:
    before = server.ask("/v1/job", token=TOKEN).body["sessions"]
    whole = handshake(uuid.uuid4().hex)
    lines = [line for line in whole.split(b"\r\n") if not line.startswith(missing.encode() + b":")]
    assert len(lines) == whole.count(b"\r\n")
    with server.connect() as connection:
        connection.send(b"\r\n".join(lines))
        answer = connection.http()
    assert (answer.status, missing in answer.error) == (400, True)
    assert server.ask("/v1/job", token=TOKEN).body["sessions"] == before


def test_a_head_may_arrive_byte_by_byte(server: ServerProcess) -> None:
    with server.connect() as connection:
        for byte in request("/healthz"):
            connection.send(bytes([byte]))
        assert connection.http().status == 200


def test_silent_connections_do_not_block_others(server: ServerProcess) -> None:
    silent = [server.connect() for _ in range(20)]
    assert server.ask("/healthz").status == 200
    for connection in silent:
        connection.close()


# --- sessions of an earlier gateway of the job


UNKNOWN = "this gateway does not know the session: the gateway was restarted, or the session ended long ago"
KILLED = "the container of pod t-gateway-0 ended at 12:00 (OOMKilled) and was started again"


@pytest.mark.parametrize(
    ("gone", "restarted", "reason"),
    [
        (None, KILLED, f"{UNKNOWN}; {KILLED}"),
        (None, "", UNKNOWN),
        (Gone("ended", "another program ended it"), KILLED, "another program ended it"),
    ],
)
def test_the_client_of_a_session_that_was_lost_with_an_earlier_gateway_learns_why_that_ended(
    gone: Gone | None, restarted: str, reason: str
) -> None:
    session, table = uuid.uuid4().hex, Sessions(lease=60.0, limit=8, now=0.0)
    if gone is not None:
        table.restore_gone(session, gone)

    async def connect(asked: ConnectRequest, connection: socket.socket) -> Admission:
        return table.admit(asked.session, asked.owner, resume=asked.resume, now=0.0)

    async def restart_reason() -> str:
        return restarted

    async def respond() -> Response | None:
        parts: Any = (TokenAuthenticator(SecretStr(TOKEN)), SimpleNamespace(connect=connect), None, None)
        resuming = HeadParser().feed(handshake(session, resume=True))
        assert resuming is not None
        with socket.socket() as connection:
            return await Routes(*parts, restart_reason=restart_reason).respond(resuming, connection)

    response = asyncio.run(respond())
    assert response is not None
    assert (response.status, response.body["reason"]) == (410, reason)


# --- the audit log of what is read


def test_what_a_caller_reads_again_is_in_the_audit_log_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(routes_module, "time", SimpleNamespace(monotonic=lambda: now))
    unused: Any = None
    routes = Routes(unused, unused, unused, unused, job={"job": "trainer"})
    with capture_logs() as events:
        for caller in ("alice", "alice", "bob"):
            routes._audit_reading("read output", Origin("10.0.0.1"), caller)
        routes._audit_reading("read status", Origin("10.0.0.1"), "alice")
        now += 61
        routes._audit_reading("read output", Origin("10.0.0.1"), "alice")
    read = [(each["caller"], each["action"], each["job"]) for each in events]
    again = ("alice", "read output", "trainer")
    assert read == [again, ("bob", "read output", "trainer"), ("alice", "read status", "trainer"), again]


# --- the numbers of hosts of a scaled job


@pytest.mark.parametrize(("failure", "status"), [("", 200), ("the API server does not respond", 409)])
def test_the_gateway_of_a_job_reads_its_numbers_of_hosts_again_on_request(failure: str, status: int) -> None:
    meshes = {"workers": 2}

    async def read_sizes() -> None:
        if failure:
            raise HostsUnavailable(failure)
        meshes["workers"] = 3

    async def respond(method: str) -> Response | None:
        sessions = SimpleNamespace(statistics=lambda: SimpleNamespace(sessions=0, connected=0), inspection=None)
        hosts = SimpleNamespace(meshes=lambda: meshes)
        parts: Any = (TokenAuthenticator(SecretStr(TOKEN)), sessions, hosts, None)
        asked = HeadParser().feed(request("/v1/job", token=TOKEN, method=method))
        assert asked is not None
        with socket.socket() as connection:
            return await Routes(*parts, read_sizes=read_sizes).respond(asked, connection)

    described, read = asyncio.run(respond("GET")), asyncio.run(respond("POST"))
    assert described is not None
    assert read is not None
    assert (described.body["meshes"], read.status) == (meshes if failure else {"workers": 2}, status)
    assert read.body.get("meshes") == (None if failure else {"workers": 3})


# --- what Slurm has allocated


@pytest.mark.parametrize("facts", [{}, {"slurm": {"job_id": 7, "state": "RUNNING", "partition": "gpu", "nodes": 2}}])
def test_the_status_of_a_slurm_job_shows_what_the_description_of_the_job_says(facts: dict[str, Any]) -> None:
    async def status() -> JobStatus:
        return JobStatus(gateway_version="1", python="3.11", meshes={})

    async def respond() -> Response | None:
        sessions = SimpleNamespace(inspection=SimpleNamespace(status=status))
        parts: Any = (TokenAuthenticator(SecretStr(TOKEN)), sessions, None, None)
        asked = HeadParser().feed(request("/v1/status", token=TOKEN))
        assert asked is not None
        with socket.socket() as connection:
            return await Routes(*parts, job_facts=lambda: facts).respond(asked, connection)

    response = asyncio.run(respond())
    assert response is not None
    slurm = JobStatus.model_validate(response.body).slurm
    assert slurm == (SlurmAllocation(job_id=7, state="RUNNING", partition="gpu") if facts else None)

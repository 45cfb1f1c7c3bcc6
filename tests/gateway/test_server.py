"""What the server answers, over real sockets, with a stub in the engine's place."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.gateway.server_process import TOKEN, ServerProcess, dialling, request, wait_gone


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a,ipc:///nowhere/b", "--max-sessions", "64") as server:
        yield server


# --- health and status ------------------------------------------------------------------------------------


def test_health_is_told_to_anyone(server: ServerProcess) -> None:
    assert server.ask("/healthz").status == 200
    assert server.ask("/readyz").status == 200


def test_head_is_answered_without_a_body(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(request("/healthz", method="HEAD"))
        status, headers = connection.head()
        assert status == 200
        assert int(headers["Content-Length"]) > 0
        assert connection.rest() == b""


def test_the_job_is_described_to_who_holds_the_token(server: ServerProcess) -> None:
    answer = server.ask("/v1/job", token=TOKEN)
    assert answer.status == 200
    assert answer.body["meshes"] == {"workers": 2}
    assert answer.body["version"] == "0.1.0"


def test_an_unknown_path_is_not_found(server: ServerProcess) -> None:
    assert server.ask("/admin").status == 404
    assert server.ask("/v1/sessions/short").status == 404
    assert server.ask(f"/v1/sessions/{uuid.uuid4().hex.upper()}").status == 404


def test_other_methods_are_refused(server: ServerProcess) -> None:
    answer = server.ask("/v1/job", method="DELETE", token=TOKEN)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


# --- who may come in --------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", "", "\xff"])
def test_without_the_token_nobody_is_let_in(server: ServerProcess, token: str | None) -> None:
    for path in ("/v1/job", f"/v1/sessions/{uuid.uuid4().hex}"):
        with server.connect() as connection:
            connection.send(dialling(path.rpartition("/")[2], token=token) if "sessions" in path else request(path))
            answer = connection.http()
        assert answer.status == 401
        assert "MESHGATE_TOKEN" in answer.error
        assert "\n" not in answer.error
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_another_scheme_is_not_the_token(server: ServerProcess) -> None:
    assert server.ask("/v1/job", Authorization=f"Basic {TOKEN}").status == 401


def test_credentials_given_twice_are_malformed(server: ServerProcess) -> None:
    with server.connect() as connection:
        head = request("/v1/job", token=TOKEN)
        connection.send(head[:-2] + b"Authorization: Bearer other\r\n\r\n")
        assert connection.http().status == 400


def test_the_token_never_shows_in_the_log(server: ServerProcess) -> None:
    server.ask("/v1/job", token=TOKEN)
    server.ask(f"/v1/job?token={TOKEN}", token="a-secret-of-someone-else")
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nAuthorization Bearer " + TOKEN.encode() + b"\r\n\r\n")
        assert connection.http().status == 400
    with server.join() as session:
        session.command(f"print Authorization: Bearer {TOKEN} a-secret-of-someone-else")
        session.command(f"print {TOKEN}")
        session.command("print done")
        server.wait_logged("engine output", line="done")
    assert TOKEN not in server.log
    assert "Bearer a-secret" not in server.log
    assert "[redacted]" in server.log


def test_the_engine_gets_neither_the_token_nor_the_credentials(server: ServerProcess) -> None:
    with server.join() as session:
        told = session.command("describe")
    assert "MESHGATE_TOKEN" not in told["environment"]
    assert TOKEN not in told["head"]
    assert "authorization" not in told["head"].lower()
    assert "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==" in told["head"]


# --- versions ---------------------------------------------------------------------------------------------


def test_a_newer_client_is_told_to_upgrade_the_gateway(server: ServerProcess) -> None:
    answer = server.refused(Meshgate_Protocol="7", Meshgate_Version="9.9")
    assert answer.status == 426
    assert "protocol 1" in answer.error
    assert "protocol 7 (meshgate 9.9)" in answer.error
    assert answer.error.endswith("upgrade the gateway")


@pytest.mark.parametrize("protocol", ["0", "", "one", "1.0", "-1"])
def test_an_older_client_is_told_to_upgrade_itself(server: ServerProcess, protocol: str) -> None:
    answer = server.refused(Meshgate_Protocol=protocol)
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
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\nmore",
        b"\r\n\r\n",
    ],
)
def test_a_malformed_head_is_refused_and_the_server_goes_on(server: ServerProcess, head: bytes) -> None:
    with server.connect() as connection:
        connection.send(head)
        assert connection.http().status == 400
    assert server.ask("/healthz").status == 200


def test_too_many_headers_are_refused(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n")
        assert connection.http().status == 431


def test_an_oversized_head_is_refused_while_it_still_comes(server: ServerProcess) -> None:
    with server.connect() as connection:
        connection.send(b"GET / HTTP/1.1\r\nA: " + b"b" * 40_000)
        assert connection.http().status == 431


def test_a_session_needs_a_websocket(server: ServerProcess) -> None:
    answer = server.ask(f"/v1/sessions/{uuid.uuid4().hex}", token=TOKEN)
    assert answer.status == 400
    assert "websocket" in answer.error


@pytest.mark.parametrize("missing", ["Sec-WebSocket-Key", "Sec-WebSocket-Version", "Connection"])
def test_half_a_handshake_begins_no_session(server: ServerProcess, missing: str) -> None:
    before = server.ask("/v1/job", token=TOKEN).body["sessions"]
    whole = dialling(uuid.uuid4().hex)
    lines = [line for line in whole.split(b"\r\n") if not line.startswith(missing.encode() + b":")]
    assert len(lines) == whole.count(b"\r\n")
    with server.connect() as connection:
        connection.send(b"\r\n".join(lines))
        answer = connection.http()
    assert (answer.status, missing in answer.error) == (400, True)
    assert server.ask("/v1/job", token=TOKEN).body["sessions"] == before


def test_a_head_may_come_byte_by_byte(server: ServerProcess) -> None:
    with server.connect() as connection:
        for byte in request("/healthz"):
            connection.send(bytes([byte]))
        assert connection.http().status == 200


def test_a_connection_that_says_nothing_holds_up_no_other(server: ServerProcess) -> None:
    silent = [server.connect() for _ in range(20)]
    assert server.ask("/healthz").status == 200
    for connection in silent:
        connection.close()


# --- sessions ---------------------------------------------------------------------------------------------


def test_a_session_gets_an_engine_of_its_own(server: ServerProcess) -> None:
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    with server.join(one) as first, server.join(two) as second:
        a, b = first.command("describe"), second.command("describe")
    assert (a["session"], b["session"]) == (one, two)
    assert a["pid"] != b["pid"]


def test_a_new_connection_reaches_the_same_engine_and_ends_the_old_one(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as first:
        before = first.command("describe")
        with server.join(session, resume=True) as second:
            assert second.command("describe")["pid"] == before["pid"]
            assert first.closed_by_peer()


def test_a_session_waits_for_its_client(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        pid = connection.command("describe")["pid"]
    server.wait_logged("session disconnected", session=session)
    with server.join(session, resume=True) as connection:
        assert connection.command("describe")["pid"] == pid


def test_resuming_an_unknown_session_is_told_from_beginning_one(server: ServerProcess) -> None:
    answer = server.refused(resume=True)
    assert answer.status == 410
    assert answer.body["kind"] == "unknown"
    assert "restarted" in answer.body["reason"]


def test_a_killed_engine_is_explained_with_its_last_output(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.command("print the last words")
        connection.send(b"kill\n")
        assert connection.closed_by_peer()
    for _ in range(2):
        answer = server.refused(session, resume=True)
        assert answer.status == 410
        assert answer.body["kind"] == "died"
        assert "SIGKILL" in answer.body["reason"]
        assert "the last words" in answer.body["output"]


def test_an_engine_that_fails_is_explained_with_its_exit_code(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.send(b"exit 7\n")
        assert connection.closed_by_peer()
    assert "exit code 7" in server.refused(session, resume=True).body["reason"]


def test_an_engine_that_babbles_is_ended_alone(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join() as other, server.join(session) as connection:
        connection.send(b"babble\n")
        assert connection.closed_by_peer()
        assert server.refused(session, resume=True).body["kind"] == "died"
        assert other.command("describe")


def test_a_session_that_ended_in_order_is_over(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.send(b"goodbye\n")
        assert connection.closed_by_peer()
    answer = server.refused(session, resume=True)
    assert (answer.status, answer.body["kind"]) == (410, "ended")
    assert answer.body["output"] == ""


def test_what_an_engine_started_ends_with_it(server: ServerProcess) -> None:
    with server.join() as connection:
        pid = connection.command("spawn")["pid"]
        connection.send(b"kill\n")
        assert connection.closed_by_peer()
    wait_gone(pid)


def test_the_engine_learns_where_its_hosts_are(server: ServerProcess) -> None:
    with server.join() as connection:
        told = connection.command("hosts workers")
    assert [host["address"] for host in told["hosts"]] == ["ipc:///nowhere/a", "ipc:///nowhere/b"]
    assert [host["name"] for host in told["hosts"]] == ["workers-0", "workers-1"]


def test_a_mesh_that_the_job_lacks_is_an_error_with_those_it_has(server: ServerProcess) -> None:
    with server.join() as connection:
        told = connection.command("hosts trainers")
    assert "'trainers'" in told["error"]
    assert "workers" in told["error"]


def test_small_writes_are_not_held_back(server: ServerProcess) -> None:
    with server.join() as connection:
        assert connection.command("describe")["nodelay"]


# --- settings that need a server of their own -------------------------------------------------------------


def test_a_session_outlives_its_connection_by_the_lease_and_no_more() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--lease", "1.5") as server:
        with server.join(session) as connection:
            pid = connection.command("describe")["pid"]
        server.wait_logged("session ended", session=session, kind="expired")
        wait_gone(pid)
        with server.join() as connection:
            assert connection.command("describe")["lease"] == 1.5


def test_there_are_no_more_sessions_than_allowed() -> None:
    with ServerProcess("--max-sessions", "1") as server, server.join():
        answer = server.refused()
        assert answer.status == 503
        assert "--max-sessions" in answer.error


def test_an_engine_that_cannot_start_is_explained_on_the_first_connection() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "crash"}) as server:
        answer = server.refused()
        assert answer.status == 410
        assert answer.body["kind"] == "died"
        assert "the stub was told to crash" in answer.body["output"]


def test_an_engine_that_dies_before_it_takes_the_connection_is_explained_on_it() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "mute"}) as server, server.dial() as connection:
        began = server.wait_logged("session began")
        os.kill(began["pid"], signal.SIGKILL)
        assert "SIGKILL" in connection.http().body["reason"]


def test_sessions_work_without_an_engine_started_ahead() -> None:
    with ServerProcess("--warm-engines", "0") as server, server.join() as connection:
        assert connection.command("describe")

"""Sessions and refusals leave an audit event with identity and address. Real gateway process, stub engine."""

from __future__ import annotations

import socket
import uuid

from meshgate_gateway.http.audit import origin_of
from meshgate_gateway.http.messages import HeadParser
from tests.gateway.server_process import TOKEN, ServerProcess, request


def test_a_session_is_recorded_with_its_caller_and_address() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a") as server, server.dial(session) as connection:
        assert connection.head()[0] == 101
        event = server.wait_logged("audit", action="session", outcome="allowed")
    assert (event["session"], event["caller"], event["address"]) == (session, "job", "127.0.0.1")
    assert "forwarded_for" not in event


def test_a_refusal_is_recorded_with_its_reason_and_without_the_token() -> None:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a") as server:
        forwarded = {"X-Forwarded-For": "203.0.113.7" + " " * 300}
        assert server.ask("/v1/job", token="guessed", **forwarded).status == 401
        event = server.wait_logged("audit", action="describe job", outcome="refused")
        assert "guessed" not in server.log
    assert event["caller"] is None
    assert event["forwarded_for"].strip() == "203.0.113.7"
    assert "is not the token of this gateway" in event["reason"]


def test_a_peer_on_a_unix_socket_is_this_machine() -> None:
    parsed = HeadParser().feed(request("/v1/job", token=TOKEN))
    assert parsed is not None
    one, other = socket.socketpair()
    with one, other:
        assert origin_of(parsed, one).address == "this machine"

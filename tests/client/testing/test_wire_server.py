"""WireServer authenticates, refuses, and keeps sessions over cuts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from websockets.frames import CloseCode

import meshgate as kt
from meshgate.testing.wire_server import WireServer
from meshgate_wire.messages import Done, EndSession
from tests.waiting import wait_for


@pytest.fixture
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        server.on[EndSession] = lambda session, header, _: session.send(Done(call=header.call))
        yield server


def test_a_wrong_token_is_refused(server: WireServer) -> None:
    with pytest.raises(kt.AuthenticationError, match="MESHGATE_TOKEN"):
        kt.Client.connect(kt.UrlDialer(server.url, "wrong"))


def test_connections_are_refused_on_request(server: WireServer) -> None:
    server.refuse = lambda request: (410, {"error": "gone", "kind": "ended", "reason": "the job was killed"})
    with pytest.raises(kt.GatewayError, match="the job was killed"):
        kt.Client.connect(kt.UrlDialer(server.url, server.token))


@pytest.mark.parametrize("end", [WireServer.cut, WireServer.cut_links])
def test_a_session_outlives_its_connection(server: WireServer, end: object) -> None:
    assert callable(end)
    with kt.Client.connect(kt.UrlDialer(server.url, server.token)) as client:
        (session,) = server.sessions.values()
        end(server)
        client.attach_hosts("workers", 1)
        wait_for(lambda: server.received, "the request over the new connection")
    assert list(server.sessions.values()) == [session]
    assert len(server.requests) == 2
    assert [header.type for header in server.received] == ["attach_hosts", "end_session"]


def test_a_close_code_ends_connections_with_a_reason(server: WireServer) -> None:
    with kt.Client.connect(kt.UrlDialer(server.url, server.token)) as client:
        server.close(CloseCode.PROTOCOL_ERROR, "a reason")
        client.attach_hosts("workers", 1)
        wait_for(lambda: server.received, "the request over the new connection")
    assert len(server.requests) == 2

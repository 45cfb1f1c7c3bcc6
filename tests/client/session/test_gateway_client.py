"""Requests to a gateway, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshgate.errors import AuthenticationError, ConnectionFailedError
from meshgate.session.dialing import Route, UrlDialer
from meshgate.session.gateway_client import request_json
from tests.client.proofs import proof_for
from tests.ports import closed_port


@contextlib.contextmanager
def answering(listener: socket.socket, response: bytes, *, proven: bool = True) -> Iterator[list[bytes]]:
    """A server that answers one request, as a gateway (``proven``) or in its place."""
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(4096)
            received.append(data)
            connection.sendall(with_proof(response, data) if proven and response else response)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield received
    finally:
        thread.join()
        listener.close()


def with_proof(response: bytes, request: bytes) -> bytes:
    status_line, _, rest = response.partition(b"\r\n")
    headers = dict(line.split(": ", 1) for line in request.decode().split("\r\n")[1:] if line)
    proof = proof_for(headers, int(status_line.split()[1]), response.partition(b"\r\n\r\n")[2])
    lines = [f"{name}: {value}\r\n".encode() for name, value in proof.items()]
    return b"".join([status_line, b"\r\n", *lines, rest])


def http_response(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def url_of(listener: socket.socket) -> str:
    return f"ws://127.0.0.1:{listener.getsockname()[1]}"


class SocketDialer:
    """Dials by a connected socket, as a port-forward does."""

    def __init__(self, dialer: UrlDialer) -> None:
        self._dialer = dialer

    async def dial(self) -> Route:
        route = await self._dialer.dial()
        host, port = route.url.removeprefix("ws://").rsplit(":", 1)
        return replace(route, url="ws://gateway.meshgate", sock=socket.create_connection((host, int(port))))

    async def gone(self) -> str | None:
        return None


@pytest.mark.parametrize("forwarded", [False, True])
def test_the_answer_is_json_and_the_request_has_the_token(forwarded: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    dialer = UrlDialer(f"{url_of(listener)}/job/", "secret")
    with answering(listener, http_response("200 OK", b'{"a": 1}')) as received:
        if forwarded:
            dialer = UrlDialer(url_of(listener), "secret")
        assert request_json(SocketDialer(dialer) if forwarded else dialer, "/v1/status?x=1") == {"a": 1}
    assert b"Authorization: Bearer secret\r\n" in received[0]
    assert received[0].startswith(b"GET /v1/status?x=1 " if forwarded else b"GET /job/v1/status?x=1 ")


def test_a_unix_socket_is_preferred() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        with answering(listener, http_response("200 OK", b"[]")):
            assert request_json(UrlDialer("ws://127.0.0.1:1", "x", unix_socket=str(path)), "/v1/status") == []


@pytest.mark.parametrize(
    ("response", "error", "text"),
    [
        (http_response("401 Unauthorized", b'{"error": "wrong token"}'), AuthenticationError, "wrong token"),
        (http_response("404 Not Found", b'{"error": "no such path"}'), Exception, "no such path"),
        (http_response("503 Busy", b""), ConnectionFailedError, "HTTP 503"),
        (http_response("200 OK", b"<html>"), ConnectionFailedError, "other than JSON"),
        (b"", ConnectionFailedError, "cannot reach the gateway at ws://127.0.0.1"),
    ],
)
def test_a_rejection_is_an_error_with_its_reason(response: bytes, error: type[Exception], text: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with answering(listener, response), pytest.raises(error, match=text):
        request_json(UrlDialer(url_of(listener), "secret"), "/v1/status")


@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "404 Not Found"])
def test_an_answer_of_another_server_is_no_answer(status: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    response = http_response(status, b'{"error": "Set MESHGATE_TOKEN"}')
    with (
        answering(listener, response, proven=False),
        pytest.raises(ConnectionFailedError, match="is not a meshgate gateway"),
    ):
        request_json(UrlDialer(url_of(listener), "secret"), "/v1/status")


def test_a_gateway_that_does_not_listen_cannot_be_reached() -> None:
    with closed_port() as port, pytest.raises(ConnectionFailedError, match="cannot reach the gateway"):
        request_json(UrlDialer(f"ws://127.0.0.1:{port}", "secret"), "/v1/status")


def test_a_request_works_inside_an_event_loop() -> None:
    async def ask(dialer: UrlDialer) -> object:
        return request_json(dialer, "/v1/job")

    listener = socket.create_server(("127.0.0.1", 0))
    with answering(listener, http_response("200 OK", b"{}")):
        assert asyncio.run(ask(UrlDialer(url_of(listener), "token"))) == {}

"""Which way a port-forward takes, and how it fails to open."""

from __future__ import annotations

import http
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from meshgate.jobs.kubernetes.port_forward import ForwardFailed, open_forward, opening
from meshgate_kubernetes.api.client import PortForwardRequest
from tests.client.jobs.kubernetes.port_forward.spdy_server import Node, spdy_server
from tests.ports import closed_port

PORT = (8650).to_bytes(2, "little")
Handler = Callable[[ServerConnection], None]


def test_an_unreachable_server_raises_an_os_error() -> None:
    with closed_port() as port, pytest.raises(OSError, match="the port-forward failed"):
        open_forward(PortForwardRequest(f"ws://127.0.0.1:{port}/", 8650, {}, None, None, None)).result(10)


def test_a_request_through_a_proxy_is_for_a_websocket() -> None:
    requests = []

    def proxy(node: Node) -> None:
        requests.extend(node.request)

    with spdy_server(proxy) as request:
        address = request.url.removeprefix("ws://").partition("/")[0]
        through = PortForwardRequest("ws://api.example/", 8650, {}, None, None, f"http://{address}")
        with pytest.raises(ForwardFailed, match="the port-forward failed"):
            open_forward(through).result(10)
    assert requests[0] == "CONNECT api.example:80 HTTP/1.1"


def test_a_server_that_says_nothing_fails_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT", 0.2)

    def silent(node: Node) -> None:
        assert node.frame() is None

    with spdy_server(silent) as request, pytest.raises(ForwardFailed, match=r"failed: no answer within 0\.2 s"):
        open_forward(request).result(10)


@contextmanager
def api_server(handler: Handler, reject: int = 0) -> Iterator[PortForwardRequest]:
    """A stand-in for an API server that forwards to ``handler``."""

    def answer(connection: ServerConnection, request: Request) -> Response | None:
        assert request.headers["Authorization"] == "Bearer me"
        return Response(reject, http.HTTPStatus(reject).phrase, Headers(), b"no such pod") if reject else None

    def forward(connection: ServerConnection) -> None:
        for channel in (0, 1):
            connection.send(bytes([channel]) + PORT)
        try:
            handler(connection)
        except ConnectionClosed:
            return

    server: Server = serve(
        forward, "127.0.0.1", 0, subprotocols=["v4.channel.k8s.io"], process_request=answer, compression=None,
        max_size=None, close_timeout=1,
    )  # fmt: skip
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.socket.getsockname()[1]
    try:
        yield PortForwardRequest(
            f"ws://127.0.0.1:{port}/forward", 8650, {"Authorization": "Bearer me"}, None, None, None
        )
    finally:
        server.shutdown()
        thread.join()


def echo(connection: ServerConnection) -> None:
    for message in connection:
        assert isinstance(message, bytes)
        connection.send(b"\0" + message[1:])


def test_any_number_of_bytes_passes_in_both_directions_in_order() -> None:
    data = bytes(range(256)) * 40_000
    with api_server(echo) as tunnel, open_forward(tunnel).result(10) as sock:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        received = bytearray()
        while len(received) < len(data):
            received += sock.recv(1 << 20)
        sender.join()
    assert bytes(received) == data


def test_data_that_the_server_sends_first_arrives() -> None:
    def greet(connection: ServerConnection) -> None:
        connection.send(b"\0hello")
        connection.recv()

    with api_server(greet) as tunnel, open_forward(tunnel).result(10) as sock:
        assert sock.recv(100) == b"hello"


def test_closing_the_websocket_closes_the_socket() -> None:
    with api_server(lambda connection: None) as tunnel, open_forward(tunnel).result(10) as sock:
        assert sock.recv(100) == b""


def test_closing_the_socket_closes_the_websocket() -> None:
    ended = threading.Event()

    def wait(connection: ServerConnection) -> None:
        connection.send(b"\0hello")
        for _ in connection:
            continue
        ended.set()

    with api_server(wait) as tunnel:
        sock = open_forward(tunnel).result(10)
        assert sock.recv(100) == b"hello"
        sock.close()
        assert ended.wait(10)


def test_an_error_from_the_node_closes_the_socket() -> None:
    def fail(connection: ServerConnection) -> None:
        connection.send(b"\1connection rejectd")
        connection.recv()

    with api_server(fail) as tunnel, open_forward(tunnel).result(10) as sock:
        assert sock.recv(100) == b""


def test_a_rejection_has_the_status_and_the_reason() -> None:
    with api_server(echo, reject=404) as tunnel:
        error = open_forward(tunnel).exception(10)
    assert isinstance(error, ForwardFailed)
    assert error.status == 404
    assert str(error) == "the API server rejected the port-forward: no such pod"

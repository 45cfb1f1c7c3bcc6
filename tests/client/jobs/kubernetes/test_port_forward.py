"""Which way a port-forward takes, how it fails to open, and what passes: in a websocket, and in SPDY."""

from __future__ import annotations

import asyncio
import http
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from meshgate.jobs.kubernetes import port_forward
from meshgate.jobs.kubernetes.port_forward import ForwardFailed, LocalEnd, open_forward
from meshgate_kubernetes.api.client import PortForwardRequest
from tests.client.jobs.kubernetes.spdy_server import (
    DATA,
    ERROR,
    UPGRADED,
    Node,
    control,
    data,
    spdy_server,
)
from tests.ports import closed_port
from tests.programs import forked_child
from tests.waiting import DEADLINE

PORT = (8650).to_bytes(2, "little")
Handler = Callable[[ServerConnection], None]
FIN = 1


def test_an_unreachable_server_raises_an_os_error() -> None:
    with closed_port() as port, pytest.raises(OSError, match="the port-forward failed"):
        open_forward(PortForwardRequest(f"ws://127.0.0.1:{port}/", 8650, {}, None, None, None)).result(DEADLINE)


def test_a_request_through_a_proxy_is_for_a_websocket() -> None:
    requests = []

    def proxy(node: Node) -> None:
        requests.extend(node.request)

    with spdy_server(proxy) as request:
        address = request.url.removeprefix("ws://").partition("/")[0]
        through = PortForwardRequest("ws://api.example/", 8650, {}, None, None, f"http://{address}")
        with pytest.raises(ForwardFailed, match="the port-forward failed"):
            open_forward(through).result(DEADLINE)
    assert requests[0] == "CONNECT api.example:80 HTTP/1.1"


def test_a_server_that_says_nothing_fails_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "OPEN_TIMEOUT", 0.2)

    def silent(node: Node) -> None:
        assert node.frame() is None

    with spdy_server(silent) as request, pytest.raises(ForwardFailed, match=r"failed: no answer within 0\.2 s"):
        open_forward(request).result(DEADLINE)


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


def echoed(sock: socket.socket, data: bytes) -> bytes:
    """Sends ``data`` and meanwhile receives as much."""
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    received = bytearray()
    while len(received) < len(data):
        received += sock.recv(1 << 20)
    sender.join()
    return bytes(received)


def echo(connection: ServerConnection) -> None:
    for message in connection:
        assert isinstance(message, bytes)
        connection.send(b"\0" + message[1:])


def test_any_number_of_bytes_passes_in_both_directions_in_order_in_a_websocket() -> None:
    data = bytes(range(256)) * 40_000
    with api_server(echo) as tunnel, open_forward(tunnel).result(DEADLINE) as sock:
        assert echoed(sock, data) == data


def test_data_that_the_server_sends_first_arrives() -> None:
    def greet(connection: ServerConnection) -> None:
        connection.send(b"\0hello")
        connection.recv()

    with api_server(greet) as tunnel, open_forward(tunnel).result(DEADLINE) as sock:
        assert sock.recv(100) == b"hello"


def test_closing_the_websocket_closes_the_socket() -> None:
    with api_server(lambda connection: None) as tunnel, open_forward(tunnel).result(DEADLINE) as sock:
        assert sock.recv(100) == b""


def test_closing_the_socket_closes_the_websocket() -> None:
    ended = threading.Event()

    def wait(connection: ServerConnection) -> None:
        connection.send(b"\0hello")
        for _ in connection:
            continue
        ended.set()

    with api_server(wait) as tunnel:
        sock = open_forward(tunnel).result(DEADLINE)
        assert sock.recv(100) == b"hello"
        sock.close()
        assert ended.wait(DEADLINE)


def test_an_error_from_the_node_closes_the_socket_in_a_websocket() -> None:
    def fail(connection: ServerConnection) -> None:
        connection.send(b"\1connection rejectd")
        connection.recv()

    with api_server(fail) as tunnel, open_forward(tunnel).result(DEADLINE) as sock:
        assert sock.recv(100) == b""


def test_a_rejection_has_the_status_and_the_reason() -> None:
    with api_server(echo, reject=404) as tunnel:
        error = open_forward(tunnel).exception(10)
    assert isinstance(error, ForwardFailed)
    assert error.status == 404
    assert str(error) == "the API server rejected the port-forward: no such pod"


class Remote:
    def __init__(self) -> None:
        self.received = b""

    def forward(self, data: memoryview) -> None:
        self.received += data

    def pause_receiving(self) -> None: ...

    def resume_receiving(self) -> None: ...


def test_bytes_of_either_side_wait_for_the_start() -> None:
    asyncio.run(_pass_bytes())


async def _pass_bytes() -> None:
    user, forward = socket.socketpair()
    with user:
        user.sendall(b"from the user")
        local, remote = LocalEnd(), Remote()
        local.write(b"from the ")
        await asyncio.get_running_loop().create_connection(lambda: local, sock=forward)
        local.write(b"node")
        assert remote.received == b""
        local.start(remote)
        user.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(user, 100) == b"from the node"
    await asyncio.wait_for(local.ended, 10)  # the user has closed the other end
    assert remote.received == b"from the user"


def test_the_first_end_counts() -> None:
    async def end_twice() -> None:
        local = LocalEnd()
        local.end(ForwardFailed("first"))
        local.end(None)
        await local.ended

    with pytest.raises(ForwardFailed, match="first"):
        asyncio.run(end_twice())


def test_the_request_is_that_of_kubectl_with_the_users_credentials() -> None:
    requests = []

    def handler(node: Node) -> None:
        requests.append(node.request)
        node.accept()

    with spdy_server(handler) as request, open_forward(request).result(DEADLINE) as sock:
        assert sock.recv(1) == b""
    first, *headers = requests[0]
    assert first == "POST /forward HTTP/1.1"
    assert {"Connection: Upgrade", "Upgrade: SPDY/3.1", "X-Stream-Protocol-Version: portforward.k8s.io"} < set(headers)
    assert "Authorization: Bearer me" in headers


def test_any_number_of_bytes_passes_in_both_directions_in_order() -> None:
    sent = bytes(range(256)) * 40_000

    def echo(node: Node) -> None:
        node.accept()
        while frame := node.frame():
            stream, flags, body = frame
            assert (stream, flags) == (DATA, 0)
            node.connection.sendall(data(DATA, body))

    with spdy_server(echo) as request, open_forward(request).result(DEADLINE) as sock:
        assert echoed(sock, sent) == sent


def test_nothing_is_sent_before_the_node_has_taken_both_streams() -> None:
    taken = threading.Event()

    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED)
        for _ in range(2):
            node.frame()
        assert not taken.is_set()
        node.connection.sendall(b"".join(control(2, struct.pack(">I", stream)) for stream in (ERROR, DATA)))
        assert node.frame() == (DATA, 0, b"hello")

    with spdy_server(handler) as request, open_forward(request).result(DEADLINE) as sock:
        taken.set()
        sock.sendall(b"hello")
        assert sock.recv(1) == b""


def test_a_slow_node_stops_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "CLOSE_TIMEOUT", 60.0)
    read_on = threading.Event()
    received = 0

    def slow(node: Node) -> None:
        nonlocal received
        node.accept()
        assert read_on.wait(DEADLINE)
        while frame := node.frame():
            received += len(frame[2])

    with spdy_server(slow) as request, open_forward(request).result(DEADLINE) as sock:
        sock.settimeout(1)
        sent, block = 0, bytes(1 << 20)
        with suppress(TimeoutError):
            while sent < 1 << 30:
                sent += sock.send(block)
        assert sent < 1 << 25
        read_on.set()
    assert received == sent  # closing does not lose what the forward has taken


def test_what_the_node_sends_last_arrives_before_the_end() -> None:
    def handler(node: Node) -> None:
        node.accept()
        node.connection.sendall(data(DATA, b"good") + data(DATA, b"bye", FIN))
        assert node.frame() is None

    with spdy_server(handler) as request, open_forward(request).result(DEADLINE) as sock, sock.makefile("rb") as reader:
        assert reader.read() == b"goodbye"


def test_a_ping_is_answered() -> None:
    ping = struct.pack(">I", 2)

    def handler(node: Node) -> None:
        node.accept()
        node.connection.sendall(control(6, ping))
        assert node.frame() == (0x80030006, 0, ping)

    with spdy_server(handler) as request, open_forward(request).result(DEADLINE) as sock:
        assert sock.recv(1) == b""


def test_an_error_from_the_node_closes_the_socket(caplog: pytest.LogCaptureFixture) -> None:
    def handler(node: Node) -> None:
        node.accept()
        node.connection.sendall(data(ERROR, b"connection refused"))
        node.frame()

    caplog.set_level("DEBUG", "meshgate.jobs.kubernetes")
    with spdy_server(handler) as request, open_forward(request).result(DEADLINE) as sock:
        assert sock.recv(1) == b""
        for thread in threading.enumerate():
            if thread.name == "meshgate-port-forward":
                thread.join(DEADLINE)
    assert "the port-forward ended: connection refused" in caplog.text


def test_a_node_that_rejects_the_streams_fails_the_forward() -> None:
    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED + control(3, struct.pack(">II", DATA, 3)))
        while node.frame():
            continue

    with spdy_server(handler) as request, pytest.raises(ForwardFailed, match="stream 3 was reset, status 3"):
        open_forward(request).result(DEADLINE)


def test_a_server_that_answers_with_something_else_fails_the_forward() -> None:
    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED + b"220 mail.example ESMTP\r\n")
        while node.frame():
            continue

    with spdy_server(handler) as request, pytest.raises(ForwardFailed, match="invalid SPDY frame"):
        open_forward(request).result(DEADLINE)


def test_closing_the_socket_ends_the_connection() -> None:
    def handler(node: Node) -> None:
        node.accept()
        assert node.frame() is None

    with spdy_server(handler) as request:
        sock: socket.socket = open_forward(request).result(DEADLINE)
        sock.close()


def test_a_forked_child_does_not_keep_the_connection_open() -> None:
    ended = threading.Event()

    def handler(node: Node) -> None:
        node.accept()
        assert node.frame() is None
        ended.set()

    with spdy_server(handler) as request:
        sock: socket.socket = open_forward(request).result(DEADLINE)
        with forked_child():
            sock.shutdown(socket.SHUT_RDWR)  # closing it is not enough: the child has it, too
            assert ended.wait(DEADLINE)
        sock.close()

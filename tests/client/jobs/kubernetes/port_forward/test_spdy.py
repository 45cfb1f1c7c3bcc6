"""A port-forward in SPDY: bytes in both directions, backpressure, either end closing first, and failures."""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from contextlib import suppress

import pytest

from meshgate.jobs.kubernetes.port_forward import ForwardFailed, open_forward
from meshgate.jobs.kubernetes.port_forward.spdy import Answer, Data, Ended, Event, Failed, ForwardStreams, Opened
from tests.client.jobs.kubernetes.port_forward.spdy_server import (
    DATA,
    ERROR,
    UPGRADED,
    Node,
    control,
    data,
    reply,
    spdy_server,
)

FIN = 1


def test_the_request_is_that_of_kubectl_with_the_users_credentials() -> None:
    requests = []

    def handler(node: Node) -> None:
        requests.append(node.request)
        node.accept()

    with spdy_server(handler) as request, open_forward(request).result(10) as sock:
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

    with spdy_server(echo) as request, open_forward(request).result(10) as sock:
        sender = threading.Thread(target=sock.sendall, args=(sent,))
        sender.start()
        received = bytearray()
        while len(received) < len(sent):
            received += sock.recv(1 << 20)
        sender.join()
    assert bytes(received) == sent


def test_nothing_is_sent_before_the_node_has_taken_both_streams() -> None:
    taken = threading.Event()

    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED)
        for _ in range(2):
            node.frame()
        assert not taken.is_set()
        node.connection.sendall(b"".join(control(2, struct.pack(">I", stream)) for stream in (ERROR, DATA)))
        assert node.frame() == (DATA, 0, b"hello")

    with spdy_server(handler) as request, open_forward(request).result(10) as sock:
        taken.set()
        sock.sendall(b"hello")
        assert sock.recv(1) == b""


def test_a_slow_node_stops_the_user() -> None:
    read_on = threading.Event()
    received = 0

    def slow(node: Node) -> None:
        nonlocal received
        node.accept()
        assert read_on.wait(10)
        while frame := node.frame():
            received += len(frame[2])

    with spdy_server(slow) as request, open_forward(request).result(10) as sock:
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

    with spdy_server(handler) as request, open_forward(request).result(10) as sock, sock.makefile("rb") as reader:
        assert reader.read() == b"goodbye"


def test_a_ping_is_answered() -> None:
    ping = struct.pack(">I", 2)

    def handler(node: Node) -> None:
        node.accept()
        node.connection.sendall(control(6, ping))
        assert node.frame() == (0x80030006, 0, ping)

    with spdy_server(handler) as request, open_forward(request).result(10) as sock:
        assert sock.recv(1) == b""


def test_an_error_from_the_node_closes_the_socket(caplog: pytest.LogCaptureFixture) -> None:
    def handler(node: Node) -> None:
        node.accept()
        node.connection.sendall(data(ERROR, b"connection refused"))
        node.frame()

    caplog.set_level("DEBUG", "meshgate.jobs.kubernetes")
    with spdy_server(handler) as request, open_forward(request).result(10) as sock:
        assert sock.recv(1) == b""
        for thread in threading.enumerate():
            if thread.name == "meshgate-port-forward":
                thread.join(10)
    assert "the port-forward ended: connection refused" in caplog.text


def test_a_node_that_rejects_the_streams_fails_the_forward() -> None:
    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED + control(3, struct.pack(">II", DATA, 3)))
        while node.frame():
            continue

    with spdy_server(handler) as request, pytest.raises(ForwardFailed, match="stream 3 was reset, status 3"):
        open_forward(request).result(10)


def test_a_server_that_answers_with_something_else_fails_the_forward() -> None:
    def handler(node: Node) -> None:
        node.connection.sendall(UPGRADED + b"220 mail.example ESMTP\r\n")
        while node.frame():
            continue

    with spdy_server(handler) as request, pytest.raises(ForwardFailed, match="invalid SPDY frame"):
        open_forward(request).result(10)


def test_closing_the_socket_ends_the_connection() -> None:
    def handler(node: Node) -> None:
        node.accept()
        assert node.frame() is None

    with spdy_server(handler) as request:
        sock: socket.socket = open_forward(request).result(10)
        sock.close()


def events(streams: ForwardStreams, received: bytes, step: int) -> list[Event]:
    found: list[Event] = []
    for start in range(0, len(received), step):
        for event in streams.receive(memoryview(received)[start : start + step]):
            if isinstance(event, Data) and found and isinstance(found[-1], Data):
                found[-1] = Data(memoryview(bytes(found[-1].data) + bytes(event.data)))
            else:
                found.append(event)
    return found


def test_both_streams_are_opened_with_their_kind_and_port() -> None:
    sent = ForwardStreams().open(8650)
    decompressor = zlib.decompressobj()
    found = []
    while sent:
        version, kind, second = struct.unpack(">HHI", sent[:8])
        size, flags = second & 0xFFFFFF, second >> 24
        stream, block = struct.unpack(">I", sent[8:12])[0], decompressor.decompress(sent[18 : 8 + size])
        texts, position = [], 4
        while position < len(block):
            (length,) = struct.unpack_from(">I", block, position)
            texts.append(block[position + 4 : position + 4 + length].decode())
            position += 4 + length
        assert struct.unpack_from(">I", block)[0] == len(texts) // 2
        found.append((version, kind, stream, flags, dict(zip(texts[::2], texts[1::2], strict=True))))
        sent = sent[8 + size :]
    assert found == [
        (0x8003, 1, ERROR, FIN, {"streamtype": "error", "port": "8650", "requestid": "0"}),
        (0x8003, 1, DATA, 0, {"streamtype": "data", "port": "8650", "requestid": "0"}),
    ]


@pytest.mark.parametrize("step", [1, 7, 8, 9, 1 << 20])
def test_frames_arrive_whatever_the_pieces(step: int) -> None:
    ping = control(6, struct.pack(">I", 2))
    settings = control(4, struct.pack(">III", 1, 4, 100))
    received = b"".join(
        [settings, reply(ERROR), reply(DATA), data(DATA, b"hello "), data(DATA, b"you"), ping, data(DATA, b"", FIN)]
    )
    expected = [Opened(), Data(memoryview(b"hello you")), Answer(ping), Ended()]
    assert events(ForwardStreams(), received, step) == expected


def test_a_forward_is_not_open_before_both_streams_are() -> None:
    assert events(ForwardStreams(), reply(ERROR), 100) == []


def test_an_error_of_the_node_is_reported() -> None:
    received = data(ERROR, b"an error occurred: connection refused\n") + data(ERROR, b"", FIN)
    assert events(ForwardStreams(), received, 5) == [Failed("an error occurred: connection refused")]


def test_a_reset_stream_is_an_error_and_goaway_is_the_end() -> None:
    reset = control(3, struct.pack(">II", DATA, 3))
    goaway = control(7, struct.pack(">II", 0, 0))
    assert events(ForwardStreams(), reset + goaway, 100) == [Failed("stream 3 was reset, status 3"), Ended()]


@pytest.mark.parametrize(
    "received",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request", id="not-spdy"),
        pytest.param(control(4, b"x" * 70_000)[:8], id="control-frame-too-long"),
        pytest.param(data(ERROR, b"x" * 70_000)[:8], id="error-too-long"),
    ],
)
def test_what_is_not_spdy_is_rejected_before_memory_is_taken(received: bytes) -> None:
    with pytest.raises(ValueError, match="invalid SPDY frame"):
        list(ForwardStreams().receive(memoryview(received)))

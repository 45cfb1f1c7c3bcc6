"""The relay that other tests rely on."""

from __future__ import annotations

import gc
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.relay import Relay


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            while data := self.request.recv(65536):
                self.request.sendall(data)
        except OSError:
            return


@pytest.fixture
def echo_port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def connect(relay: Relay) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", relay.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def test_bytes_pass_both_ways(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay, connect(relay) as connection:
        data = bytes(range(256)) * 1000
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        assert read(connection, len(data)) == data
        assert relay.connections == relay.accepted == 1


def test_the_end_passes_too(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay, connect(relay) as connection:
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection, 100) == b"last"


def test_a_delay_is_latency_not_bandwidth(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port, delay=0.05) as relay, connect(relay) as connection:
        start = time.monotonic()
        for _ in range(10):
            connection.sendall(b"x")
        assert read(connection, 10) == b"x" * 10
        assert 0.1 <= time.monotonic() - start < 0.5


def test_a_cut_resets_and_new_connections_are_taken(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay:
        with connect(relay) as connection:
            connection.sendall(b"x")
            assert read(connection, 1) == b"x"
            relay.cut()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with connect(relay) as connection:
            connection.sendall(b"y")
            assert read(connection, 1) == b"y"


def test_a_cut_after_so_many_bytes_happens_once(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay:
        relay.cut_after(3)
        with connect(relay) as connection:
            connection.sendall(b"123456")
            with pytest.raises(ConnectionResetError):
                read(connection, 6)
        with connect(relay) as connection:
            connection.sendall(b"123456")
            assert read(connection, 6) == b"123456"


def test_a_frozen_relay_delivers_when_it_thaws(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay, connect(relay) as connection:
        connection.sendall(b"a")
        assert read(connection, 1) == b"a"
        relay.freeze()
        connection.sendall(b"b")
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        relay.thaw()
        assert read(connection, 1) == b"b"


def test_refused_connections_are_taken_again_later(echo_port: int) -> None:
    with Relay("127.0.0.1", echo_port) as relay:
        relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(relay)
        relay.accept()
        with connect(relay) as connection:
            connection.sendall(b"x")
            assert read(connection, 1) == b"x"


def test_a_relay_that_ends_as_connections_come_leaves_none_open(echo_port: int) -> None:
    for _ in range(5):
        with Relay("127.0.0.1", echo_port) as relay:
            connection = socket.create_connection(("127.0.0.1", relay.port))
        connection.close()
        del relay
        gc.collect()  # what was left open tells of itself, and warnings are errors

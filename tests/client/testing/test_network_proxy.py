"""NetworkProxy forwards, delays, cuts, freezes and refuses connections."""

from __future__ import annotations

import gc
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshgate.testing import NetworkProxy
from tests.waiting import wait_for


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


def connect(proxy: NetworkProxy) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
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


def test_bytes_are_forwarded_in_both_directions(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy, connect(proxy) as connection:
        data = bytes(range(256)) * 1000
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        assert read(connection, len(data)) == data
        assert proxy.connections == proxy.accepted == 1


def test_end_of_file_is_forwarded(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy, connect(proxy) as connection:
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection, 100) == b"last"


def test_a_delay_is_latency_not_bandwidth(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port, delay=0.5) as proxy, connect(proxy) as connection:
        start = time.monotonic()
        for _ in range(50):
            connection.sendall(b"x")
        assert read(connection, 50) == b"x" * 50
        assert 1.0 <= time.monotonic() - start < 25  # the sum of the delays


def test_all_connections_share_the_rate(echo_port: int) -> None:
    with (
        NetworkProxy("127.0.0.1", echo_port, rate=400_000) as proxy,
        connect(proxy) as one,
        connect(proxy) as other,
    ):
        start = time.monotonic()
        for connection in (one, other):
            threading.Thread(target=connection.sendall, args=(bytes(range(250)) * 800,), daemon=True).start()
        assert read(one, 200_000) == read(other, 200_000) == bytes(range(250)) * 800
        assert 1.0 <= time.monotonic() - start < 25  # 400,000 bytes; each direction has a rate of its own
        start = time.monotonic()
        one.sendall(b"x")
        assert read(one, 1) == b"x"
        assert time.monotonic() - start < 25  # nothing is left to wait for


def test_a_cut_resets_connections_and_new_ones_are_accepted(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy:
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert read(connection, 1) == b"x"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with connect(proxy) as connection:
            connection.sendall(b"y")
            assert read(connection, 1) == b"y"


def test_cut_after_cuts_once(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy:
        proxy.cut_after(3)
        with connect(proxy) as connection:
            connection.sendall(b"123456")
            with pytest.raises(ConnectionResetError):
                read(connection, 6)
        with connect(proxy) as connection:
            connection.sendall(b"123456")
            assert read(connection, 6) == b"123456"


def test_a_frozen_proxy_delivers_after_thaw(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy, connect(proxy) as connection:
        connection.sendall(b"a")
        assert read(connection, 1) == b"a"
        proxy.freeze()
        connection.sendall(b"b")
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        proxy.thaw()
        assert read(connection, 1) == b"b"


def test_a_cut_that_is_due_when_the_proxy_thaws_cuts_every_connection(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy, connect(proxy) as first, connect(proxy) as second:
        for connection in (first, second):
            connection.sendall(b"a")
            assert read(connection, 1) == b"a"
        proxy.freeze()
        proxy.cut_after(1)
        for connection in (first, second):
            connection.sendall(b"b")
        wait_for(lambda: sum(pair.up.in_flight for pair in proxy._pairs) == 2, "the proxy to read both")
        proxy.thaw()
        for connection in (first, second):
            with pytest.raises(ConnectionResetError):
                read(connection, 1)


def test_a_connection_that_is_reset_as_the_proxy_thaws_is_cut() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    proxied = NetworkProxy("127.0.0.1", server.getsockname()[1])
    with server, proxied as proxy, connect(proxy) as connection:
        target, _ = server.accept()
        wait_for(lambda: proxy.connections, "the proxy to be connected")
        proxy.freeze()
        connection.shutdown(socket.SHUT_WR)
        (pair,) = proxy._pairs
        wait_for(lambda: pair.up.chunks, "the proxy to read the end of file")

        def reset_and_thaw() -> None:  # with no turn of the event loop between them
            target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            target.close()
            proxy._set_frozen(False)

        proxy._call(reset_and_thaw)
        with pytest.raises(ConnectionResetError):
            read(connection, 1)


def test_no_other_program_gets_the_port_of_a_proxy_that_refuses_connections() -> None:
    with NetworkProxy("127.0.0.1", 1) as proxy:
        proxy.refuse()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", proxy.port))


def test_connections_are_accepted_again_after_refuse(echo_port: int) -> None:
    with NetworkProxy("127.0.0.1", echo_port) as proxy:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.accept()
        with connect(proxy) as connection:
            connection.sendall(b"x")
            assert read(connection, 1) == b"x"


def test_closing_while_connections_arrive_leaves_none_open(echo_port: int) -> None:
    for _ in range(5):
        with NetworkProxy("127.0.0.1", echo_port) as proxy:
            connection = socket.create_connection(("127.0.0.1", proxy.port))
        connection.close()
        del proxy
        gc.collect()  # an open socket raises a ResourceWarning, which is an error here


def test_the_command_forwards_and_prints_its_port(echo_port: int) -> None:
    command = [sys.executable, "-m", "meshgate.testing", f"127.0.0.1:{echo_port}", "--delay", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"x")
                assert read(connection, 1) == b"x"
        finally:
            process.terminate()

"""Forwarded ports, with a hub of this process in place of a host's. Real ones are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from meshgate.errors import GatewayLostError, JobError
from meshgate.ranks.forward import ForwardedPort, forward
from meshgate.ranks.host_streams import HostStreams
from meshgate.ranks.streams import Event, Hub
from meshgate.session.futures import FutureProxy
from tests.ports import closed_port
from tests.waiting import wait_for


class Endpoint:
    """Calls a function as an actor on the host would."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.broadcast = function
        self.call_one = lambda *arguments: FutureProxy.resolved(function(*arguments))


class Host:
    """A reader and a writer of one hub."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.lost: Exception | None = None
        self.reads = 0
        self.requests: queue.SimpleQueue[FutureProxy[Any] | None] = queue.SimpleQueue()
        self.read = self
        for name in ("connect", "write", "ack", "close_stream"):
            setattr(self, name, Endpoint(getattr(self.hub, name)))
        self.listen = Endpoint(self._listen)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _listen(self, stream: int, port: int) -> int | str:
        return self.hub.listen(stream, port) if port == 0 else "Address already in use"

    def call_one(self) -> FutureProxy[Any]:
        future: FutureProxy[Any] = FutureProxy()
        self.requests.put(future)
        return future

    def _serve(self) -> None:
        while (future := self.requests.get()) is not None:
            events = [tuple(event) for event in self.hub.poll()]
            if self.lost is not None:
                future.fail(self.lost)
            else:
                future.settle(lambda number=self.reads, events=events: (number, events))
                self.reads += 1

    def stop(self, *, lost: bool = True) -> None:
        """Ends the hub, which fails the reads in flight, or with ``lost=False`` lets them return a last time."""
        if lost and self.lost is None:
            self.lost = GatewayLostError("stopped")
        self.hub.close()
        self.requests.put(None)
        self.thread.join()


@contextlib.contextmanager
def forwarding(target: int, *, reverse: bool = False) -> Iterator[tuple[ForwardedPort, Host]]:
    host, stack = Host(), contextlib.ExitStack()
    stack.callback(host.stop)
    forwarded = ForwardedPort(HostStreams(3, host, host, queue.SimpleQueue()), target, stack, reverse=reverse)
    forwarded.open(0)
    with forwarded:
        yield forwarded, host


def test_closing_does_not_wait_for_reads_that_a_cut_connection_holds_up() -> None:
    host = Host()
    forwarded = ForwardedPort(HostStreams(3, host, host, queue.SimpleQueue()), 1, contextlib.ExitStack(), reverse=False)
    forwarded.open(0)
    closing = threading.Thread(target=forwarded.close, daemon=True)
    closing.start()
    closing.join(30)
    closed = not closing.is_alive()
    host.stop()
    assert closed


@pytest.mark.parametrize("reverse", [False, True])
def test_bytes_pass_in_both_directions_and_each_ends_by_itself(reverse: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        forwarding(server.getsockname()[1], reverse=reverse) as (port, _),
    ):
        with socket.create_connection(("127.0.0.1", port.port), timeout=30) as there:
            here, _ = server.accept()
            with here:
                here.settimeout(30)
                there.sendall(b"question")
                there.shutdown(socket.SHUT_WR)
                assert here.recv(100) == b"question"
                assert here.recv(100) == b""
                here.sendall(b"answer")
                here.close()
                assert there.recv(100) == b"answer"
                assert there.recv(100) == b""
        where = "rank 3" if reverse else "this machine"
        assert repr(port).startswith(f"<ForwardedPort 127.0.0.1:{port.port} of {where}")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_server_notices_that_its_client_has_left(reverse: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        forwarding(server.getsockname()[1], reverse=reverse) as (port, host),
    ):
        with socket.create_connection(("127.0.0.1", port.port), timeout=30) as there:
            here, _ = server.accept()
            there.sendall(b"GET /events")
            assert here.recv(100) == b"GET /events"
            here.sendall(b"first")
            assert there.recv(1) == b"f"
        here.settimeout(30)
        with here, pytest.raises((ConnectionResetError, BrokenPipeError)):
            here.sendall(bytes(64 << 20))
        wait_for(lambda: host.hub._streams.keys() | port._hub._streams.keys() <= {0}, "both sides to forget it")


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_closed_or_refused_port_leaves_no_file_open() -> None:
    with forwarding(1):
        pass
    before = open_files()
    for _ in range(5):
        with forwarding(1):
            pass
    test_a_port_in_use_is_refused()
    assert open_files() == before


@pytest.mark.parametrize(("reverse", "where"), [(False, "rank 3"), (True, "this machine")])
def test_connections_end_if_nothing_answers_on_the_other_side_and_one_line_says_so(
    capsys: pytest.CaptureFixture[str], reverse: bool, where: str
) -> None:
    with closed_port() as target, forwarding(target, reverse=reverse) as (port, _):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port.port), timeout=30) as there:
                assert there.recv(1) == b""
        assert port.error is None
    reason = f"nothing answers at port {target}: Connection refused"
    assert capsys.readouterr().err == f"meshgate: forward to {where}: {reason}\n"


def test_the_end_of_the_processes_while_it_closes_is_no_error() -> None:
    with forwarding(1) as (port, host):
        host.lost = RuntimeError("`ProcMesh` has already been stopped")  # which pytest reports if a thread raises it
    assert port.error is None


def test_what_is_passed_on_while_it_closes_is_no_error() -> None:
    with forwarding(1) as (port, host):
        passed_on = threading.Event()

        def stop(stream: int) -> None:
            port._closed = True
            passed_on.set()
            raise GatewayLostError("the processes are stopped")  # which pytest reports if a thread raises it

        host.close_stream.broadcast = stop  # type: ignore[attr-defined]
        host.hub.post(Event(5, "closed"))
        assert passed_on.wait(30)
    assert port.error is None


def test_a_host_that_is_lost_before_a_write_is_an_error_of_the_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        forwarding(listening.getsockname()[1]) as (port, host),
    ):

        def write(stream: int, data: bytes) -> None:
            host.lost = GatewayLostError("the gateway is gone")
            raise host.lost

        host.write.broadcast = write  # type: ignore[attr-defined]
        with socket.create_connection(("127.0.0.1", port.port), timeout=30) as there:
            there.sendall(b"question")
            port._threads[0].join(30)
            assert not port._threads[0].is_alive()
            host.hub.close()  # which fails the reads
            with pytest.raises(GatewayLostError, match="the gateway is gone"):
                port.wait()


def test_a_lost_host_is_an_error_of_the_port() -> None:
    with forwarding(1) as (port, host):
        host.lost = GatewayLostError("the gateway is gone")
        host.hub.close()
        with pytest.raises(GatewayLostError, match="the gateway is gone"):
            port.wait()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.port))


def test_a_port_in_use_is_refused() -> None:
    host = Host()
    streams = HostStreams(3, host, host, queue.SimpleQueue())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for reverse, where in ((False, "this machine"), (True, "rank 3")):
            forwarded = ForwardedPort(streams, 1, contextlib.ExitStack(), reverse=reverse)
            with pytest.raises(JobError, match=f"cannot listen on port {port} of {where}: Address already in use"):
                forwarded.open(port)
    host.stop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"port": 70_000, "rank": 0}, r"forward\(port=70000\)"),
        ({"port": "x", "rank": 0}, r"forward\(port='x'\)"),
        ({"port": 80, "rank": 0, "local_port": -1}, r"forward\(local_port=-1\)"),
        ({"port": 80, "rank": 2}, "the mesh has ranks 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        forward([None, None], **{"local_port": None, "reverse": False, **arguments})  # type: ignore[arg-type]


def test_port_0_of_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match=r"forward\(port=0\): expected the port of a server on the host"):
        forward(cast("Any", [None]), 0, 0, local_port=None, reverse=False)

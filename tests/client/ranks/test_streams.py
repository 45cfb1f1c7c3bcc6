"""Two hubs in this process, and what moves between their descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from meshgate.ranks import streams
from meshgate.ranks.streams import CHUNK, MAX_BATCH, WINDOW, Event, Hub, may_connect
from tests.ports import closed_port

NOBODY = 65534
needs_local_peer = pytest.mark.skipif(not os.path.exists(streams.TABLES[0]), reason="the system does not tell")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has connections of several users")


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def peer(hub: Hub) -> Iterator[socket.socket]:
    """The other end of stream 5."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub.connect(5, listener.getsockname()[1])
        theirs, _ = listener.accept()
    theirs.settimeout(30)
    with theirs:
        yield theirs


def read_all(hub: Hub, stream: int, *, ack: bool = True) -> bytes:
    data = b""
    while True:
        for event in hub.poll():
            assert event.stream == stream
            if event.kind == "end":
                return data
            data += event.data
            if ack:
                hub.ack(stream, len(event.data))


def test_what_arrives_is_an_event_and_what_is_queued_is_written(hub: Hub, peer: socket.socket) -> None:
    peer.sendall(b"hello")
    assert hub.poll() == [Event(5, "data", b"hello")]
    hub.write(5, b"answer")
    assert hub.poll() == [Event(5, "wrote", number=6)]
    assert peer.recv(100) == b"answer"


def test_all_that_has_arrived_is_read_at_once(hub: Hub) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, WINDOW)
    count = os.write(writing, bytes(WINDOW))
    hub.add(5, reading=reading)
    assert sum(len(event.data) for event in hub.poll()) == min(count, MAX_BATCH)
    os.close(writing)


def test_streams_that_always_have_more_do_not_hold_up_the_others(hub: Hub) -> None:
    for number in (1, 2, 3):
        hub.add(number, reading=os.open("/dev/zero", os.O_RDONLY))
    reading, theirs = os.pipe()
    their_end, writing = os.pipe()
    os.write(theirs, b"hello")
    hub.add(5, reading=reading, writing=writing)
    hub.write(5, b"answer")
    events = hub.poll() + hub.poll()
    assert Event(5, "data", b"hello") in events
    assert Event(5, "wrote", number=6) in events
    chunks = [event.stream for event in events if len(event.data) == CHUNK]
    assert chunks == [1, 2, 3, 1]
    for end in (theirs, their_end):
        os.close(end)


def test_each_direction_ends_by_itself(hub: Hub, peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)
    assert hub.poll() == [Event(5, "end")]
    hub.write(5, b"late")
    hub.write(5, b"")
    assert hub.poll() == [Event(5, "wrote", number=4)]
    assert peer.recv(100) == b"late"
    hub.post(Event(0, "exit"))
    hub.poll()
    assert peer.recv(100) == b""
    hub.write(5, b"dropped")  # the stream is over


def test_no_more_than_the_window_is_read_until_the_peer_has_written_it(hub: Hub, peer: socket.socket) -> None:
    sender = threading.Thread(target=lambda: (peer.sendall(bytes(3 * WINDOW)), peer.shutdown(socket.SHUT_WR)))
    sender.start()
    size = 0
    while size < WINDOW:
        size += sum(len(event.data) for event in hub.poll())
    assert size == WINDOW
    hub.post(Event(9, "exit"))
    assert hub.poll() == [Event(9, "exit")]  # and no data
    hub.ack(5, WINDOW)
    assert len(read_all(hub, 5)) == 2 * WINDOW
    sender.join()


def test_large_data_is_written_in_pieces_as_the_peer_reads_it(hub: Hub, peer: socket.socket) -> None:
    data = os.urandom(2 * WINDOW)
    hub.write(5, data)
    hub.write(5, b"")
    received = bytearray()

    def receive() -> None:
        while more := peer.recv(CHUNK):
            received.extend(more)

    receiver = threading.Thread(target=receive)
    receiver.start()
    written = 0
    while written < len(data):
        written += sum(event.number for event in hub.poll())
    hub.post(Event(9, "exit"))
    hub.poll()
    receiver.join()
    assert bytes(received) == data


def test_a_program_that_no_longer_reads_its_input_is_an_event(hub: Hub) -> None:
    reading, writing = os.pipe()
    hub.add(5, writing=writing)
    os.close(reading)
    hub.write(5, b"dropped")
    assert hub.poll() == [Event(5, "wrote", number=7), Event(5, "closed")]


def test_a_peer_that_is_gone_returns_the_credit_of_what_it_did_not_read(hub: Hub, peer: socket.socket) -> None:
    peer.close()
    hub.write(5, b"x")
    events: list[Event] = []
    while sum(event.number for event in events) < 1 or Event(5, "end") not in events:
        events += hub.poll()


def test_a_listener_accepts_streams_and_another_hub_connects_to_it(hub: Hub) -> None:
    port = hub.listen(2, 0)
    other = Hub()
    other.connect(7, port)
    assert hub.poll() == [Event(1, "accepted")]
    other.write(7, b"hello")
    assert other.poll() == [Event(7, "wrote", number=5)]
    assert hub.poll() == [Event(1, "data", b"hello")]
    other.close()
    assert hub.poll() == [Event(1, "end")]


def test_what_is_written_while_a_connection_is_made_waits_for_it(hub: Hub) -> None:
    port = hub.listen(2, 0)
    other = Hub()
    other.connect(7, port)
    other.write(7, b"early")  # perhaps before the connection is there
    other.write(7, b"")
    assert hub.poll() == [Event(1, "accepted")]
    assert other.poll() == [Event(7, "wrote", number=5)]
    assert hub.poll() == [Event(1, "data", b"early")]
    other.close()


def test_a_connection_that_nothing_answers_fails(hub: Hub) -> None:
    with closed_port() as port:
        hub.connect(4, port)
        (event,) = hub.poll()
    assert (event.stream, event.kind) == (4, "failed")
    assert b"nothing answers at port" in event.data


def test_a_server_that_listens_on_ipv6_only_is_reached(hub: Hub) -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no ::1")
    with listener:
        hub.connect(4, listener.getsockname()[1])
        hub.write(4, b"hello")
        assert hub.poll() == [Event(4, "wrote", number=5)]


def test_what_a_process_wrote_last_precedes_its_exit(hub: Hub) -> None:
    reading, writing = os.pipe()
    hub.add(1, reading=reading)
    os.write(writing, b"last words")
    hub.exited(-1, 3, (1,))
    assert hub.poll() == [Event(1, "data", b"last words"), Event(1, "end"), Event(-1, "exit", number=3)]
    os.close(writing)  # still open here, as by a process that it left behind


def test_closing_ends_the_poll(hub: Hub, peer: socket.socket) -> None:
    found: list[list[Event]] = []
    waiting = threading.Thread(target=lambda: found.append(hub.poll()))
    waiting.start()
    hub.close()
    waiting.join()
    assert found == [[]]
    assert peer.recv(1) == b""


def test_a_closed_stream_is_forgotten(hub: Hub, peer: socket.socket) -> None:
    hub.close_stream(5)
    hub.close_stream(5)
    assert peer.recv(1) == b""
    hub.ack(5, 1)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def connect_as_nobody(port: int) -> socket.socket:
    """A socket belongs to the user that this thread has for files when it makes it."""
    libc = ctypes.CDLL(None)
    libc.setfsuid(NOBODY)
    try:
        connecting = socket.socket()
    finally:
        libc.setfsuid(0)
    connecting.connect(("127.0.0.1", port))
    return connecting


@needs_local_peer
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_processes_of_this_user_may_connect(listener: socket.socket, family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.socket(family) as connecting:
        connecting.connect((host, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            assert may_connect(accepted)


@needs_local_peer
@as_root
def test_processes_of_another_user_may_not(listener: socket.socket) -> None:
    with connect_as_nobody(listener.getsockname()[1]):
        accepted, _ = listener.accept()
        with accepted:
            assert not may_connect(accepted)


@needs_local_peer
@as_root
def test_a_connection_that_was_closed_before_it_was_accepted_may_not(listener: socket.socket) -> None:
    """The system may still tell whose it was, except for one of root's."""
    with socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
    with accepted:
        assert not may_connect(accepted)


@needs_local_peer
@as_root
def test_a_forwarded_port_is_closed_to_other_users() -> None:
    hub = Hub()
    port = hub.listen(0, 0)
    with connect_as_nobody(port) as theirs, socket.create_connection(("127.0.0.1", port)) as own:
        assert hub.poll() == [Event(1, "accepted")]
        own.sendall(b"mine")
        assert hub.poll() == [Event(1, "data", b"mine")]
        assert theirs.recv(1) == b""
    hub.close()

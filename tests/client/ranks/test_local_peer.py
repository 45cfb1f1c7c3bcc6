"""Connections over loopback. As root, the tests make some as another user."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

import pytest

from meshgate.ranks import local_peer
from meshgate.ranks.local_peer import may_connect
from meshgate.ranks.streams import Event, Hub

NOBODY = 65534
pytestmark = pytest.mark.skipif(not os.path.exists(local_peer.TABLES[0]), reason="the system does not tell")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")


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


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_processes_of_this_user_may_connect(listener: socket.socket, family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    with socket.socket(family) as connecting:
        connecting.connect((host, listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            assert may_connect(accepted)


@as_root
def test_processes_of_another_user_may_not(listener: socket.socket) -> None:
    with connect_as_nobody(listener.getsockname()[1]):
        accepted, _ = listener.accept()
        with accepted:
            assert not may_connect(accepted)


def test_a_connection_that_was_closed_before_it_was_accepted_may_not(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
    with accepted:
        assert not may_connect(accepted)


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

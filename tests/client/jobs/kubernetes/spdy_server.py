"""A stand-in for an API server that forwards in SPDY."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshgate_kubernetes.api.client import PortForwardRequest

ERROR, DATA = 1, 3
UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n"


def control(kind: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">HHI", 0x8003, kind, flags << 24 | len(body)) + body


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">II", stream, flags << 24 | len(payload)) + payload


def reply(stream: int) -> bytes:
    return control(2, struct.pack(">I", stream) + b"compressed headers")


class Node:
    """The server's side of a forward."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = connection.makefile("rb")
        self.request: list[str] = []
        while line := self._reader.readline().strip():
            self.request.append(line.decode())

    def frame(self) -> tuple[int, int, bytes] | None:
        """The next frame: its first word, its flags and its body; None after the end of the connection."""
        head = self._reader.read(8)
        if len(head) < 8:
            return None
        first, second = struct.unpack(">II", head)
        return first, second >> 24, self._reader.read(second & 0xFFFFFF)

    def accept(self) -> None:
        """Upgrades the connection, and takes both streams."""
        self.connection.sendall(UPGRADED)
        assert [self.frame() is not None for _ in range(2)] == [True, True]
        self.connection.sendall(reply(ERROR) + reply(DATA))

    def close(self) -> None:
        self._reader.close()
        self.connection.close()


@contextmanager
def spdy_server(handler: Callable[[Node], None]) -> Iterator[PortForwardRequest]:
    """``handler`` serves the first connection; the server closes after it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            node = Node(server.accept()[0])
            try:
                handler(node)
            finally:
                node.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"ws://127.0.0.1:{server.getsockname()[1]}/forward?ports=8650"
            yield PortForwardRequest(url, 8650, {"Authorization": "Bearer me"}, None, None, None)
        finally:
            thread.join(10)
            assert not thread.is_alive()

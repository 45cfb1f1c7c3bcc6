"""The messages between a server and its supervisor: JSON over a unix stream socket, with file descriptors attached.

The server sends requests; the supervisor answers only ``start``. Both ends block: messages are small, and the
supervisor does nothing that takes time.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

Note: TypeAlias = "dict[str, Any]"
"""What a server wants its successor to know: JSON."""

MAX_DESCRIPTORS = 64
_HEAD = struct.Struct("!I")


def send_message(connection: socket.socket, message: Note, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError if the peer is gone."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_HEAD.pack(len(data))], descriptors)
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[Note, list[int]] | None:
    """The next message and its descriptors, which the caller must close. None once the peer is gone, even if it died
    in the middle of a message."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, MAX_DESCRIPTORS)
        rest = _receive(connection, _HEAD.size - len(head)) if head else None
        data = None if rest is None else _receive(connection, _HEAD.unpack(head + rest)[0])
    except ConnectionError:
        return None
    if data is None:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return json.loads(data), list(descriptors)


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def command_with_descriptors(command: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """``command`` with the number of a descriptor for each argument ``fd:0``, ``fd:1`` and so on."""
    numbers = {f"fd:{index}": str(descriptor) for index, descriptor in enumerate(descriptors)}
    return [numbers.get(argument, argument) for argument in command]

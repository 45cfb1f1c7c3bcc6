from __future__ import annotations

import os
import socket

from meshgate_gateway.supervisor.protocol import command_with_descriptors, receive_message, send_message


def test_a_message_arrives_with_its_descriptors() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send_message(ours, {"type": "keep", "note": {"text": "x" * 100_000}}, [write])
        received = receive_message(theirs)
        assert received is not None
        message, (descriptor,) = received
        assert message == {"type": "keep", "note": {"text": "x" * 100_000}}
        os.write(descriptor, b"through the copy")
        assert os.read(read, 100) == b"through the copy"
    for each in (read, write, descriptor):
        os.close(each)


def test_a_peer_that_ends_between_or_within_messages_is_gone() -> None:
    for sent in (b"", b"\0\0", b"\0\0\0\x09{}"):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(sent)
            assert receive_message(theirs) is None


def test_descriptors_replace_their_places_in_a_command() -> None:
    command = ["engine", "--control-fd", "fd:0", "--other", "fd:1", "fd:2"]
    assert command_with_descriptors(command, [7, 9]) == ["engine", "--control-fd", "7", "--other", "9", "fd:2"]

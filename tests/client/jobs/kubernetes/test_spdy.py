"""Frames of SPDY, as bytes in and events out."""

from __future__ import annotations

import struct
import zlib

import pytest

from meshgate.jobs.kubernetes.spdy import Answer, Data, Event, Failed, ForwardStreams, Opened, PodClosed
from tests.client.jobs.kubernetes.spdy_server import (
    DATA,
    ERROR,
    control,
    data,
    reply,
)

FIN = 1


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
    expected = [Opened(), Data(memoryview(b"hello you")), Answer(ping), PodClosed()]
    assert events(ForwardStreams(), received, step) == expected


def test_a_forward_is_not_open_before_both_streams_are() -> None:
    assert events(ForwardStreams(), reply(ERROR), 100) == []


def test_an_error_of_the_node_is_reported() -> None:
    received = data(ERROR, b"an error occurred: connection refused\n") + data(ERROR, b"", FIN)
    assert events(ForwardStreams(), received, 5) == [Failed("an error occurred: connection refused")]


def test_a_reset_stream_is_an_error_and_goaway_is_the_end() -> None:
    reset = control(3, struct.pack(">II", DATA, 3))
    goaway = control(7, struct.pack(">II", 0, 0))
    assert events(ForwardStreams(), reset + goaway, 100) == [Failed("stream 3 was reset, status 3"), PodClosed()]


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

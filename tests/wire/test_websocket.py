"""The fast path for data frames agrees with the websocket library."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri
from websockets.utils import apply_mask

from meshgate_wire.websocket import FrameReader, ParsedFrame, binary_header

MAX_SIZE = 200_000
SIZES = st.sampled_from([0, 1, 125, 126, 127, 1000, 65_535, 65_536, 100_000])
MASK = b"\x01\x80\xff\x00"


def connected() -> tuple[ClientProtocol, ServerProtocol]:
    client, server = ClientProtocol(parse_uri("ws://gateway/"), max_size=MAX_SIZE), ServerProtocol(max_size=MAX_SIZE)
    client.send_request(client.connect())
    server.receive_data(b"".join(client.data_to_send()))
    (request,) = server.events_received()
    server.send_response(server.accept(request))
    client.receive_data(b"".join(server.data_to_send()))
    client.events_received()
    return client, server


def split(data: bytes, positions: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(position % (len(data) + 1) for position in positions)})
    return [data[a:b] for a, b in pairwise(bounds)]


def sent(protocol: ClientProtocol | ServerProtocol) -> bytes:
    return b"".join(protocol.data_to_send())


@given(
    sizes=st.lists(SIZES, max_size=4), positions=st.lists(st.integers(0, 1 << 20), max_size=12), masked=st.booleans()
)
def test_messages_of_the_library_are_read_from_any_split(sizes: list[int], positions: list[int], masked: bool) -> None:
    client, server = connected()
    sender = client if masked else server
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    for message in messages:
        sender.send_binary(message)
        sender.send_ping(b"between")
    reader = FrameReader(MAX_SIZE, apply_mask if masked else None)
    found = [frame for piece in split(sent(sender), positions) for frame in reader.feed(piece)]
    assert [frame.data for frame in found if not frame.passthrough] == messages
    receiver = server if masked else client
    for parsed in found:
        if parsed.passthrough:
            receiver.receive_data(parsed.data)
    opcodes = [frame.opcode for frame in receiver.events_received() if isinstance(frame, Frame)]
    assert opcodes == [Opcode.PING] * len(sizes)


@given(size=SIZES, masked=st.booleans())
def test_the_library_reads_what_is_written(size: int, masked: bool) -> None:
    client, server = connected()
    receiver = server if masked else client
    payload = bytes(size)
    mask = MASK if masked else b""
    receiver.receive_data(binary_header(size, mask) + (apply_mask(payload, mask) if masked else payload))
    (frame,) = receiver.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, frame.data) == (Opcode.BINARY, True, payload)


def test_fragments_and_texts_are_passed_to_the_library() -> None:
    client, _ = connected()
    client.send_text(b"text")
    client.send_binary(b"one", fin=False)
    client.send_continuation(b"two", fin=True)
    client.send_binary(b"whole")
    found = FrameReader(MAX_SIZE, apply_mask).feed(sent(client))
    assert [frame.passthrough for frame in found] == [True, True, True, False]
    assert found[-1] == ParsedFrame(b"whole")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (binary_header(MAX_SIZE + 1, MASK), CloseCode.MESSAGE_TOO_BIG),
        (binary_header(5) + b"plain", CloseCode.PROTOCOL_ERROR),
        (b"\xf2\x80" + MASK, CloseCode.PROTOCOL_ERROR),
        (b"\x83\x80" + MASK, CloseCode.PROTOCOL_ERROR),
    ],
    ids=["too large", "not masked", "reserved bits", "unknown kind"],
)
def test_invalid_frames_are_passed_to_the_library_which_closes_the_connection(data: bytes, code: CloseCode) -> None:
    _, server = connected()
    reader = FrameReader(MAX_SIZE, apply_mask)
    for piece in (data, b"\x00" * 10):
        for parsed in reader.feed(piece):
            assert parsed.passthrough
            server.receive_data(parsed.data)
    assert server.state is State.CLOSING
    assert server.close_sent is not None
    assert server.close_sent.code == code


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_are_accepted(data: bytes, positions: list[int]) -> None:
    reader = FrameReader(64, apply_mask)
    passed = sum(len(frame.data) for piece in split(data, positions) for frame in reader.feed(piece))
    assert passed <= len(data)

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

from meshgate_wire.websocket import Cut, FrameReader, binary_header

MOST = 200_000
SIZES = st.sampled_from([0, 1, 125, 126, 127, 1000, 65_535, 65_536, 100_000])
MASK = b"\x01\x80\xff\x00"


def connected() -> tuple[ClientProtocol, ServerProtocol]:
    client, server = ClientProtocol(parse_uri("ws://gateway/"), max_size=MOST), ServerProtocol(max_size=MOST)
    client.send_request(client.connect())
    server.receive_data(b"".join(client.data_to_send()))
    (request,) = server.events_received()
    server.send_response(server.accept(request))
    client.receive_data(b"".join(server.data_to_send()))
    client.events_received()
    return client, server


def cut_up(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


def sent(protocol: ClientProtocol | ServerProtocol) -> bytes:
    return b"".join(protocol.data_to_send())


@given(sizes=st.lists(SIZES, max_size=4), places=st.lists(st.integers(0, 1 << 20), max_size=12), masked=st.booleans())
def test_messages_of_the_library_come_out_however_they_are_cut(
    sizes: list[int], places: list[int], masked: bool
) -> None:
    client, server = connected()
    sender = client if masked else server
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    for message in messages:
        sender.send_binary(message)
        sender.send_ping(b"between")
    reader = FrameReader(MOST, apply_mask if masked else None)
    found = [cut for piece in cut_up(sent(sender), places) for cut in reader.feed(piece)]
    assert [cut.data for cut in found if not cut.other] == messages
    receiver = server if masked else client
    for cut in found:
        if cut.other:
            receiver.receive_data(cut.data)
    opcodes = [frame.opcode for frame in receiver.events_received() if isinstance(frame, Frame)]
    assert opcodes == [Opcode.PING] * len(sizes)


@given(size=SIZES, masked=st.booleans())
def test_the_library_understands_what_is_written(size: int, masked: bool) -> None:
    client, server = connected()
    receiver = server if masked else client
    payload = bytes(size)
    mask = MASK if masked else b""
    receiver.receive_data(binary_header(size, mask) + (apply_mask(payload, mask) if masked else payload))
    (frame,) = receiver.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, frame.data) == (Opcode.BINARY, True, payload)


def test_fragments_and_texts_are_the_librarys() -> None:
    client, _ = connected()
    client.send_text(b"text")
    client.send_binary(b"one", fin=False)
    client.send_continuation(b"two", fin=True)
    client.send_binary(b"whole")
    found = FrameReader(MOST, apply_mask).feed(sent(client))
    assert [cut.other for cut in found] == [True, True, True, False]
    assert found[-1] == Cut(b"whole")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (binary_header(MOST + 1, MASK), CloseCode.MESSAGE_TOO_BIG),
        (binary_header(5) + b"plain", CloseCode.PROTOCOL_ERROR),
        (b"\xf2\x80" + MASK, CloseCode.PROTOCOL_ERROR),
        (b"\x83\x80" + MASK, CloseCode.PROTOCOL_ERROR),
    ],
    ids=["too large", "not masked", "reserved bits", "unknown kind"],
)
def test_what_is_wrong_reaches_the_library_which_ends_the_connection(data: bytes, code: CloseCode) -> None:
    _, server = connected()
    reader = FrameReader(MOST, apply_mask)
    for piece in (data, b"\x00" * 10):
        for cut in reader.feed(piece):
            assert cut.other
            server.receive_data(cut.data)
    assert server.state is State.CLOSING
    assert server.close_sent is not None
    assert server.close_sent.code == code


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_no_bytes_make_it_fail_or_keep_much(data: bytes, places: list[int]) -> None:
    reader = FrameReader(64, apply_mask)
    passed = sum(len(cut.data) for piece in cut_up(data, places) for cut in reader.feed(piece))
    assert passed <= len(data)

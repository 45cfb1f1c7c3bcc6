"""The pump, with a transport and a clock that the test controls; and the fast path for data frames, which agrees with
the websocket library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri
from websockets.utils import apply_mask

from meshgate_wire import Pump, Session
from meshgate_wire.messages import Done
from meshgate_wire.websocket import NO_MASK, FrameReader, ParsedFrame, binary_header
from tests.wire.channel import KIB, MIB, client, connected, drain, gateway, numbers, send_done

MAX_SIZE = 200_000
SIZES = st.sampled_from([0, 1, 125, 126, 127, 1000, 65_535, 65_536, 100_000])
MASK = b"\x01\x80\xff\x00"


# --- the pump -----------------------------------------------------------------------------------------------


class FakeTimer:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTransport:
    """Buffers what is written; ``advance`` moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.buffer: list[bytes] = []
        self.written: list[bytes] = []
        self.timers: list[FakeTimer] = []
        self.on_write: Callable[[], None] = lambda: None

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        message = b"".join(pieces)
        self.buffer.append(message)
        self.written.append(message)
        self.on_write()

    def buffered(self) -> int:
        return sum(map(len, self.buffer))

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.callback()

    def armed(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


def connected_pump() -> tuple[Session, Session, FakeTransport, Pump]:
    """A connected client and gateway, and the client's transport and pump."""
    channel = connected(client(), gateway())
    transport = FakeTransport()
    return channel.client.session, channel.gateway.session, transport, Pump(channel.client.session, transport)


def drain_immediately(transport: FakeTransport, pump: Pump) -> None:
    def drain() -> None:
        transport.buffer.clear()
        pump.flush()

    transport.on_write = drain


def test_a_flush_writes_everything_as_one_message() -> None:
    session, peer, transport, pump = connected_pump()
    for number in range(5):
        send_done(session, number, stream=number)
    pump.flush()
    (message,) = transport.written
    assert numbers(peer.receive_data(message)) == [0, 1, 2, 3, 4]
    pump.flush()
    assert len(transport.written) == 1


def test_a_new_connection_starts_with_a_hello() -> None:
    session = client()
    session.connection_made()
    transport = FakeTransport()
    Pump(session, transport).flush()
    assert [message[0] for message in transport.written] == [1]


def test_the_transport_is_filled_to_its_high_water_mark() -> None:
    session, _, transport, pump = connected_pump()
    send_done(session, 1, 6 * MIB)
    pump.flush()
    assert 256 * KIB <= transport.buffered() < 256 * KIB + 257 * KIB
    queued = session.queued_bytes
    pump.flush()
    assert session.queued_bytes == queued
    transport.buffer.clear()
    pump.flush()
    assert session.queued_bytes < queued


def test_a_small_message_overtakes_unwritten_data() -> None:
    session, peer, transport, pump = connected_pump()
    send_done(session, 1, 6 * MIB, stream=1)
    pump.flush()
    already = len(transport.written)
    send_done(session, 2, stream=2)
    transport.buffer.clear()
    pump.flush()
    events = [event for message in transport.written[: already + 1] for event in peer.receive_data(message)]
    assert numbers(events) == [2]


def test_a_transport_that_drains_during_a_write_is_not_reentered() -> None:
    session, peer, transport, pump = connected_pump()
    drain_immediately(transport, pump)
    send_done(session, 1, 400 * KIB)
    pump.flush()
    assert session.queued_bytes == 0
    events = [event for message in transport.written for event in peer.receive_data(message)]
    assert numbers(events) == [1]


def test_a_long_flush_yields_to_other_callbacks() -> None:
    session, peer, transport, pump = connected_pump()
    drain_immediately(transport, pump)
    send_done(session, 1, 3 * MIB)
    pump.flush()
    turns = 0
    while session.queued_bytes:
        assert transport.armed() == 1
        transport.advance(0)
        turns += 1
    assert turns == 5  # 3 MiB in steps of half a MiB, the first of them by flush()
    events = [event for message in transport.written for event in peer.receive_data(message)]
    assert numbers(events) == [1]


def test_the_owner_is_notified_of_flushes_by_timers() -> None:
    channel = connected(client(), gateway())
    session, transport, queued = channel.client.session, FakeTransport(), list[int]()
    pump = Pump(session, transport, flushed=lambda: queued.append(session.queued_bytes))
    drain_immediately(transport, pump)
    send_done(session, 1, 1 * MIB)
    pump.flush()
    assert queued == []
    while session.queued_bytes:
        transport.advance(0)
    assert queued == [0]


def test_messages_of_one_loop_iteration_are_written_together() -> None:
    session, peer, transport, pump = connected_pump()
    for number in range(3):
        send_done(session, number, stream=number)
        pump.flush_soon()
    assert transport.written == []
    assert transport.armed() == 1
    transport.advance(0)
    (message,) = transport.written
    assert numbers(peer.receive_data(message)) == [0, 1, 2]
    pump.flush_soon()
    assert transport.armed() == 1


def test_an_acknowledgement_waits_50_ms_for_other_traffic() -> None:
    session, peer, transport, pump = connected_pump()
    send_done(peer, 1)
    for message in drain(peer):
        session.receive_data(message)
    pump.flush()
    pump.flush()
    assert transport.written == []
    assert transport.armed() == 1
    transport.advance(0.049)
    assert transport.written == []
    transport.advance(0.002)
    assert [message[0] for message in transport.written] == [3]
    assert transport.armed() == 0


def test_an_acknowledgement_carried_by_other_traffic_is_not_sent_again() -> None:
    session, peer, transport, pump = connected_pump()
    send_done(peer, 1)
    for message in drain(peer):
        session.receive_data(message)
    pump.flush()
    session.send(Done(call=1), stream=1)
    pump.flush()
    transport.advance(1)
    assert [message[0] for message in transport.written] == [2]


def test_a_closed_pump_writes_nothing_and_has_no_timer() -> None:
    session, peer, transport, pump = connected_pump()
    send_done(peer, 1)
    for message in drain(peer):
        session.receive_data(message)
    pump.flush()
    pump.flush_soon()
    send_done(session, 1)
    pump.close()
    assert transport.armed() == 0
    pump.flush()
    pump.flush_soon()
    pump.close()
    assert transport.written == []
    assert transport.armed() == 0


# --- data frames --------------------------------------------------------------------------------------------


def connected_protocols() -> tuple[ClientProtocol, ServerProtocol]:
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
    client, server = connected_protocols()
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


@given(size=SIZES, mask=st.sampled_from([b"", MASK, NO_MASK]))
def test_the_library_reads_what_is_written(size: int, mask: bytes) -> None:
    client, server = connected_protocols()
    receiver = server if mask else client
    payload = b"x" * size
    receiver.receive_data(binary_header(size, mask) + (apply_mask(payload, mask) if mask else payload))
    (frame,) = receiver.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, frame.data) == (Opcode.BINARY, True, payload)


@given(sizes=st.lists(SIZES, max_size=4), positions=st.lists(st.integers(0, 1 << 20), max_size=12))
def test_only_messages_with_a_mask_are_unmasked(sizes: list[int], positions: list[int]) -> None:
    written, masks = bytearray(), cycle((MASK, NO_MASK))
    for number, size in enumerate(sizes):
        mask = next(masks)
        written += binary_header(size, mask) + apply_mask(bytes([number]) * size, mask)
    unmasked: list[bytes] = []

    def unmask(payload: memoryview, mask: bytes) -> bytes:
        unmasked.append(mask)
        return apply_mask(payload, mask)

    reader = FrameReader(MAX_SIZE, unmask)
    found = [frame for piece in split(bytes(written), positions) for frame in reader.feed(piece)]
    assert [frame.data for frame in found] == [bytes([number]) * size for number, size in enumerate(sizes)]
    assert unmasked == [MASK] * ((len(sizes) + 1) // 2)


def test_fragments_and_texts_are_passed_to_the_library() -> None:
    client, _ = connected_protocols()
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
    _, server = connected_protocols()
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

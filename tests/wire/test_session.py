"""Two sessions over a channel whose messages the test delivers."""

from __future__ import annotations

import json

import pytest

from meshgate_wire import (
    Established,
    LimitExceeded,
    MessageTooLarge,
    ProtocolError,
    Session,
    SessionEnded,
    SessionLost,
    State,
    WireError,
)
from meshgate_wire.frames import FIRST, FRAMES, LAST, encode_frame_header, encode_frames_header
from meshgate_wire.messages import Done, Values
from tests.wire.channel import (
    KIB,
    MIB,
    Channel,
    client,
    connected,
    content,
    drain,
    gateway,
    messages,
    next_message,
    numbers,
    pattern,
    send_done,
)


def established() -> Channel:
    return connected(client(), gateway())


def frames(ack: int, first: int, *payloads: tuple[int, int, bytes]) -> bytes:
    """A websocket message of DATA frames, each ``(flags, stream, payload)``."""
    body = b"".join(encode_frame_header(flags, stream, len(data)) + data for flags, stream, data in payloads)
    return encode_frames_header(FRAMES, ack, first) + body


def small_frame(number: int) -> tuple[int, int, bytes]:
    """The frame of a small message, made by a session that sends it."""
    sender = client()
    sender.connection_made()
    next_message(sender)
    send_done(sender, number)
    return FIRST | LAST, 1, next_message(sender)[17 + 13 :]


def header_with_many_errors() -> bytes:
    header = {"type": "values", "call": 1, "objects": {f"x{at}": {} for at in range(100)}}
    return json.dumps(header).encode().ljust(0x800)


# --- messages ---------------------------------------------------------------------------------------------


def test_a_message_arrives_unchanged() -> None:
    channel = established()
    header = Values(call=7, ranks=(0, 2))
    channel.gateway.session.send(header, [b"first", b"", bytearray(b"second"), memoryview(b"third")], stream=-5)
    channel.settle()
    (message,) = channel.client.received
    assert content(message) == (header, [b"first", b"", b"second", b"third"])
    assert message.stream == -5


def test_a_large_message_arrives_in_fragments() -> None:
    channel = established()
    send_done(channel.client.session, 1, 700 * KIB, 0, 3, 600 * KIB)
    channel.settle()
    (message,) = channel.gateway.received
    assert content(message)[1] == [pattern(700 * KIB, 1), b"", pattern(3, 3), pattern(600 * KIB, 4)]
    assert len(message.buffers[0].fragments) > 1


def test_a_message_between_small_message_and_chunk_is_one_frame() -> None:
    channel = established()
    send_done(channel.client.session, 1, 100 * KIB)
    channel.settle()
    assert channel.client.session.statistics().frames_sent == 1
    assert content(channel.gateway.received[0])[1] == [pattern(100 * KIB, 1)]


def test_queued_messages_are_sent_as_one_websocket_message() -> None:
    channel = established()
    for number in range(100):
        send_done(channel.client.session, number, 10, stream=number)
    (message,) = drain(channel.client.session)
    assert numbers(channel.gateway.session.receive_data(message)) == list(range(100))


def test_a_large_buffer_is_sent_without_a_copy() -> None:
    channel = established()
    large = bytearray(MIB)
    channel.client.session.send(Done(call=1), [large], stream=1)
    pieces = channel.client.session.data_to_send()
    assert any(isinstance(piece, memoryview) and piece.obj is large for piece in pieces)


def test_a_small_buffer_may_change_after_send() -> None:
    channel = established()
    small = bytearray(b"before")
    channel.client.session.send(Done(call=1), [small], stream=1)
    small[:] = b"after!"
    channel.settle()
    assert content(channel.gateway.received[0])[1] == [b"before"]


def test_received_data_may_be_a_view() -> None:
    channel = established()
    send_done(channel.client.session, 4)
    assert numbers(channel.gateway.session.receive_data(memoryview(next_message(channel.client.session)))) == [4]


def test_a_message_that_exceeds_the_peers_limits_is_not_queued() -> None:
    channel = connected(client(), gateway(max_message=100 * KIB, max_buffers=8 * KIB, max_header=64 * KIB))
    session = channel.client.session
    with pytest.raises(MessageTooLarge, match=f"with {100 * KIB + 40} bytes: the peer's limit is {100 * KIB}"):
        session.send(Done(call=1), [bytes(100 * KIB)], stream=1)
    with pytest.raises(MessageTooLarge, match="with 8193 buffers") as caught:
        session.send(Done(call=1), [b""] * (8 * KIB + 1), stream=1)
    assert (caught.value.value, caught.value.limit) == (8 * KIB + 1, 8 * KIB)
    with pytest.raises(MessageTooLarge, match="header bytes"):
        session.send(Values(call=1, ranks=tuple(range(20_000))), stream=1)
    assert session.queued_bytes == 0
    assert session.statistics().messages_sent == 0


def test_a_message_queued_before_the_limits_are_known_is_rejected_by_the_peer() -> None:
    channel = Channel(client(), gateway(max_message=100 * KIB, max_partial_bytes=100 * KIB))
    channel.client.session.send(Done(call=1), [bytes(200 * KIB)], stream=1)
    channel.dial()
    with pytest.raises(LimitExceeded, match="bytes in one message"):
        channel.settle()


def test_text_that_cannot_be_encoded_is_not_queued() -> None:
    session = client()
    with pytest.raises(ValueError, match="surrogates"):
        session.send(Done.model_construct(call=1, type="\ud800"), stream=1)  # type: ignore[arg-type]
    assert session.queued_bytes == 0


# --- the first round trip ---------------------------------------------------------------------------------


def test_a_client_sends_its_first_messages_before_the_gateways_hello() -> None:
    sender, receiver = client(), gateway()
    for number in range(3):
        send_done(sender, number, 50 * KIB, stream=number)
    sender.connection_made()
    receiver.connection_made()
    flight = drain(sender)
    events = [event for message in flight for event in receiver.receive_data(message)]
    assert numbers(events) == [0, 1, 2]


def test_a_client_sends_at_most_the_minimum_window_before_the_gateways_hello() -> None:
    sender = client()
    for number in range(10):
        send_done(sender, number, 60 * KIB)
    send_done(sender, 10, 100 * KIB, stream=2)
    sender.connection_made()
    drain(sender)
    assert sender.statistics().frames_sent == 4
    channel = Channel(sender, gateway())
    channel.dial()
    channel.settle()
    assert sorted(numbers(channel.gateway.events)) == list(range(11))


def test_the_remaining_messages_are_sent_after_the_gateways_hello() -> None:
    channel = Channel(client(), gateway())
    for number in range(10):
        send_done(channel.client.session, number, 60 * KIB)
    send_done(channel.client.session, 10, 5 * MIB, stream=2)
    channel.dial()
    channel.settle()
    assert sorted(numbers(channel.gateway.events)) == list(range(11))
    assert channel.client.session.statistics().frames_replayed == 0


def test_a_client_disconnected_before_the_hello_waits_for_it_on_the_next_connection() -> None:
    channel = Channel(client(), gateway())
    send_done(channel.client.session, 1)
    channel.dial()
    while channel.write(channel.client):
        channel.deliver(channel.client)
    channel.cut()
    channel.dial()
    assert len(drain(channel.client.session)) == 1
    channel.cut()
    channel.dial()
    channel.settle()
    assert numbers(channel.gateway.events) == [1]
    assert channel.client.session.statistics().unacknowledged_bytes == 0


def test_a_gateway_waits_for_the_clients_hello() -> None:
    session = gateway()
    session.connection_made()
    send_done(session, 1)
    assert len(drain(session)) == 1
    assert session.queued_bytes > 0


# --- disconnects -------------------------------------------------------------------------------------------------


def test_exactly_the_lost_frames_are_replayed() -> None:
    channel = established()
    for number in range(5):
        send_done(channel.client.session, number)
        channel.write(channel.client)
    channel.deliver(channel.client)
    channel.deliver(channel.client)
    channel.cut()
    channel.dial()
    channel.settle()
    assert numbers(channel.gateway.events) == [0, 1, 2, 3, 4]
    assert channel.client.session.statistics().frames_replayed == 3
    assert channel.gateway.session.statistics().frames_dropped == 0


def test_messages_sent_while_disconnected_follow_the_replayed_ones() -> None:
    channel = established()
    send_done(channel.client.session, 1)
    channel.write(channel.client)
    channel.cut()
    send_done(channel.client.session, 2)
    channel.dial()
    channel.settle()
    assert numbers(channel.gateway.events) == [1, 2]
    assert [event.resumed for event in channel.gateway.established] == [False, True]


def test_a_large_message_continues_after_a_disconnect() -> None:
    channel = established()
    send_done(channel.client.session, 1, 3 * MIB)
    for _ in range(4):
        channel.write(channel.client)
    channel.deliver(channel.client)
    channel.deliver(channel.client)
    channel.cut()
    channel.dial()
    channel.settle()
    assert content(channel.gateway.received[0])[1] == [pattern(3 * MIB, 1)]
    assert channel.client.session.statistics().frames_replayed == 2


def test_an_interrupted_replay_starts_again() -> None:
    channel = established()
    for number in range(6):
        send_done(channel.client.session, number, 60 * KIB, stream=number)
        channel.write(channel.client)
    for _ in range(3):
        channel.cut()
        channel.dial()
        for side in channel.sides:
            channel.write(side)
            channel.deliver(side)
        channel.write(channel.client, 70 * KIB)
        channel.write(channel.client, 70 * KIB)
        channel.deliver(channel.client)
        channel.client.session.validate_state()
    channel.settle()
    assert numbers(channel.gateway.events) == list(range(6))


def test_a_new_connection_replaces_one_that_has_not_ended() -> None:
    channel = established()
    send_done(channel.gateway.session, 1)
    channel.write(channel.gateway)
    channel.client.in_flight.clear()
    channel.gateway.in_flight.clear()
    channel.dial()
    channel.settle()
    assert numbers(channel.client.events) == [1]


def test_replayed_frames_that_have_arrived_are_dropped() -> None:
    channel = established()
    for number in range(3):
        send_done(channel.client.session, number, stream=number)
    message = next_message(channel.client.session)
    receiver = channel.gateway.session
    assert numbers(receiver.receive_data(message)) == [0, 1, 2]
    channel.cut()
    channel.dial()
    channel.write(channel.client)
    channel.deliver(channel.client)
    assert receiver.receive_data(message) == []
    assert receiver.statistics().frames_dropped == 3


def test_nothing_is_sent_without_a_connection() -> None:
    session = client()
    send_done(session, 1)
    assert drain(session) == []
    assert not session.ack_due
    with pytest.raises(SessionEnded, match="detached"):
        session.receive_data(b"")


# --- acknowledgements -------------------------------------------------------------------------------------


def test_other_traffic_carries_acknowledgements() -> None:
    channel = established()
    send_done(channel.client.session, 1)
    channel.settle(acknowledge=False)
    assert channel.gateway.session.ack_due
    send_done(channel.gateway.session, 2)
    channel.settle(acknowledge=False)
    assert not channel.gateway.session.ack_due
    assert channel.client.session.statistics().unacknowledged_bytes == 0


def test_a_single_acknowledgement_is_sent_on_request() -> None:
    channel = established()
    send_done(channel.client.session, 1)
    channel.settle(acknowledge=False)
    assert drain(channel.gateway.session) == []
    assert channel.client.session.statistics().unacknowledged_bytes > 0
    channel.gateway.session.acknowledge()
    assert channel.write(channel.gateway)
    channel.deliver(channel.gateway)
    assert channel.client.session.statistics().unacknowledged_bytes == 0
    channel.gateway.session.acknowledge()
    assert drain(channel.gateway.session) == []


def test_a_large_amount_of_data_is_acknowledged_without_request() -> None:
    channel = connected(client(), gateway(ack_after=50 * KIB))
    send_done(channel.client.session, 1, 60 * KIB)
    channel.settle(acknowledge=False)
    assert channel.client.session.statistics().unacknowledged_bytes == 0


def test_sending_pauses_at_the_byte_limit_and_resumes_on_acknowledgement() -> None:
    channel = connected(client(max_unacknowledged=100 * KIB), gateway())
    for number in range(10):
        send_done(channel.client.session, number, 30 * KIB, stream=number)
    while channel.write(channel.client):
        pass
    assert 100 * KIB <= channel.client.session.statistics().unacknowledged_bytes < 150 * KIB
    assert channel.client.session.queued_bytes > 150 * KIB
    channel.settle()
    assert numbers(channel.gateway.events) == list(range(10))
    assert channel.client.session.queued_bytes == 0


def test_grants_are_sent_while_messages_wait_for_acknowledgements() -> None:
    channel = connected(client(max_unacknowledged=0), gateway())
    send_done(channel.client.session, 1)
    send_done(channel.client.session, 2)
    send_done(channel.gateway.session, 3, 12 * MIB)
    while channel.write(channel.client):
        pass
    while channel.write(channel.gateway):
        channel.deliver(channel.gateway)
        while channel.write(channel.client):
            channel.deliver(channel.client)
    channel.settle()
    assert numbers(channel.client.events) == [3]
    assert numbers(channel.gateway.events) == [1, 2]


def test_grants_to_a_peer_that_acknowledges_nothing_are_limited() -> None:
    channel = connected(client(max_unacknowledged=0, window=256 * KIB), gateway())
    send_done(channel.gateway.session, 3, 5 * MIB)
    for _ in range(20):
        channel.write(channel.gateway)
        channel.deliver(channel.gateway)
        while channel.write(channel.client):
            pass
    assert channel.client.session.statistics().unacknowledged_frames == 1
    channel.settle()
    assert numbers(channel.client.events) == [3]


def test_an_acknowledgement_of_an_unsent_frame_ends_the_connection() -> None:
    channel = established()
    with pytest.raises(ProtocolError, match=r"acknowledged frame 9, .* frame 0 and the last sent frame 0") as caught:
        channel.client.session.receive_data(bytes([3]) + (9).to_bytes(8, "big"))
    assert caught.value.resumable


def test_an_acknowledgement_may_not_decrease() -> None:
    channel = established()
    for number in range(3):
        send_done(channel.client.session, number)
    channel.settle()
    with pytest.raises(ProtocolError, match="acknowledged frame 2, which is not between the last acknowledged frame 3"):
        channel.client.session.receive_data(bytes([3]) + (2).to_bytes(8, "big"))


# --- protocol violations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "unknown type 0"),
        (b"\x09hello", "unknown type 9"),
        (b"\x01{}", "sent a second hello"),
        (b"\x03\0\0", "an acknowledgement must have 9 bytes, not 3"),
        (b"\x02\0\0", "must have at least 17 bytes, not 3"),
        (encode_frames_header(FRAMES, 0, 1), "without any frame"),
        (frames(0, 0, (3, 1, b"x")), "sent frame 0, but frame 1 was expected"),
        (frames(0, 3, (3, 1, b"x")), "sent frame 3, but frame 1 was expected"),
        (encode_frames_header(FRAMES, 0, 1) + b"\x03\0\0", "frame 1 is truncated: 3 bytes of its header"),
        (frames(0, 1, (3, 1, b"x" * 9))[:-2], "frame 1 is truncated: 7 of 9 bytes"),
        (encode_frames_header(FRAMES, 0, 1) + encode_frame_header(3, 1, 2**31), "2147483648 bytes in one frame"),
        (bytes(5 * MIB), "5242880 bytes in one websocket message, but this side's limit is 4194304"),
    ],
)
def test_invalid_websocket_messages_end_the_connection_but_not_the_session(message: bytes, reason: str) -> None:
    channel = established()
    session = channel.gateway.session
    with pytest.raises(ProtocolError, match=reason) as caught:
        session.receive_data(message)
    assert caught.value.resumable
    assert session.state is State.ENDED
    assert drain(session) == []
    with pytest.raises(SessionEnded, match="ended"):
        session.receive_data(b"")
    channel.cut()
    channel.dial()
    send_done(channel.client.session, 1)
    channel.settle()
    assert numbers(channel.gateway.events) == [1]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((8, 1, b"x"), "unknown type 8 on stream 1"),
        ((7, 1, b"x"), "unknown type 7"),
        ((3, 1, b""), "an empty frame on stream 1"),
        ((3, 1, b"x"), "has only 1 bytes, less than its preamble"),
        ((3, 1, bytes(8)), "invalid header of a message on stream 1: value: Invalid JSON"),
        (
            (3, 1, bytes((0, 0, 8, 0, 0, 0, 0, 0)) + header_with_many_errors()),
            "invalid header of a message on stream 1: 100 errors",
        ),
        ((4, 0, b"x"), "pairs of 12 bytes, but has 1"),
        ((4, 0, bytes(11) + b"\1"), "granted 1 bytes on stream 0, a total of 8388609 in a window of 8388608"),
        ((0, 1, bytes(2000)), "continues a message that has not started"),
    ],
)
def test_invalid_frames_end_the_session(frame: tuple[int, int, bytes], reason: str) -> None:
    channel = established()
    session = channel.gateway.session
    with pytest.raises(ProtocolError, match=reason) as caught:
        session.receive_data(frames(0, 1, frame))
    assert not caught.value.resumable
    assert session.state is State.FAILED
    assert session.failure is caught.value
    with pytest.raises(SessionEnded, match="cannot resume a session that has failed") as ended:
        session.connection_made()
    assert ended.value.__cause__ is caught.value
    with pytest.raises(SessionEnded, match="cannot send in a session that has failed"):
        send_done(session, 1)
    session.connection_lost()
    assert session.state is State.FAILED


def test_messages_before_an_error_are_returned_once_on_the_next_connection() -> None:
    channel = established()
    good = frames(0, 1, small_frame(1), small_frame(2))
    with pytest.raises(ProtocolError, match="truncated"):
        channel.gateway.session.receive_data(good + b"\x03")
    channel.gateway.session.connection_lost()
    channel.gateway.session.connection_made()
    peer = client()
    peer.connection_made()
    events = channel.gateway.session.receive_data(next_message(peer))
    assert numbers(events) == [1, 2]
    assert isinstance(events[-1], Established)
    assert numbers(
        channel.gateway.session.receive_data(frames(0, 1, small_frame(1), small_frame(2), small_frame(3)))
    ) == [3]


def test_frame_numbers_of_one_connection_are_consecutive() -> None:
    channel = established()
    session = channel.gateway.session
    session.receive_data(frames(0, 1, small_frame(1), small_frame(2)))
    with pytest.raises(ProtocolError, match="sent frame 2 after frame 2") as caught:
        session.receive_data(frames(0, 2, small_frame(2)))
    assert caught.value.resumable


def test_a_stream_without_credit_may_not_send() -> None:
    channel = connected(client(), gateway(window=256 * KIB))
    session = channel.gateway.session
    chunk = (0, 1, bytes(100 * KIB))
    with pytest.raises(ProtocolError, match="sent 102400 bytes on stream 1, but had credit for 57344"):
        session.receive_data(frames(0, 1, (1, 1, (2**20).to_bytes(4, "big") + bytes(100 * KIB - 4)), chunk, chunk))


# --- flow control -----------------------------------------------------------------------------------------


def test_a_slow_reader_stops_only_its_stream() -> None:
    channel = connected(client(), gateway(window=256 * KIB, manual={7}))
    for number in range(20):
        send_done(channel.client.session, number, 50 * KIB, stream=7)
    send_done(channel.client.session, 100, 3 * MIB, stream=8)
    channel.settle()
    assert 100 in numbers(channel.gateway.events)
    assert sum(message.nbytes for message in channel.gateway.received if message.stream == 7) <= 256 * KIB
    assert channel.client.session.queued_bytes >= 15 * 50 * KIB


def test_consuming_messages_resumes_a_stream() -> None:
    channel = connected(client(), gateway(window=256 * KIB, manual={7}))
    for number in range(20):
        send_done(channel.client.session, number, 50 * KIB, stream=7)
    consumed = 0
    while consumed < 20:
        channel.settle()
        assert len(channel.gateway.received) > consumed
        for message in channel.gateway.received[consumed:]:
            channel.gateway.session.consume(message)
            channel.gateway.session.consume(message)  # idempotent
            consumed += 1
    assert numbers(channel.gateway.events) == list(range(20))


def test_a_slow_reader_receives_messages_larger_than_the_window() -> None:
    channel = connected(client(), gateway(window=256 * KIB))
    channel.gateway.session.manual(7)
    for number in range(4):
        send_done(channel.client.session, number, 2 * MIB, stream=7)
    channel.settle()
    assert numbers(channel.gateway.events) == [0, 1]  # the second began with the credit left behind the first
    for message in channel.gateway.received:
        channel.gateway.session.consume(message)
    channel.settle()
    assert numbers(channel.gateway.events) == [0, 1, 2, 3]


def test_unread_streams_let_others_send_large_messages() -> None:
    unread = range(100, 164)
    channel = connected(client(manual=unread), gateway())
    for stream in unread:
        for number in range(10):
            send_done(channel.gateway.session, number, MIB, stream=stream)
    channel.settle()
    send_done(channel.gateway.session, 1000, MIB, stream=5)
    channel.settle()
    assert numbers(channel.client.events)[-1] == 1000
    assert channel.client.session.statistics().unfinished_bytes == 0
    for stream in unread:
        assert sum(message.nbytes for message in channel.client.received if message.stream == stream) < 9 * MIB


def test_a_message_larger_than_the_window_is_finished_although_one_is_held() -> None:
    channel = connected(client(), gateway(window=256 * KIB, manual={7}))
    for number, size in enumerate((150 * KIB, 2 * MIB, 2 * MIB, 100 * KIB)):
        send_done(channel.client.session, number, size, stream=7)
    channel.settle()
    assert numbers(channel.gateway.events) == [0, 1, 2]
    for message in channel.gateway.received:
        channel.gateway.session.consume(message)
    channel.settle()
    assert numbers(channel.gateway.events) == [0, 1, 2, 3]
    channel.gateway.session.consume(channel.gateway.received[3])
    channel.settle()
    assert channel.client.session.statistics().streams_sending == 0


def test_a_stream_can_be_made_automatic_again() -> None:
    channel = connected(client(), gateway(window=256 * KIB))
    channel.gateway.session.manual(7)
    send_done(channel.client.session, 1, 50 * KIB, stream=7)
    channel.settle()
    channel.gateway.session.automatic(7)
    for number in range(2, 20):
        send_done(channel.client.session, number, 50 * KIB, stream=7)
    channel.settle()
    assert numbers(channel.gateway.events) == list(range(1, 20))
    assert [message.held > 0 for message in channel.gateway.received] == [True] + [False] * 18


def test_idle_streams_are_forgotten_on_both_sides() -> None:
    channel = connected(client(max_tracked_streams=160), gateway(max_tracked_streams=160))
    for number in range(500):
        send_done(channel.client.session, number, stream=number)
        channel.settle()
    assert channel.gateway.session.statistics().streams_receiving < 20
    assert channel.client.session.statistics().streams_sending < 20


def test_grants_are_split_over_websocket_messages() -> None:
    channel = connected(client(window=256 * KIB), gateway())
    for stream in range(4):
        send_done(channel.gateway.session, stream, 33 * KIB, stream=stream)
        send_done(channel.gateway.session, stream, 33 * KIB, stream=stream)
    while channel.write(channel.gateway):
        channel.deliver(channel.gateway)
    send_done(channel.client.session, 1)
    flight = list(iter(lambda: next_message(channel.client.session, 60), b""))
    assert [len(message) for message in flight] == [17 + 13 + 24, 17 + 13 + 24, 17 + 13 + 32]
    assert numbers([event for message in flight for event in channel.gateway.session.receive_data(message)]) == [1]


def test_a_grant_that_does_not_fit_is_in_the_next_websocket_message() -> None:
    channel = connected(client(window=256 * KIB), gateway())
    send_done(channel.client.session, 1)
    channel.write(channel.client)
    for _ in range(2):
        send_done(channel.gateway.session, 1, 33 * KIB)
    channel.write(channel.gateway)
    channel.deliver(channel.gateway)
    channel.cut()
    channel.dial()
    for side in channel.sides:
        channel.write(side)
    for side in channel.sides:
        channel.deliver(side)
    replayed = 17 + 13 + 32
    sizes = [len(message) for message in iter(lambda: next_message(channel.client.session, replayed + 20), b"")]
    assert sizes == [replayed, 17 + 13 + 12]


# --- fairness ---------------------------------------------------------------------------------------------


def bytes_before_small(large_streams: int) -> int:
    """The bytes sent before a small message that is queued during ``large_streams`` transfers."""
    channel = connected(client(), gateway())
    session = channel.client.session
    for stream in range(large_streams):
        send_done(session, stream, 8 * MIB, stream=stream)
    drained = [next_message(session) for _ in range(3)]
    assert all(len(message) > 200 * KIB for message in drained)
    send_done(session, 999, 100, stream=999)
    before = 0
    for message in iter(lambda: next_message(session), b""):
        drained.append(message)
        if any(number == 999 for m in drained for number in numbers(channel.gateway.session.receive_data(m))):
            return before
        drained.clear()
        before += len(message)
    raise AssertionError("the small message was not sent")


@pytest.mark.parametrize("large_streams", [1, 5])
def test_a_small_message_waits_for_at_most_one_chunk(large_streams: int) -> None:
    assert bytes_before_small(large_streams) <= 257 * KIB


def test_small_messages_do_not_starve_a_large_one() -> None:
    channel = connected(client(), gateway())
    session = channel.client.session
    send_done(session, 999, 100 * KIB, stream=999)
    for number in range(600):
        send_done(session, number, KIB, stream=number)
    before = 0
    for message in iter(lambda: next_message(session), b""):
        if 999 in numbers(channel.gateway.session.receive_data(message)):
            break
        before += len(message)
    assert before <= 2 * 257 * KIB


def test_large_messages_beyond_the_peers_limit_wait() -> None:
    channel = connected(client(), gateway(max_partial_messages=2))
    for number in range(6):
        send_done(channel.client.session, number, MIB, stream=number)
    send_done(channel.client.session, 100, stream=100)
    channel.settle()
    assert numbers(channel.gateway.events)[0] == 100
    assert sorted(numbers(channel.gateway.events)) == [0, 1, 2, 3, 4, 5, 100]


def test_the_size_of_incomplete_messages_stays_within_the_peers_limit() -> None:
    channel = connected(client(), gateway(max_message=MIB, max_partial_bytes=MIB))
    for number in range(4):
        send_done(channel.client.session, number, 600 * KIB, stream=number)
    channel.settle()
    assert sorted(numbers(channel.gateway.events)) == [0, 1, 2, 3]


# --- lost sessions ----------------------------------------------------------------------------------------


def test_the_client_detects_that_the_gateway_has_lost_the_session() -> None:
    channel = established()
    send_done(channel.client.session, 1)
    channel.settle()
    channel.cut()
    reconnected = Channel(channel.client.session, gateway())
    reconnected.dial()
    with pytest.raises(SessionLost, match="the gateway has lost this session: it acknowledged frame 1 earlier"):
        reconnected.settle()
    assert channel.client.session.state is State.FAILED


def test_the_gateway_detects_that_it_has_lost_the_session() -> None:
    channel = established()
    send_done(channel.gateway.session, 1)
    channel.settle()
    channel.cut()
    new_gateway = gateway()
    new_gateway.connection_made()
    channel.client.session.connection_made()
    with pytest.raises(SessionLost, match="the gateway has lost the session that the client resumes"):
        new_gateway.receive_data(next_message(channel.client.session))


def test_a_failed_session_frees_its_messages() -> None:
    channel = connected(client(), gateway(manual={1}))
    send_done(channel.client.session, 1, 10)
    channel.settle()
    send_done(channel.gateway.session, 1, MIB)
    with pytest.raises(WireError):
        channel.gateway.session.receive_data(frames(0, 2, (9, 1, b"x")))
    session = channel.gateway.session
    assert session.queued_bytes == session.statistics().unacknowledged_bytes == 0
    session.consume(channel.gateway.received[0])


def test_the_representation_of_a_session() -> None:
    channel = established()
    assert repr(channel.client.session) == ("<Session client ESTABLISHED received=0 sent=0 acknowledged=0 queued=0>")
    assert isinstance(channel.client.session, Session)
    assert messages(channel.client.events) == []

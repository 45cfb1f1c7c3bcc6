"""Whatever happens to the connection, each message arrives once, unchanged, and in the order of its stream."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshgate_wire import MessageReceived, ProtocolError, State
from meshgate_wire.frames import CREDIT, FRAME_HEADER_BYTES, MESSAGE_HEADER_BYTES, read_frame_header
from meshgate_wire.messages import Done
from tests.wire.channel import (
    KIB,
    Channel,
    Side,
    check_sessions,
    client,
    connected,
    content,
    drain,
    gateway,
    next_message,
    pattern,
    send_done,
)

WINDOW = 256 * KIB
MANUAL = frozenset({3, 4})
SIZES = (0, 1, 100, 20 * KIB, 63 * KIB, 70 * KIB, 300 * KIB, 600 * KIB)
LARGEST = 2 * 600 * KIB + KIB

sides = st.integers(0, 1)
streams = st.integers(1, 4)


class Conversation(RuleBasedStateMachine):
    """A client and a gateway whose messages are written, delivered, lost, truncated and replayed."""

    @initialize(
        chunk=st.sampled_from([4 * KIB, 50 * KIB, 256 * KIB]),
        small=st.sampled_from([0, 64 * KIB]),
        unacknowledged=st.sampled_from([0, 100 * KIB, 2**26]),
        partials=st.sampled_from([1, 64]),
        connected_first=st.booleans(),
    )
    def start(self, chunk: int, small: int, unacknowledged: int, partials: int, connected_first: bool) -> None:
        def options() -> dict[str, object]:
            return {
                "window": WINDOW,
                "chunk": chunk,
                "small_message": small,
                "max_unacknowledged": unacknowledged,
                "max_partial_messages": partials,
                "ack_after": 100 * KIB,
                "manual": MANUAL,
            }

        self.channel = Channel(client(**options()), gateway(**options()))
        self.sent: list[list[tuple[int, int, tuple[int, ...]]]] = [[], []]
        self.unconsumed: list[list[MessageReceived]] = [[], []]
        self.seen = [0, 0]
        if connected_first:
            self.channel.dial()
            self.channel.settle()

    def side(self, index: int) -> Side:
        return self.channel.sides[index]

    @rule(index=sides, queued=st.lists(st.tuples(streams, st.lists(st.sampled_from(SIZES), max_size=2)), max_size=6))
    def send(self, index: int, queued: list[tuple[int, list[int]]]) -> None:
        for stream, sizes in queued:
            number = len(self.sent[index])
            send_done(self.side(index).session, number, *sizes, stream=stream)
            self.sent[index].append((stream, number, tuple(sizes)))

    @precondition(lambda self: not self.channel.up)
    @rule()
    def dial(self) -> None:
        self.channel.dial()

    @rule(rounds=st.integers(1, 8), delivered=st.lists(st.booleans(), min_size=2, max_size=2))
    def exchange(self, rounds: int, delivered: list[bool]) -> None:
        """Both sides write; the messages of one, both or none are delivered."""
        if not self.channel.up:
            self.channel.dial()
        for _ in range(rounds):
            for side, is_delivered in zip(self.channel.sides, delivered, strict=True):
                self.channel.write(side)
                if is_delivered:
                    self.channel.deliver(side)

    @rule(index=sides, count=st.integers(1, 20), budget=st.sampled_from([1, 5000, 257 * KIB]))
    def write(self, index: int, count: int, budget: int) -> None:
        for _ in range(count):
            self.channel.write(self.side(index), budget)

    @rule(index=sides, count=st.integers(1, 20))
    def deliver(self, index: int, count: int) -> None:
        for _ in range(count):
            self.channel.deliver(self.side(index))

    @rule(index=sides)
    def acknowledge(self, index: int) -> None:
        self.side(index).session.acknowledge()

    @rule(index=sides)
    def consume_one(self, index: int) -> None:
        self.collect()
        if self.unconsumed[index]:
            self.side(index).session.consume(self.unconsumed[index].pop())

    @precondition(lambda self: self.channel.up)
    @rule(noticed=st.booleans())
    def cut(self, noticed: bool) -> None:
        """Loses the messages in flight. If not ``noticed``, the next connection replaces one that has not ended."""
        if noticed:
            self.channel.cut()
        for side in self.channel.sides:
            side.in_flight.clear()
        self.channel.dial()

    @precondition(lambda self: self.channel.up)
    @rule(index=sides)
    def replay_old_messages_on_the_next_connection(self, index: int) -> None:
        """Delivers frames twice: at the end of one connection and at the start of the next."""
        side, other = self.side(index), self.channel.other(self.side(index))
        self.channel.write(side)
        old = [message for message in side.in_flight if message[0] == 2]
        while self.channel.deliver(side):
            pass
        if other.session.state is not State.ESTABLISHED:
            return
        self.channel.cut()
        self.channel.dial()
        self.channel.write(side)
        self.channel.deliver(side)
        received = other.session.statistics().frames_received
        for message in old:
            # An old message has an old acknowledgement, unlike a real replay.
            ack = other.session.statistics().frames_acknowledged
            other.events += other.session.receive_data(message[:1] + ack.to_bytes(8, "big") + message[9:])
        assert other.session.statistics().frames_received == received
        self.channel.cut()

    @precondition(lambda self: self.channel.up)
    @rule(index=sides, keep=st.floats(0, 1, exclude_max=True))
    def truncate(self, index: int, keep: float) -> None:
        """Truncates a websocket message, which ends the connection."""
        side, other = self.side(index), self.channel.other(self.side(index))
        if not side.in_flight:
            return
        message = side.in_flight.popleft()
        try:
            other.events += other.session.receive_data(message[: int(len(message) * keep)])
        except ProtocolError as error:
            assert error.resumable  # noqa: PT017 - both outcomes are right, depending on the position
        self.channel.cut()

    @invariant()
    def invariants_hold(self) -> None:
        for side in self.channel.sides:
            side.session.validate_state()

    @invariant()
    def credit_bounds_what_a_slow_reader_holds(self) -> None:
        self.collect()
        for index, side in enumerate(self.channel.sides):
            for stream in MANUAL:
                held = sum(message.nbytes for message in self.unconsumed[index] if message.stream == stream)
                assert held <= WINDOW + 2 * LARGEST
            assert side.session.statistics().unfinished_bytes <= 4 * LARGEST

    def collect(self) -> None:
        for index, side in enumerate(self.channel.sides):
            new = side.received[self.seen[index] :]
            self.seen[index] += len(new)
            self.unconsumed[index] += [message for message in new if message.held]

    def teardown(self) -> None:
        if not hasattr(self, "channel"):
            return
        self.channel.cut()
        self.channel.dial()
        busy = True
        while busy:
            self.channel.settle()
            self.no_message_waits_for_the_reader_of_its_stream()
            self.collect()
            busy = any(self.unconsumed)
            for index, side in enumerate(self.channel.sides):
                for message in self.unconsumed[index]:
                    side.session.consume(message)
                self.unconsumed[index].clear()
        self.everything_arrived()
        check_sessions()

    def no_message_waits_for_the_reader_of_its_stream(self) -> None:
        """A message that has begun takes one of the few that may be incomplete, and others wait for that."""
        for side in self.channel.sides:
            assert side.session.statistics().unfinished_bytes == 0

    def everything_arrived(self) -> None:
        for index, side in enumerate(self.channel.sides):
            received = self.channel.other(side).received
            for stream in range(1, 5):
                assert [content(message) for message in received if message.stream == stream] == [
                    (Done(call=number), [pattern(size, number + at) for at, size in enumerate(sizes)])
                    for to, number, sizes in self.sent[index]
                    if to == stream
                ]
            assert side.session.queued_bytes == side.session.statistics().unacknowledged_bytes == 0


Conversation.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestConversation = pytest.mark.filterwarnings("error")(Conversation.TestCase)


@settings(max_examples=60, deadline=None)
@given(
    large=st.lists(st.integers(70 * KIB, 900 * KIB), min_size=1, max_size=8),
    chunk=st.sampled_from([4 * KIB, 64 * KIB, 256 * KIB]),
    before=st.integers(0, 6),
    small=st.lists(st.integers(0, 60 * KIB), min_size=1, max_size=12),
)
def test_small_and_large_messages_take_turns(large: list[int], chunk: int, before: int, small: list[int]) -> None:
    """At most a chunk is sent between two small messages, and about a chunk of small ones between two chunks."""
    channel = connected(client(chunk=chunk), gateway())
    session = channel.client.session
    for stream, size in enumerate(large):
        send_done(session, stream, size, stream=stream)
    for _ in range(before):
        next_message(session, chunk)
    for at, size in enumerate(small):
        send_done(session, 100 + at, size, stream=100 + at)
    frames = [frame for message in drain(session) for frame in frames_of(message)]
    last_large = max((at for at, (stream, _) in enumerate(frames) if stream < 100), default=0)
    waited = passed = 0
    for at, (stream, size) in enumerate(frames):
        if stream < 100:
            waited += size
            passed = 0
        else:
            assert waited <= chunk
            waited = 0
            passed += size
            assert passed <= chunk + 64 * KIB or at > last_large
    assert [stream for stream, _ in frames if stream >= 100] == [100 + at for at in range(len(small))]


def frames_of(message: bytes) -> list[tuple[int, int]]:
    """The stream and the payload size of each DATA frame in a websocket message."""
    found = []
    at = MESSAGE_HEADER_BYTES
    while at < len(message):
        flags, stream, size = read_frame_header(message, at)
        at += FRAME_HEADER_BYTES + size
        if flags != CREDIT:
            found.append((stream, size))
    return found

"""A session: messages that arrive exactly once and in order per stream, over any number of connections.

Sans-IO: bytes in, events and bytes out, without clocks, sockets or threads. Calls must not overlap. On each connection,
the caller runs::

    session.connection_made()
    send b"".join(pieces) for each non-empty ``pieces = session.data_to_send()``    # Pump does this
    events = session.receive_data(message)                                          # for each websocket message
    session.connection_lost()

Promises:

- Every message that ``send`` accepts arrives exactly once, however many connections that takes, or the session fails
  with an error that says why. Messages of a stream keep their order; streams do not wait for each other.
- Large buffers are not copied and must not change until the peer has acknowledged them. ``send`` copies messages of up
  to ``Limits.small_message`` bytes, and the pieces below 4 KiB of larger messages.
- Per stream, a peer can make this side hold at most a window and two messages that are not consumed, and one incomplete
  message. The total of incomplete messages is bounded by ``Limits.max_partial_bytes``.
- Whatever the peer sends, ``receive_data`` returns or raises a ``WireError``. After an error, the connection cannot be
  used. If the error is ``resumable`` (a truncated or misplaced frame), a new connection continues the session, and its
  first events include the messages received before the error. If not (an invalid message, which would be replayed),
  the session has failed and every later call raises ``SessionEnded``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from .credits import ReceiveWindows
from .errors import (
    LimitExceeded,
    ProtocolError,
    SessionEnded,
    WireError,
)
from .fragments import Fragments, Sendable
from .frames import (
    ACK,
    CREDIT,
    FIRST,
    FRAME_HEADER_BYTES,
    FRAMES,
    HELLO,
    LAST,
    MESSAGE_HEADER_BYTES,
    Hello,
    PeerLimits,
    decode_credits,
    encode_ack,
    encode_credits,
    encode_frame_header,
    encode_frames_header,
    grants_that_fit,
    read_ack,
    read_frame_header,
    read_frames_header,
)
from .handshake import SOFTWARE_VERSION, Role, accept_hello, make_hello
from .limits import KIB, MIN_LIMITS, Limits
from .message_codec import Assembly, Encoded, Refuse, accept_all, encode_message
from .messages import Header
from .outbox import Frame, LargeMessage, Outbox, Unacknowledged, coalesce

DEFAULT_BUDGET = 256 * KIB + KIB  # one default chunk and its headers


class State(IntEnum):
    DETACHED = 0  # no connection
    OPENING = 1  # connected, but the peer's Hello has not been received
    ESTABLISHED = 2
    ENDED = 3  # this connection violated the protocol; a new one can continue the session
    FAILED = 4  # the session has ended


@dataclass(frozen=True, slots=True)
class Statistics:
    connections: int
    frames_sent: int  # without replays
    frames_acknowledged: int  # of the sent ones
    frames_replayed: int
    frames_received: int
    frames_dropped: int  # duplicates
    messages_sent: int
    queued_bytes: int
    unacknowledged_bytes: int
    unacknowledged_frames: int
    unfinished_bytes: int  # of incomplete messages, received so far
    streams_sending: int
    streams_receiving: int


@dataclass(frozen=True, slots=True)
class Established:
    """The peer's Hello was received. ``resumed``: an earlier connection of this session was established too."""

    peer: Hello
    resumed: bool


@dataclass(slots=True, eq=False)
class MessageReceived:
    """A complete message. ``held`` is the credit that its stream lacks until ``Session.consume``."""

    header: Header
    buffers: tuple[Fragments, ...]
    stream: int
    nbytes: int  # on the wire: header, lengths and buffers
    held: int = 0
    refused: str = ""  # why this side did not keep its buffers


Event: TypeAlias = "Established | MessageReceived"


class Session:
    """One side of a session.

    With ``views``, large buffers are received as views. ``refuse`` says of a large message whether its buffers are
    dropped as they arrive; ``MessageReceived.refused`` is then the reason.
    """

    def __init__(
        self,
        role: Role,
        *,
        limits: Limits | None = None,
        views: bool = False,
        refuse: Refuse = accept_all,
    ) -> None:
        self.role = role
        self.limits = limits or Limits()
        self.allowed: Limits | PeerLimits = self.limits  # what the peer accepts: until its Hello, as much as this side
        self.state = State.DETACHED
        self.peer: Hello | None = None  # of the last connection that was established
        self.failure: WireError | None = None  # why the state is FAILED
        self._manual: set[int] = set()
        self._outbox = Outbox(self.limits)
        self._sent = Unacknowledged()
        self._windows = ReceiveWindows(self.limits.window, self.limits.max_tracked_streams)
        self._views, self._refuse = views, refuse
        self._assembly = Assembly(self.limits, views=views, refuse=refuse)
        self._undelivered: list[Event] = []  # received before an error
        self._received = 0  # the number of the last received frame
        self._hello_due = False
        self._eager = False  # sends before the peer's Hello, since this is the first connection
        self._next_number = 0  # expected next on this connection; 0: any replayed frame or the next one
        self._acknowledged = 0  # the last acknowledgement sent on this connection
        self._unacknowledged_input = 0  # bytes received since then
        self._ack_now = False
        self._connections = self._replayed = self._dropped = 0
        self._messages_sent = 0

    # --- connections --------------------------------------------------------------------------------------

    def connection_made(self) -> None:
        """A new connection replaces any other one. The first data to send is this side's Hello."""
        if self.state is State.FAILED:
            raise SessionEnded(f"cannot resume a session that has failed: {self.failure}") from self.failure
        self.connection_lost()
        self._connections += 1
        self._eager = self.role is Role.CLIENT and self._connections == 1
        self.state = State.OPENING
        self._hello_due = True

    def connection_lost(self) -> None:
        """The connection has ended. Unacknowledged frames are kept for the next one."""
        if self.state is not State.FAILED:
            self.state = State.DETACHED
        self._hello_due = self._eager = self._ack_now = False
        self._next_number = 0
        self._unacknowledged_input = 0
        self._sent.stop_replay()

    # --- sending ------------------------------------------------------------------------------------------

    def send(self, message: Header | Encoded, buffers: Sequence[Sendable] = (), *, stream: int) -> None:
        """Queues a message, whether connected or not. ``message`` is its header, or the message as ``encode_message``
        has encoded it within what is ``allowed``, perhaps on another thread.

        Raises, without queueing anything, ``SessionEnded`` if the session has failed, and what ``encode_message``
        raises.
        """
        if self.state is State.FAILED:
            raise SessionEnded(f"cannot send in a session that has failed: {self.failure}") from self.failure
        if not isinstance(message, Encoded):
            message = encode_message(message, buffers, self.allowed)
        nbytes, pieces = message
        if nbytes <= self.limits.small_message:
            frame = b"".join((encode_frame_header(FIRST | LAST, stream, nbytes), *pieces))
            self._outbox.put(stream, frame)
        else:
            self._outbox.put(stream, LargeMessage(coalesce(pieces), nbytes))
        self._messages_sent += 1

    def data_to_send(self, budget: int = DEFAULT_BUDGET) -> list[bytes | memoryview]:
        """The pieces of the next websocket message, to be joined; empty if there is nothing to send now.

        A message has at most about ``budget`` bytes, unless a single frame has more.
        """
        if self._hello_due:
            return [self._hello()]
        if self.state is not State.ESTABLISHED and not self._eager:
            return []
        first = self._sent.sent + 1
        pieces: list[bytes | memoryview] = [b""]
        limit = MIN_LIMITS["max_websocket_message"] if self.peer is None else self.peer.limits.max_websocket_message
        available = max(min(budget, limit) - MESSAGE_HEADER_BYTES, FRAME_HEADER_BYTES + 1)
        while available > FRAME_HEADER_BYTES:
            frame = self._next_frame(available, at_least_one=len(pieces) == 1)
            if frame is None:
                break
            pieces += frame.pieces
            available -= frame.nbytes
        if len(pieces) > 1:
            pieces[0] = encode_frames_header(FRAMES, self._received, first)
        elif self._ack_now:
            pieces[0] = encode_ack(self._received)
        else:
            return []
        self._acknowledged = self._received
        self._unacknowledged_input = 0
        self._ack_now = False
        return pieces

    def _next_frame(self, max_bytes: int, *, at_least_one: bool) -> Frame | None:
        sent = self._sent
        if sent.replay:
            frame = sent.next_replayed(max_bytes, at_least_one=at_least_one)
            self._replayed += frame is not None
            return frame
        if sent.nbytes > self.limits.max_unacknowledged:
            return None  # an acknowledgement, which no limit holds back, ends this
        if self._windows.due:
            frame = self._grants(max_bytes, at_least_one)
        else:
            frame = self._outbox.next_frame(max_bytes, at_least_one=at_least_one)
        if frame is not None:
            sent.keep(frame)
        return frame

    def _grants(self, max_bytes: int, at_least_one: bool) -> Frame | None:
        count = max(grants_that_fit(max_bytes), int(at_least_one))
        if not count:
            return None
        frame = encode_credits(self._windows.grants(count))
        return Frame(len(frame), (frame,))

    def _hello(self) -> bytes:
        self._hello_due = False
        self._acknowledged = self._received
        return make_hello(self.role, SOFTWARE_VERSION, self.limits, self._received)

    # --- receiving ----------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """The events in a binary websocket message. Raises ``WireError``, with the consequences described above."""
        if self.state not in (State.OPENING, State.ESTABLISHED):
            raise SessionEnded(f"cannot receive data: the connection has ended ({self.state.name.lower()})")
        events = self._undelivered
        self._undelivered = []
        try:
            self._receive(data, events)
        except WireError as error:
            self._end(error, events)
            raise
        return events

    def _end(self, error: WireError, events: list[Event]) -> None:
        self._hello_due = self._eager = False
        if error.resumable:
            self.state = State.ENDED
            self._undelivered = events
        else:
            self.state = State.FAILED
            self.failure = error
            self._outbox = Outbox(self.limits)  # frees the memory
            self._sent = Unacknowledged()
            self._assembly = Assembly(self.limits, views=self._views, refuse=self._refuse)

    def _receive(self, data: bytes | bytearray | memoryview, events: list[Event]) -> None:
        size = len(data)
        if size > self.limits.max_websocket_message:
            raise LimitExceeded(
                "bytes in one websocket message", size, self.limits.max_websocket_message, resumable=True
            )
        if not isinstance(data, bytes):
            data = bytes(data)
        if self.state is State.OPENING:
            self._receive_hello(data, events)
            return
        kind = data[0] if data else 0
        if kind == FRAMES:
            if size < MESSAGE_HEADER_BYTES:
                text = f"a message of frames must have at least {MESSAGE_HEADER_BYTES} bytes, not {size}"
                raise ProtocolError(text, resumable=True)
            _, ack, first = read_frames_header(data)
            self._sent.acknowledge(ack)
            self._receive_frames(data, first, events)
        elif kind == ACK:
            self._sent.acknowledge(read_ack(data))
        elif kind == HELLO:
            raise ProtocolError("the peer sent a second hello on this connection", resumable=True)
        else:
            raise ProtocolError(
                f"the peer sent a websocket message of unknown type {kind} ({size} bytes)", resumable=True
            )

    def _receive_hello(self, data: bytes, events: list[Event]) -> None:
        hello = accept_hello(data, self.role, SOFTWARE_VERSION, self._sent, self.peer)
        if self._eager:
            self._sent.acknowledge(hello.received)
        else:
            self._sent.rewind(hello.received)
        resumed = self.peer is not None
        if not resumed:
            self._outbox.set_peer_limits(hello.limits)
        self._eager = False
        self.peer, self.allowed = hello, hello.limits
        self.state = State.ESTABLISHED
        events.append(Established(hello, resumed))

    def _receive_frames(self, data: bytes, first: int, events: list[Event]) -> None:
        expected = self._received + 1
        if self._next_number and first != self._next_number:
            raise ProtocolError(f"the peer sent frame {first} after frame {self._next_number - 1}", resumable=True)
        if not 0 < first <= expected:
            raise ProtocolError(f"the peer sent frame {first}, but frame {expected} was expected", resumable=True)
        end = len(data)
        at = MESSAGE_HEADER_BYTES
        if at == end:
            raise ProtocolError("the peer sent a message of frames without any frame", resumable=True)
        number = first
        while at < end:
            if end - at < FRAME_HEADER_BYTES:
                raise ProtocolError(f"frame {number} is truncated: {end - at} bytes of its header", resumable=True)
            flags, stream, length = read_frame_header(data, at)
            at += FRAME_HEADER_BYTES
            if length > self.limits.max_frame:
                raise LimitExceeded("bytes in one frame", length, self.limits.max_frame, resumable=True)
            if end - at < length:
                raise ProtocolError(f"frame {number} is truncated: {end - at} of {length} bytes", resumable=True)
            if number == expected:
                self._receive_frame(flags, stream, data, at, at + length, events)
                self._received = number
                expected += 1
            else:
                self._dropped += 1
            at += length
            number += 1
        self._next_number = number
        self._unacknowledged_input += end
        if self._unacknowledged_input >= self.limits.ack_after:
            self._ack_now = True

    def _receive_frame(self, flags: int, stream: int, data: bytes, start: int, end: int, events: list[Event]) -> None:
        if flags == CREDIT:
            for number, amount in decode_credits(data[start:end]):
                self._outbox.grant(number, amount)
            return
        if start == end:
            raise ProtocolError(f"the peer sent an empty frame on stream {stream}")
        if flags > FIRST | LAST:
            raise ProtocolError(f"the peer sent a frame of unknown type {flags} on stream {stream}")
        held = self._windows.take(stream, end - start)
        message = self._assembly.receive(flags, stream, data, start, end)
        if message is None:
            if held:
                self._windows.expect(stream, self._assembly.missing(stream))
            return
        event = MessageReceived(message.header, message.buffers, stream, message.nbytes, refused=message.refused)
        if stream in self._manual:
            self._windows.hold(stream, message.nbytes)
            event.held = message.nbytes
        events.append(event)

    # --- flow control -----------------------------------------------------------------------------------------

    def manual(self, stream: int) -> None:
        """Messages of ``stream`` that are completed from now on hold their credit until ``consume``."""
        self._manual.add(stream)

    def automatic(self, stream: int) -> None:
        """Reverts ``manual``. Messages that were already delivered must still be consumed."""
        self._manual.discard(stream)

    def consume(self, message: MessageReceived) -> None:
        """The application has processed ``message``, so its credit is granted again. Idempotent."""
        held, message.held = message.held, 0
        if held:
            self._windows.release(message.stream, held)

    def acknowledge(self) -> None:
        """Makes the next ``data_to_send`` acknowledge what was received, even if there is nothing else to send."""
        self._ack_now = self.ack_due

    @property
    def ack_due(self) -> bool:
        """Whether received frames are unacknowledged. Within 50 ms, call ``acknowledge`` and send."""
        return self._received > self._acknowledged and self.state is State.ESTABLISHED

    @property
    def queued_bytes(self) -> int:
        """Bytes that ``send`` accepted and that are not sent. Unbounded: the caller must limit it."""
        return self._outbox.nbytes

    @property
    def queued_small_bytes(self) -> int:
        """The part of ``queued_bytes`` in small messages, which do not wait for large ones."""
        return self._outbox.small_nbytes

    def queued_on(self, stream: int) -> int:
        """The part of ``queued_bytes`` on one stream."""
        return self._outbox.queued_on(stream)

    def statistics(self) -> Statistics:
        return Statistics(
            connections=self._connections,
            frames_sent=self._sent.last,
            frames_acknowledged=self._sent.acknowledged,
            frames_replayed=self._replayed,
            frames_received=self._received,
            frames_dropped=self._dropped,
            messages_sent=self._messages_sent,
            queued_bytes=self._outbox.nbytes,
            unacknowledged_bytes=self._sent.nbytes,
            unacknowledged_frames=len(self._sent),
            unfinished_bytes=self._assembly.nbytes,
            streams_sending=self._outbox.streams,
            streams_receiving=len(self._windows),
        )

    def validate_state(self) -> None:
        """Asserts the invariants that hold between calls. For tests: it takes time proportional to the state."""
        self._outbox.validate_state()
        self._sent.validate_state()
        self._windows.validate_state()
        self._assembly.validate_state()
        assert 0 <= self._acknowledged <= self._received
        assert self._next_number in range(self._received + 2)
        assert (self.failure is not None) == (self.state is State.FAILED)
        assert not self._eager or self.state is State.OPENING
        assert self.state is not State.ESTABLISHED or self.peer is not None
        assert not self._undelivered or self.state in (State.DETACHED, State.OPENING, State.ENDED)

    def __repr__(self) -> str:
        return (
            f"<Session {self.role.value} {self.state.name} received={self._received} sent={self._sent.sent} "
            f"acknowledged={self._sent.acknowledged} queued={self.queued_bytes}>"
        )

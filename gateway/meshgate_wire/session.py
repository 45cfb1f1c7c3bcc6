"""A session: messages that arrive exactly once and in order per stream, over connections that come and go.

Sans-IO: bytes in, events and bytes out. It knows no clock, no socket and no thread; calls must not overlap.
Who drives it does, on each connection::

    session.connection_made()
    send b"".join(pieces) for each non-empty ``pieces = session.data_to_send()``    # Pump does this
    events = session.receive_data(message)                                          # for each websocket message
    session.connection_lost()

Promises:

- What ``send`` has taken arrives exactly once, however many connections it takes, or the session ends with
  an error that says why. Messages of a stream keep their order; streams do not wait for each other.
- Sending a large buffer copies nothing: it must not change until the peer has acknowledged it. ``send`` copies
  messages of up to ``Limits.small_message`` bytes, and of larger ones the pieces below 4 KiB.
- A peer can make this side hold at most, per stream, a window of unconsumed messages and one unfinished one;
  unfinished ones are bounded together by ``Limits.max_partial_bytes``.
- Whatever the peer sends, ``receive_data`` returns or raises a ``WireError``. After an error the connection
  gets no further hearing. If the error is ``resumable`` (the bytes of the connection made no sense: cut short,
  out of order) a new connection continues the session, and messages that came before the error are
  told with its first events. If not (what the peer said made no sense, and it would say it again), the session has
  failed and every later call raises ``SessionEnded``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .assembly import Assembly, Whole
from .credits import ReceiveWindows
from .encoding import encode_message
from .errors import (
    LimitExceeded,
    ProtocolError,
    SessionEnded,
    WireError,
)
from .events import Established, Event, MessageReceived
from .fragments import Sendable
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
    credits_in,
    decode_credits,
    encode_ack,
    encode_credits,
    encode_frame_header,
    encode_frames_header,
    read_ack,
    read_frame_header,
    read_frames_header,
)
from .handshake import Role, greet, read_greeting
from .limits import KIB, LEAST, MIB, Limits
from .messages import Header
from .outbox import Bulk, Outbox, coalesce
from .retransmission import Frame, Unacknowledged
from .state import State, Statistics
from .version import SOFTWARE_VERSION

__all__ = ["DEFAULT_BUDGET", "Session"]

DEFAULT_BUDGET = 256 * KIB + KIB  # one default chunk and its headers
GRANTS_ROOM = MIB  # grants go on where messages pause for acknowledgements, up to here


class Session:
    """One side of a session. ``software``: this side's version, for the peer's messages about a mismatch.

    ``manual_streams`` says of a stream whether its messages keep their credit until ``consume``; ``manual`` adds
    single streams. Both count when a message is complete. With ``views``, large buffers are received as views.
    """

    def __init__(
        self,
        role: Role,
        *,
        limits: Limits | None = None,
        software: str = SOFTWARE_VERSION,
        manual_streams: Callable[[int], bool] | None = None,
        views: bool = False,
    ) -> None:
        self.role = role
        self.limits = limits or Limits()
        self.state = State.DETACHED
        self.peer: Hello | None = None  # of the last connection that was established
        self._software = software
        self.failure: WireError | None = None  # why the state is FAILED
        self._manual = manual_streams
        self._manual_set: set[int] = set()
        self._outbox = Outbox(self.limits)
        self._sent = Unacknowledged()
        self._windows = ReceiveWindows(self.limits.window, self.limits.max_tracked_streams)
        self._views = views
        self._assembly = Assembly(self.limits, views=views)
        self._undelivered: list[Event] = []  # from before an error
        self._received = 0  # the number of the last frame that was taken in
        self._hello_due = False
        self._eager = False  # the peer's Hello has not come, and it is known to have nothing of ours
        self._next_number = 0  # of the next frame on this connection; 0: any that is not ahead
        self._acknowledged = 0  # what this connection has told the peer
        self._unacknowledged_input = 0  # bytes received since
        self._ack_now = False
        self._connections = self._replayed = self._dropped = 0
        self._messages_sent = self._messages_received = 0

    # --- connections --------------------------------------------------------------------------------------

    def connection_made(self) -> None:
        """A new connection is up, in place of any other. Its first bytes to send are our Hello."""
        if self.state is State.FAILED:
            raise SessionEnded(f"the session has failed and cannot be continued: {self.failure}") from self.failure
        self.connection_lost()
        self._connections += 1
        self._eager = self.role is Role.CLIENT and self._connections == 1
        self.state = State.OPENING
        self._hello_due = True

    def connection_lost(self) -> None:
        """The connection is gone. Everything that the peer has not acknowledged is kept for the next one."""
        if self.state is not State.FAILED:
            self.state = State.DETACHED
        self._hello_due = self._eager = self._ack_now = False
        self._next_number = 0
        self._unacknowledged_input = 0
        self._sent.forget_connection()

    # --- sending ------------------------------------------------------------------------------------------

    def send(self, header: Header, buffers: Sequence[Sendable] = (), *, stream: int) -> None:
        """Queues a message, connected or not.

        Raises ``MessageTooLarge`` where the peer would refuse it, ``SessionEnded`` after the session failed, and
        ``ValueError`` for a header with text that is not Unicode; nothing is queued then.
        """
        if self.state is State.FAILED:
            raise SessionEnded(f"the session has failed, nothing can be sent: {self.failure}") from self.failure
        allowed = self.limits if self.peer is None else self.peer.limits
        nbytes, pieces = encode_message(header, buffers, allowed)
        if nbytes <= self.limits.small_message:
            frame = b"".join((encode_frame_header(FIRST | LAST, stream, nbytes), *pieces))
            self._outbox.put_frame(stream, frame)
        else:
            self._outbox.put_bulk(stream, Bulk(coalesce(pieces), nbytes))
        self._messages_sent += 1

    def data_to_send(self, budget: int = DEFAULT_BUDGET) -> list[bytes | memoryview]:
        """The pieces of the next websocket message, to be joined; empty when there is none to send now.

        A message is about ``budget`` bytes at most: it has more only where its one frame does.
        """
        if self._hello_due:
            return [self._hello()]
        if self.state is not State.ESTABLISHED and not self._eager:
            return []
        first = self._sent.sent + 1
        pieces: list[bytes | memoryview] = [b""]
        room = self._room(budget)
        while room > FRAME_HEADER_BYTES:
            frame = self._next_frame(room, at_least_one=len(pieces) == 1)
            if frame is None:
                break
            pieces += frame.pieces
            room -= frame.nbytes
        if len(pieces) > 1:
            pieces[0] = encode_frames_header(self._received, first)
        elif self._ack_now:
            pieces[0] = encode_ack(self._received)
        else:
            return []
        self._acknowledged = self._received
        self._unacknowledged_input = 0
        self._ack_now = False
        return pieces

    def _room(self, budget: int) -> int:
        most = LEAST["max_websocket_message"] if self.peer is None else self.peer.limits.max_websocket_message
        return max(min(budget, most) - MESSAGE_HEADER_BYTES, FRAME_HEADER_BYTES + 1)

    def _next_frame(self, room: int, *, at_least_one: bool) -> Frame | None:
        sent = self._sent
        if sent.replaying:
            frame = sent.next_replayed(room, at_least_one=at_least_one)
            self._replayed += frame is not None
            return frame
        if self._windows.due and sent.nbytes <= self.limits.max_unacknowledged + GRANTS_ROOM:
            frame = self._grants(room, at_least_one)
        elif sent.nbytes <= self.limits.max_unacknowledged:
            frame = self._outbox.next_frame(room, at_least_one=at_least_one)
        else:
            return None
        if frame is not None:
            sent.keep(frame)
        return frame

    def _grants(self, room: int, at_least_one: bool) -> Frame | None:
        most = max(credits_in(room), int(at_least_one))
        if not most:
            return None
        frame = encode_credits(self._windows.grants(most))
        return Frame(len(frame), (frame,))

    def _hello(self) -> bytes:
        self._hello_due = False
        self._acknowledged = self._received
        return greet(self.role, self._software, self.limits, self._received)

    # --- receiving ----------------------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What a websocket binary message tells. Raises ``WireError``; see the module on what follows then."""
        if self.state not in (State.OPENING, State.ESTABLISHED):
            raise SessionEnded(f"the connection is over ({self.state.name.lower()}), nothing can be received on it")
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
            self._outbox = Outbox(self.limits)  # what they kept is of no more use
            self._sent = Unacknowledged()
            self._assembly = Assembly(self.limits, views=self._views)

    def _receive(self, data: bytes | bytearray | memoryview, events: list[Event]) -> None:
        size = len(data)
        if size > self.limits.max_websocket_message:
            raise LimitExceeded("a websocket message in bytes", size, self.limits.max_websocket_message, resumable=True)
        if not isinstance(data, bytes):
            data = bytes(data)
        if self.state is State.OPENING:
            self._receive_hello(data, events)
            return
        kind = data[0] if data else 0
        if kind == FRAMES:
            ack, first = read_frames_header(data)
            self._sent.acknowledge(ack)
            self._receive_frames(data, first, events)
        elif kind == ACK:
            self._sent.acknowledge(read_ack(data))
        elif kind == HELLO:
            raise ProtocolError("a second hello on one connection", resumable=True)
        else:
            raise ProtocolError(f"a websocket message of unknown type {kind} ({size} bytes)", resumable=True)

    def _receive_hello(self, data: bytes, events: list[Event]) -> None:
        hello = read_greeting(data, self.role, self._software, self._sent, self.peer)
        if self._eager:
            self._sent.acknowledge(hello.received)
        else:
            self._sent.rewind(hello.received)
        resumed = self.peer is not None
        if not resumed:
            self._outbox.peer_allows(hello.limits)
        self._eager = False
        self.peer = hello
        self.state = State.ESTABLISHED
        events.append(Established(hello, resumed))

    def _receive_frames(self, data: bytes, first: int, events: list[Event]) -> None:
        expected = self._received + 1
        if self._next_number and first != self._next_number:
            raise ProtocolError(
                f"frame {first} came after frame {self._next_number - 1} on one connection", resumable=True
            )
        if not 0 < first <= expected:
            raise ProtocolError(f"frame {first} came where frame {expected} was expected", resumable=True)
        end = len(data)
        at = MESSAGE_HEADER_BYTES
        if at == end:
            raise ProtocolError("a message of frames without a frame", resumable=True)
        number = first
        while at < end:
            if end - at < FRAME_HEADER_BYTES:
                raise ProtocolError(f"frame {number} is cut short: {end - at} bytes of its header", resumable=True)
            flags, stream, length = read_frame_header(data, at)
            at += FRAME_HEADER_BYTES
            if length > self.limits.max_frame:
                raise LimitExceeded("a frame in bytes", length, self.limits.max_frame, resumable=True)
            if end - at < length:
                raise ProtocolError(f"frame {number} is cut short: {end - at} of {length} bytes", resumable=True)
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
            raise ProtocolError(f"an empty frame on stream {stream}")
        if flags > FIRST | LAST:
            raise ProtocolError(f"a frame of unknown type {flags} on stream {stream}")
        self._windows.take(stream, end - start)
        whole = self._assembly.receive(flags, stream, data, start, end)
        if whole is not None:
            events.append(self._message(stream, whole))

    def _message(self, stream: int, whole: Whole) -> MessageReceived:
        self._messages_received += 1
        message = MessageReceived(whole.header, whole.buffers, stream, whole.nbytes)
        if stream in self._manual_set or (self._manual is not None and self._manual(stream)):
            self._windows.hold(stream, whole.nbytes)
            message.held = whole.nbytes
        return message

    # --- flow ---------------------------------------------------------------------------------------------

    def manual(self, stream: int) -> None:
        """From now on messages of ``stream`` keep their credit until ``consume``."""
        self._manual_set.add(stream)

    def automatic(self, stream: int) -> None:
        """Takes ``manual`` back. Messages already delivered still want their ``consume``."""
        self._manual_set.discard(stream)

    def consume(self, message: MessageReceived) -> None:
        """The application is done with ``message``: its credit may go back. Needless calls do nothing."""
        held, message.held = message.held, 0
        if held:
            self._windows.release(message.stream, held)

    def acknowledge(self) -> None:
        """Lets the next ``data_to_send`` acknowledge what has come, even where nothing else is to be sent."""
        self._ack_now = self.ack_due

    @property
    def ack_due(self) -> bool:
        """Something has come that this connection has not acknowledged. Within 50 ms: ``acknowledge``, and send."""
        return self._received > self._acknowledged and self.state is State.ESTABLISHED

    @property
    def queued_bytes(self) -> int:
        """Bytes taken by ``send`` and not sent. They are the caller's to bound: the session takes what it is given."""
        return self._outbox.nbytes

    @property
    def queued_small_bytes(self) -> int:
        """Of ``queued_bytes``, those of messages up to ``limits.small_message``: large ones do not hold them up."""
        return self._outbox.small_nbytes

    def queued_on(self, stream: int) -> int:
        """Of ``queued_bytes``, those of one stream."""
        return self._outbox.queued_on(stream)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not acknowledged."""
        return self._sent.nbytes

    def statistics(self) -> Statistics:
        return Statistics(
            connections=self._connections,
            frames_sent=self._sent.last,
            frames_acknowledged=self._sent.acknowledged,
            frames_replayed=self._replayed,
            frames_received=self._received,
            frames_dropped=self._dropped,
            messages_sent=self._messages_sent,
            messages_received=self._messages_received,
            queued_bytes=self._outbox.nbytes,
            unacknowledged_bytes=self._sent.nbytes,
            unacknowledged_frames=len(self._sent),
            unfinished_messages=len(self._assembly),
            unfinished_bytes=self._assembly.nbytes,
            streams_sending=self._outbox.streams,
            streams_receiving=len(self._windows),
        )

    def validate_state(self) -> None:
        """Asserts what holds between any two calls. For tests: it looks at everything that is kept."""
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

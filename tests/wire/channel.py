"""Two sessions and what lies between them: websocket messages in flight, which arrive, wait or are lost.

Nothing happens by itself: a test moves bytes from a session into flight, and from flight to the other session, and
cuts. ``check_sessions`` asserts the invariants of every session made here since it was last called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from meshgate_wire import Established, Event, Fragments, Limits, MessageReceived, Role, Session
from meshgate_wire.messages import Done, Header

KIB = 1024
MIB = 1024 * KIB

_made: list[Session] = []
PATTERN = 251 * 4096
_BYTES = bytes(range(251)) * 4097


def check_sessions() -> None:
    for session in _made:
        session.validate_state()
    _made.clear()


def session(role: Role, *, manual: Any = None, **limits: int) -> Session:
    made = Session(role, limits=Limits(**limits), manual_streams=manual)
    _made.append(made)
    return made


def client(**options: Any) -> Session:
    return session(Role.CLIENT, **options)


def gateway(**options: Any) -> Session:
    return session(Role.GATEWAY, **options)


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that say by themselves which ``seed`` they are of."""
    start = seed * 7 % 251
    whole, rest = divmod(size, PATTERN)
    return _BYTES[start : start + PATTERN] * whole + _BYTES[start : start + rest]


def next_message(sender: Session, budget: int = 257 * KIB) -> bytes:
    """The next websocket message of ``sender``, empty when there is none."""
    return b"".join(sender.data_to_send(budget))


def drain(sender: Session) -> list[bytes]:
    """Every websocket message that ``sender`` has to send now."""
    return list(iter(lambda: next_message(sender), b""))


def messages(events: Sequence[Event]) -> list[MessageReceived]:
    return [event for event in events if isinstance(event, MessageReceived)]


def numbers(events: Sequence[Event]) -> list[int]:
    """Which ``Done`` messages came, in order."""
    return [event.header.call for event in messages(events) if isinstance(event.header, Done)]


def send_done(sender: Session, number: int, *sizes: int, stream: int = 1) -> None:
    """Sends message ``number`` with buffers of ``sizes``."""
    sender.send(Done(call=number), [pattern(size, number + at) for at, size in enumerate(sizes)], stream=stream)


def content(message: MessageReceived) -> tuple[Header, list[bytes]]:
    assert all(isinstance(buffer, Fragments) for buffer in message.buffers)
    return message.header, [buffer.join() for buffer in message.buffers]


class Side:
    """One session, what is on its way to the other one, and what it has received."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.in_flight: deque[bytes] = deque()
        self.events: list[Event] = []

    @property
    def received(self) -> list[MessageReceived]:
        return messages(self.events)

    @property
    def established(self) -> list[Established]:
        return [event for event in self.events if isinstance(event, Established)]


class Channel:
    """A client and a gateway, and one connection at a time."""

    def __init__(self, client: Session, gateway: Session) -> None:
        self.client = Side(client)
        self.gateway = Side(gateway)
        self.sides = (self.client, self.gateway)
        self.up = False

    def dial(self) -> None:
        self.up = True
        for side in self.sides:
            side.session.connection_made()

    def cut(self) -> None:
        """What is in flight is lost, and both sides are told."""
        self.up = False
        for side in self.sides:
            side.in_flight.clear()
            side.session.connection_lost()

    def other(self, side: Side) -> Side:
        return self.gateway if side is self.client else self.client

    def write(self, side: Side, budget: int = 257 * KIB) -> bool:
        """Puts the next websocket message of ``side`` in flight."""
        message = next_message(side.session, budget)
        if message:
            side.in_flight.append(message)
        return bool(message)

    def deliver(self, side: Side) -> bool:
        """Hands the oldest message of ``side`` in flight to the other side."""
        if not side.in_flight:
            return False
        receiver = self.other(side)
        receiver.events += receiver.session.receive_data(side.in_flight.popleft())
        return True

    def settle(self, *, acknowledge: bool = True) -> None:
        """Moves everything there is until nothing moves; with ``acknowledge`` the timers fire as well."""
        moved = True
        while moved:
            moved = False
            for side in self.sides:
                moved |= self.write(side) or self.deliver(side)
            if not moved and acknowledge:
                for side in self.sides:
                    side.session.acknowledge()
                    moved |= self.write(side)


def connected(client: Session, gateway: Session) -> Channel:
    """A channel whose sides have greeted each other."""
    channel = Channel(client, gateway)
    channel.dial()
    channel.settle()
    return channel

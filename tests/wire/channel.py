"""Two sessions and the websocket messages in flight between them, which arrive, wait or are lost.

Nothing happens automatically: a test writes messages of a session, delivers them to the other session, and cuts the
connection. ``check_sessions`` asserts the invariants of every session created here since the last call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from meshgate_wire import Established, Event, Fragments, Limits, MessageReceived, Role, Session
from meshgate_wire.messages import Done, Header

KIB = 1024
MIB = 1024 * KIB

_created: list[Session] = []
PATTERN = 251 * 4096
_BYTES = bytes(range(251)) * 4097


def check_sessions() -> None:
    for session in _created:
        session.validate_state()
    _created.clear()


def session(role: Role, *, manual: Iterable[int] = (), **limits: int) -> Session:
    new = Session(role, limits=Limits(**limits))
    for stream in manual:
        new.manual(stream)
    _created.append(new)
    return new


def client(**options: Any) -> Session:
    return session(Role.CLIENT, **options)


def gateway(**options: Any) -> Session:
    return session(Role.GATEWAY, **options)


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that depend on ``seed``."""
    start = seed * 7 % 251
    count, remainder = divmod(size, PATTERN)
    return _BYTES[start : start + PATTERN] * count + _BYTES[start : start + remainder]


def next_message(sender: Session, budget: int = 257 * KIB) -> bytes:
    """The next websocket message of ``sender``, or empty."""
    return b"".join(sender.data_to_send(budget))


def drain(sender: Session) -> list[bytes]:
    """All websocket messages that ``sender`` can send now."""
    return list(iter(lambda: next_message(sender), b""))


def messages(events: Sequence[Event]) -> list[MessageReceived]:
    return [event for event in events if isinstance(event, MessageReceived)]


def numbers(events: Sequence[Event]) -> list[int]:
    """The numbers of the received ``Done`` messages, in order."""
    return [event.header.call for event in messages(events) if isinstance(event.header, Done)]


def send_done(sender: Session, number: int, *sizes: int, stream: int = 1) -> None:
    """Sends message ``number`` with buffers of ``sizes``."""
    sender.send(Done(call=number), [pattern(size, number + at) for at, size in enumerate(sizes)], stream=stream)


def content(message: MessageReceived) -> tuple[Header, list[bytes]]:
    assert all(isinstance(buffer, Fragments) for buffer in message.buffers)
    return message.header, [buffer.join() for buffer in message.buffers]


class Side:
    """One session, its messages in flight to the other one, and the events that it returned."""

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
        """Loses the messages in flight and notifies both sides."""
        self.up = False
        for side in self.sides:
            side.in_flight.clear()
            side.session.connection_lost()

    def other(self, side: Side) -> Side:
        return self.gateway if side is self.client else self.client

    def write(self, side: Side, budget: int = 257 * KIB) -> bool:
        """Puts the next websocket message of ``side`` into flight."""
        message = next_message(side.session, budget)
        if message:
            side.in_flight.append(message)
        return bool(message)

    def deliver(self, side: Side) -> bool:
        """Delivers the oldest message in flight of ``side`` to the other side."""
        if not side.in_flight:
            return False
        receiver = self.other(side)
        receiver.events += receiver.session.receive_data(side.in_flight.popleft())
        return True

    def settle(self, *, acknowledge: bool = True) -> None:
        """Writes and delivers until nothing is left; with ``acknowledge``, also the delayed acknowledgements."""
        active = True
        while active:
            active = False
            for side in self.sides:
                active |= self.write(side) or self.deliver(side)
            if not active and acknowledge:
                for side in self.sides:
                    side.session.acknowledge()
                    active |= self.write(side)


def connected(client: Session, gateway: Session) -> Channel:
    """A channel with an established connection."""
    channel = Channel(client, gateway)
    channel.dial()
    channel.settle()
    return channel

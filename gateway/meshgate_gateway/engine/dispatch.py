"""Gives each message to the part that handles it, in order within a stream.

A message that must wait (for an object that is not created yet) holds up its own stream only. The messages behind it
keep their flow-control credit until it is their turn. So do the messages of a client that sends faster than they can be
handled: the end of the session does not wait behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from meshgate_gateway.engine.detached.ledger import Ledger
from meshgate_gateway.engine.failures import FailureReports, invalid
from meshgate_gateway.engine.interfaces import Handler, StartTask
from meshgate_wire import Fragments, MessageReceived, Session
from meshgate_wire.messages import Call, CancelCall, Header, NameKept, PortSend, Returned, SendTo

TURN = 256  # calls that are handled in one turn of the event loop before what else has arrived is read
_FLOODS = (Call, SendTo, PortSend)  # the others are recorded at once: a takeover must find what was created
# When they are handled: a later holder need not know of those that flood, and a name may be released by then.
_UNRECORDED = (*_FLOODS, NameKept)


@dataclass(slots=True)
class _Lane:
    """A stream that waits: until the message ``first`` has been handled or, if it is None, for the next turn of the
    event loop. ``queue`` is what follows in the stream, until it is handled: messages, and callbacks between them."""

    first: Header | None
    queue: deque[MessageReceived | Callable[[], object]]


class Dispatch:
    """``session()`` is the present wire session. ``flush_soon`` is called after a message that had to wait: its credit
    is returned. ``notice(text)`` shows the user a line. ``flush_calls`` is called before a message that is not a call:
    it must not overtake calls that are collected."""

    def __init__(
        self,
        session: Callable[[], Session],
        failures: FailureReports,
        *,
        start_task: StartTask,
        ledger: Ledger,
        flush_soon: Callable[[], object],
        notice: Callable[[str], object],
        flush_calls: Callable[[], object] = lambda: None,
    ) -> None:
        self._session, self._failures, self._start_task = session, failures, start_task
        self._ledger, self._flush_soon, self._notice = ledger, flush_soon, notice
        self._flush_calls = flush_calls
        self._handlers: dict[type, Handler] = {}
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, _Lane] = {}  # the streams that wait
        self._handled = 0  # of those that flood, in this turn of the event loop
        self._closed = False

    def add(self, *tables: Mapping[type, Handler]) -> None:
        for table in tables:
            self._handlers.update(table)

    def close(self) -> None:
        """The session ends: drops what queues, and what arrives from now on."""
        self._closed = True

    def received(self, message: MessageReceived) -> None:
        if self._closed:
            return
        if self._ledger.active:
            self._ledger.received(message.header)
        if isinstance(message.header, NameKept):  # the next holder gets the values, whatever the stream waits for
            self._ledger.record(message.header)
        lane = self._lanes.get(message.stream)
        if lane is not None:
            if isinstance(message.header, CancelCall):  # of a call that may be what the stream waits for
                self._handle(message)
                self._session().consume(message)
                return
            lane.queue.append(message)
            return
        if isinstance(message.header, _FLOODS):
            if not self._handled:
                self._loop.call_soon(self._begin_turn)
            self._handled += 1
            if self._handled > TURN:
                self._open_lane(message.stream, None, asyncio.sleep(0), message)
                return
        if (waiting := self._handle(message)) is not None:
            self._open_lane(message.stream, message.header, self._failures.guard(message.header, waiting))

    def _begin_turn(self) -> None:
        self._handled = 0

    def _open_lane(
        self, stream: int, first: Header | None, waiting: Awaitable[None], *messages: MessageReceived
    ) -> None:
        self._lanes[stream] = _Lane(first, deque(messages))
        self._session().manual(stream)
        self._start_task(self._drain(stream, waiting))

    async def _drain(self, stream: int, waiting: Awaitable[None]) -> None:
        """Handles the messages that queue up in a stream behind what waits."""
        lane = self._lanes[stream]
        await waiting
        lane.first = None
        handled = 0
        while lane.queue and not self._closed:
            following = lane.queue[0]
            if not isinstance(following, MessageReceived):
                lane.queue.popleft()
                following()
                continue
            again = self._handle(following)
            if again is not None:
                await self._failures.guard(following.header, again)
            lane.queue.popleft()
            self._session().consume(following)
            self._flush_soon()
            handled += 1
            if not handled % TURN:
                await asyncio.sleep(0)
        self._session().automatic(stream)
        del self._lanes[stream]

    def _handle(self, message: MessageReceived) -> Awaitable[None] | None:
        header = message.header
        try:
            if not isinstance(header, Call):
                self._flush_calls()
            if not isinstance(header, _UNRECORDED):
                self._ledger.record(header)
            if message.refused:
                self._refuse(header, message.refused)
            return self._handlers.get(type(header), _unexpected)(header, message.buffers)
        except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
            self._failures.report(header, error)
            return None

    def _refuse(self, header: Header, reason: str) -> NoReturn:
        """Raises RequestFailed. Notifies the user, too, if nothing waits for the request."""
        awaited = getattr(header, "call", None) is not None and getattr(header, "adverb", "") != "broadcast"
        if isinstance(header, Returned):
            self._notice(f"a result of {header.request.endpoint} is not kept for the next program: {reason}")
        elif not awaited and getattr(header, "object", None) is None:
            self._notice(f"a message to {getattr(header, 'endpoint', 'a channel')} was dropped: {reason}")
        raise invalid(reason)

    def waiting(self) -> Iterator[tuple[int, Header]]:
        """The messages that have arrived and are not handled yet, each with its stream, in the order of the stream."""
        for stream, lane in self._lanes.items():
            if lane.first is not None:
                yield stream, lane.first
            yield from ((stream, each.header) for each in lane.queue if isinstance(each, MessageReceived))

    def call_after(self, stream: int, callback: Callable[[], object]) -> None:
        """Calls ``callback`` when what waits in the stream at present has been handled."""
        self._lanes[stream].queue.append(callback)

    def session_replaced(self) -> None:
        """Another wire session continues: what queues here was received by the previous one, with its credit."""
        for stream, lane in self._lanes.items():
            self._session().manual(stream)
            for message in lane.queue:
                if isinstance(message, MessageReceived):
                    message.held = 0


def _unexpected(header: Header, buffers: Sequence[Fragments]) -> None:
    raise invalid(f"a gateway does not accept {type(header).__name__} messages")

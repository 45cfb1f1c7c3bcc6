"""Gives each message to the part that handles it, in order within a stream.

A message that must wait (for an object that is not created yet) holds up its own stream only. The messages behind it
keep their flow-control credit until it is their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from meshgate_gateway.engine.failures import FailureReports, invalid
from meshgate_gateway.engine.interfaces import Handler, StartTask
from meshgate_wire import Fragments, MessageReceived, Session
from meshgate_wire.messages import Call, Header

__all__ = ["Dispatch"]


class Dispatch:
    """``session()`` is the present wire session. ``about_to_handle`` is called with each message whose turn it is, and
    ``flush_soon`` after one that had to wait: its credit is returned."""

    def __init__(
        self,
        session: Callable[[], Session],
        failures: FailureReports,
        *,
        start_task: StartTask,
        about_to_handle: Callable[[Header], object],
        flush_soon: Callable[[], object],
    ) -> None:
        self._session, self._failures, self._start_task = session, failures, start_task
        self._about_to_handle, self._flush_soon = about_to_handle, flush_soon
        self._handlers: dict[type, Handler] = {}
        self._lanes: dict[int, deque[MessageReceived]] = {}  # what queues in the streams that wait

    def add(self, *tables: Mapping[type, Handler]) -> None:
        for table in tables:
            self._handlers.update(table)

    def received(self, message: MessageReceived) -> None:
        lane = self._lanes.get(message.stream)
        if lane is not None:
            lane.append(message)
            return
        waiting = self._handle(message)
        if waiting is not None:
            self._lanes[message.stream] = deque()
            self._session().manual(message.stream)
            self._start_task(self._drain(message, waiting))

    async def _drain(self, message: MessageReceived, waiting: Awaitable[None]) -> None:
        """Handles the messages that queue up in a stream behind one that waits."""
        lane = self._lanes[message.stream]
        await self._failures.guard(message.header, waiting)
        while lane:
            following = lane.popleft()
            again = self._handle(following)
            if again is not None:
                await self._failures.guard(following.header, again)
            self._session().consume(following)
            self._flush_soon()
        self._session().automatic(message.stream)
        del self._lanes[message.stream]

    def _handle(self, message: MessageReceived) -> Awaitable[None] | None:
        header = message.header
        try:
            self._about_to_handle(header)
            return self._handlers.get(type(header), _unexpected)(header, message.buffers)
        except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
            self._failures.report(header, error)
            return None

    def waiting_calls(self) -> Iterator[Call]:
        """The calls that queue behind a message that waits."""
        headers = (message.header for lane in self._lanes.values() for message in lane)
        return (header for header in headers if isinstance(header, Call))

    def session_replaced(self) -> None:
        """Another wire session continues: what queues here was received by the previous one, with its credit."""
        for stream, lane in self._lanes.items():
            self._session().manual(stream)
            for message in lane:
                message.held = 0


def _unexpected(header: Header, buffers: Sequence[Fragments]) -> None:
    raise invalid(f"a gateway does not accept {type(header).__name__} messages")

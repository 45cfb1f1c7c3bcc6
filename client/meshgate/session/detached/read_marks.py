"""Collects what the program has read of a detached session, for one message to the gateway now and then."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshgate.session.futures import FutureProxy
from meshgate_wire.messages import Read

MAX_CALLS = 10_000  # in one message


class ReadMarks:
    """Any thread, and finalizers, may mark: nothing here takes a lock. ``due()`` is called after the first mark since
    ``take``."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._pending = False
        self._read: deque[int] = deque()
        self._released: deque[int] = deque()
        self._messages: deque[tuple[int, int]] = deque()  # channel and number of messages that were read
        self._unread: dict[int, int] = {}  # channel to the first message that was not read; of the connection's thread
        self._read_early: dict[int, set[int]] = {}  # channel to messages behind that one; of the same thread
        self._line: int | None = None
        self._fault: int | None = None

    def watch_call(self, number: int, futures: Sequence[FutureProxy[Any]]) -> None:
        """Marks call ``number`` once all of ``futures`` have been read, or the program has dropped the last of them."""
        left = [number] * len(futures)  # not the futures, which would keep each other alive

        def observed() -> None:
            left.pop()
            if not left:
                self.call_read(number)

        for future in futures:
            future.when_read(observed)
        weakref.finalize(futures[-1], self._call_released, number).atexit = False

    def call_read(self, number: int) -> None:
        self._read.append(number)
        self._mark()

    def _call_released(self, number: int) -> None:
        self._released.append(number)
        self._mark()

    def message_arrived(self, port: int, number: int) -> None:
        """A message of channel ``port`` has arrived. To be called in the order of their numbers."""
        self._unread.setdefault(port, number)

    def watch_message(self, port: int, number: int, future: FutureProxy[Any]) -> None:
        """Marks a message once ``future`` has been read. It is not settled yet."""
        future.when_read(lambda: self._message_read(port, number))

    def _message_read(self, port: int, number: int) -> None:
        self._messages.append((port, number))
        self._mark()

    def _ports_read(self) -> dict[int, int]:
        """The last message of each channel up to which all were read, if it has changed."""
        ports: dict[int, int] = {}
        for _ in range(len(self._messages)):
            port, number = self._messages.popleft()
            early = self._read_early.setdefault(port, set())
            early.add(number)
            while (unread := self._unread[port]) in early:
                early.remove(unread)
                ports[port] = unread
                self._unread[port] = unread + 1
        return ports

    def printed(self, last_line: int) -> None:
        self._line = last_line
        self._mark()

    def fault_reported(self, number: int) -> None:
        self._fault = number
        self._mark()

    def _mark(self) -> None:
        if not self._pending:
            self._pending = True
            self._due()

    def take(self) -> Read | None:
        """What was marked since the last time. For the connection's thread."""
        self._pending = False
        calls, released = _taken(self._read), _taken(self._released)
        ports = self._ports_read()
        line, self._line = self._line, None
        fault, self._fault = self._fault, None
        if self._read or self._released:
            self._mark()
        if not (calls or released or ports) and line is None and fault is None:
            return None
        return Read(calls=calls, released=released, ports=ports, output=line, faults=fault)


def _taken(marks: deque[int]) -> tuple[int, ...]:
    return tuple(marks.popleft() for _ in range(min(len(marks), MAX_CALLS)))

"""Lets the processes that send to channels wait while too much of what they sent is unread.

Monarch keeps the messages of a port in the engine's memory until they are read, however many. Processes report what
they send, a chunk at a time, and send no more while their reports are not answered (``on_worker/ports.py``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from meshgate_gateway.engine.interfaces import Answer, CallLater

MEMORY = int(os.environ.get("MESHGATE_CHANNEL_MEMORY") or 2**30)
"""Bytes of unread messages in the engine, of all channels, above which the processes that sent them wait."""
LOOK_INTERVAL = 10.0  # seconds in which no message is read: the user is warned, or they are lost


@dataclass(slots=True, eq=False)
class _Report:
    last: int  # which message of the port its last one is, if all that was reported arrives in order
    nbytes: int
    answer: Answer | None  # until it is answered


@dataclass(slots=True, eq=False)
class _Port:
    reports: deque[_Report] = field(default_factory=deque)  # that have unread messages
    read: int = 0
    reported: int = 0
    bytes_read: int = 0
    bytes_reported: int = 0
    reading: bool = True
    watched: bool = False

    @property
    def factor(self) -> float:
        return max(1.0, self.bytes_read / self.bytes_reported) if self.bytes_reported else 1.0


class Backlog:
    """``warn(text)`` warns the user. Ports have names, which processes and the engine agree on.

    Some messages are read before they are reported, and others are never reported: the number of messages that were
    read raises the number of those that were reported. So a report counts as read late, by at most what processes have
    not reported yet.
    """

    def __init__(self, call_later: CallLater, warn: Callable[[str], object], limit: int = MEMORY) -> None:
        self._call_later, self._warn, self._limit = call_later, warn, limit
        self._ports: dict[str, _Port] = {}
        self._unread = 0.0
        self._warned = False

    def opened(self, name: str) -> None:
        self._ports[name] = _Port()

    def closed(self, name: str) -> None:
        """Releases the processes that wait."""
        port = self._ports.pop(name, None)
        if port is not None:
            self._forget(port, closed=True)

    def reported(self, name: str, messages: int, nbytes: int, answer: Answer) -> None:
        """A process has sent these messages. Ports for replies, which belong to no channel, are always read."""
        port = self._ports.get(name)
        if port is None:
            answer(False, 1.0)
            return
        port.reported += messages
        port.bytes_reported += nbytes
        port.reports.append(_Report(port.reported, nbytes, answer))
        self._unread += nbytes
        self._answer(port)
        if port.reports and port.reports[-1].answer is not None and not port.watched:
            self._watch(name, port)

    def read(self, name: str, nbytes: int) -> None:
        """A message of the port was read."""
        port = self._ports.get(name)
        if port is None:
            return
        port.read += 1
        port.bytes_read += nbytes
        port.reported = max(port.reported, port.read)
        if port.reports and port.reports[0].last <= port.read:
            self._drop_first(port, closed=False)
            for each in self._ports.values():
                self._answer(each)

    def reading(self, name: str, reading: bool) -> None:
        """Whether the port is being read, or messages stay in it."""
        if (port := self._ports.get(name)) is not None:
            port.reading = reading

    def _answer(self, port: _Port) -> None:
        """Answers reports while there is space."""
        for report in port.reports:
            if self._unread > self._limit:
                return
            if report.answer is not None:
                report.answer(False, port.factor)
                report.answer = None

    def _drop_first(self, port: _Port, *, closed: bool) -> None:
        report = port.reports.popleft()
        self._unread -= report.nbytes
        self._warned = self._warned and self._unread > self._limit / 2
        if report.answer is not None:
            report.answer(closed, port.factor)

    def _forget(self, port: _Port, *, closed: bool) -> None:
        port.reported = port.read
        while port.reports:
            self._drop_first(port, closed=closed)

    def _watch(self, name: str, port: _Port) -> None:
        """While a process waits. The messages of one that was killed may never arrive: others do not wait for them."""
        port.watched, read = True, port.read

        def look() -> None:
            port.watched = False
            if self._ports.get(name) is not port or not port.reports or port.reports[-1].answer is None:
                return
            if port.read == read and port.reading:
                self._forget(port, closed=False)
                return
            if port.read == read:
                self._warn_once()
            self._watch(name, port)

        self._call_later(LOOK_INTERVAL, look)

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"actors that send to channels wait: {self._unread / 1e6:.0f} MB of messages have not been received. "
                "Receive them, or close the channel"
            )

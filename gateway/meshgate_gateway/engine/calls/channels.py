"""Channels of a session: what actors send to a port reaches the client, and vice versa.

While too many bytes of a channel wait to be sent to the client, its port is not read: messages stay in the port's queue
and hold up nothing else of the session. Monarch keeps that queue in the engine's memory, however long it is. So
processes report what they send, a chunk at a time, and send no more while their reports are not answered
(``on_worker/ports.py``); they are not answered while too much is unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshgate_gateway.engine.calls.kept_values import KeptValues
from meshgate_gateway.engine.failures import failure_of
from meshgate_gateway.engine.interfaces import Answer, CallLater, Handler, Send, StartTask
from meshgate_gateway.engine.monarch.interface import CallSender, PortSender
from meshgate_gateway.engine.objects.records import Channel
from meshgate_gateway.engine.objects.table import KeptArgument, Lookup, ObjectTable, choose
from meshgate_wire import Fragments, MessageTooLarge
from meshgate_wire.messages import Adopted, OpenChannel, PortMessage, PortSend, SendTo, stream_of

MEMORY = int(os.environ.get("MESHGATE_CHANNEL_MEMORY") or 2**30)
"""Bytes of unread messages in the engine, of all channels, above which the processes that sent them wait."""
LOOK_INTERVAL = 10.0  # seconds in which no message is read: the user is warned, or they are lost
MAX_QUEUED = 4 * 2**20  # bytes per channel that wait to be sent, above which its port is not read


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


class ChannelPorts(CallSender, PortSender, Protocol):
    """What channels need of Monarch."""


class Channels:
    """The channels of a session. ``queued(stream)`` returns how many bytes wait to be sent to the client. ``paused`` is
    called when a channel's port is not read because of that: from then on, ``resume`` must be called until none of them
    is ``full``. ``backlog`` makes senders wait. ``notice(text)`` shows the user a line."""

    def __init__(
        self,
        objects: ObjectTable,
        lookup: Lookup,
        monarch: ChannelPorts,
        send: Send,
        backlog: Backlog,
        *,
        queued: Callable[[int], int],
        paused: Callable[[], object],
        start_task: StartTask,
        kept: KeptValues,
        notice: Callable[[str], object],
    ) -> None:
        self._objects, self._lookup, self._monarch = objects, lookup, monarch
        self._send_message, self._queued, self._start_task = send, queued, start_task
        self._backlog, self._paused, self._kept, self._notice = backlog, paused, kept, notice
        self.full: dict[int, asyncio.Future[None]] = {}  # by stream, of the channels whose port is not read

    def handlers(self) -> Mapping[type, Handler]:
        return {OpenChannel: self._open, PortSend: self._send, SendTo: self._send_to}

    def _open(self, header: OpenChannel, buffers: Sequence[Fragments]) -> None:
        port, receiver = self._monarch.open_port()
        channel = Channel(port)
        self._objects.add(header.object, channel)
        name = self._monarch.port_name(port)
        self._backlog.opened(name)
        channel.reader = self._start_task(self._read(header.object, name, receiver, header.once))
        channel.reader.add_done_callback(lambda _: self._backlog.closed(name))

    def resume(self) -> None:
        """Resumes reading the ports of channels that are below their limit again. Call it after bytes were sent."""
        for stream, below_limit in self.full.items():
            if not below_limit.done() and not self._is_full(stream):
                below_limit.set_result(None)

    def _is_full(self, stream: int) -> bool:
        return self._queued(stream) >= MAX_QUEUED

    async def _wait_below_limit(self, stream: int) -> None:
        below_limit = self.full[stream] = asyncio.get_running_loop().create_future()
        self._paused()
        try:
            await below_limit
        finally:
            self.full.pop(stream, None)

    async def _read(self, number: int, name: str, receiver: Any, once: bool) -> None:
        stream = stream_of(number)
        while True:
            receiving = self._monarch.receive(receiver)
            try:
                reply = self._monarch.reply_of(await receiving)
            finally:
                if receiving.cancelled():
                    self._monarch.close(receiver)
            references = Adopted(objects=tuple(self._objects.add_reference(mesh) for mesh in reply.references))
            message = PortMessage(port=number, rank=reply.rank, exception=reply.exception, objects=references)
            try:
                self._send_message(message, (reply.data,), stream=stream)
            except MessageTooLarge as error:
                self._notice(f"a message to a channel was not sent: {error}")
            self._backlog.read(name, len(reply.data))
            if once:
                return
            if self._is_full(stream):
                self._backlog.reading(name, False)
                await self._wait_below_limit(stream)
                self._backlog.reading(name, True)

    async def _send(self, header: PortSend, buffers: Sequence[Fragments]) -> None:
        channel = await self._lookup.channel(header.port)
        objects = await self._lookup.arguments(header.arguments)
        if any(isinstance(each, KeptArgument) for each in objects):
            with self._noticed("a message to a channel"):
                await self._kept.send(channel.port, buffers, objects)
            return
        payload = self._lookup.payload(buffers, objects)
        self._monarch.send_to_port(channel.port, payload, return_undeliverable=header.return_undeliverable)

    async def _send_to(self, header: SendTo, buffers: Sequence[Fragments]) -> None:
        target = await self._objects.wait(header.target.object)
        channel = await self._lookup.channel(header.port)
        objects: Sequence[Any] = await self._lookup.arguments(header.arguments)
        mesh, actors, ranks = self._lookup.actors(target, header.target)
        chosen = choose(mesh, ranks) if header.selection == "choose" else None
        if any(isinstance(each, KeptArgument) for each in objects):
            with self._noticed(f"a message to {mesh.name}.{header.endpoint}"):
                objects = await self._kept.deliver_cast(mesh, header.endpoint, header.target, objects, chosen)
        payload = self._lookup.payload(buffers, objects)
        if chosen is not None:
            actors, payload = self._lookup.one_actor(mesh, header.target, ranks[chosen], chosen, payload)
        self._monarch.cast(actors, header.endpoint, header.explicit_port, payload, channel.port)

    @contextlib.contextmanager
    def _noticed(self, what: str) -> Iterator[None]:
        """Tells the user why a message with kept values is not sent: no call fails with that."""
        try:
            yield
        except Exception as error:
            self._notice(f"{what} was not sent: {failure_of(error).message}")
            raise

    def close(self) -> None:
        for known in self._objects.values():
            if isinstance(known, Channel):
                known.stop_reading()

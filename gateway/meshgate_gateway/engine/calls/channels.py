"""Channels of a session: what actors send to a port reaches the client, and vice versa.

While too many bytes of a channel wait to be sent to the client, its port is not read: messages stay in the port's queue
and hold up nothing else of the session. If that queue is too large, senders wait (``backlog.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from meshgate_gateway.engine.calls.backlog import Backlog
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.interfaces import Handler, Send, StartTask
from meshgate_gateway.engine.monarch.interface import CallSender, PortSender
from meshgate_gateway.engine.objects.records import ActorMesh, Channel
from meshgate_gateway.engine.objects.table import KeptArgument, Lookup, ObjectTable, choose
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, MeshRef, OpenChannel, PortMessage, PortSend, SendTo, stream_of

MAX_QUEUED = 4 * 2**20  # bytes per channel that wait to be sent, above which its port is not read


class ChannelPorts(CallSender, PortSender, Protocol):
    """What channels need of Monarch."""


class KeptMessages(Protocol):
    """What channels need of values that stay in the cluster; ``kept_values.KeptValues``."""

    async def send(self, port: Any, buffers: Sequence[Fragments], arguments: Sequence[Any]) -> None: ...

    async def deliver_cast(
        self, mesh: ActorMesh, endpoint: str, ref: MeshRef, arguments: Sequence[Any], chosen: int | None
    ) -> Sequence[Any]: ...


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
        kept: KeptMessages,
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
            reply = self._monarch.reply_of(await self._monarch.receive(receiver))
            references = Adopted(objects=tuple(self._objects.add_reference(mesh) for mesh in reply.references))
            message = PortMessage(port=number, rank=reply.rank, exception=reply.exception, objects=references)
            self._send_message(message, (reply.data,), stream=stream)
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
        except RequestFailed as error:
            self._notice(f"{what} was not sent: {error}")
            raise

    def close(self) -> None:
        for known in self._objects.values():
            if isinstance(known, Channel):
                known.stop_reading()

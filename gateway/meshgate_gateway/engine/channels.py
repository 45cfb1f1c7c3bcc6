"""Channels of a session: what actors send to a port reaches the laptop, and the other way round.

A port is read only while little of its channel waits to be sent: what a slow program does not take stays at the
port, where it goes away with the channel, and holds up nothing else of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshgate_gateway.engine.objects import Channel, invalid
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, OpenChannel, PortMessage, PortSend, Release, SendTo, stream_of

if TYPE_CHECKING:
    from meshgate_gateway.engine.engine import Engine, Handler


QUEUED_OF_A_CHANNEL = 4 * 2**20  # bytes beyond which its port is not read


class Channels:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._full: dict[int, asyncio.Future[None]] = {}  # by stream, of those whose port is not read now

    def handlers(self) -> dict[type, Handler]:
        return {OpenChannel: self._open, PortSend: self._send, SendTo: self._send_to, Release: self._release}

    def _open(self, header: OpenChannel, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        port, receiver = engine.binding.open_port()
        channel = Channel(port, receiver)
        engine.objects.add(header.object, channel)
        channel.reading = engine.start(self._read(header.object, receiver, header.once))

    def regulate(self) -> None:
        """Something has been sent: ports are read on whose channel has room again."""
        for stream, room in self._full.items():
            if not room.done() and self._has_room(stream):
                room.set_result(None)

    def _has_room(self, stream: int) -> bool:
        return self._engine.session.queued_on(stream) < QUEUED_OF_A_CHANNEL

    async def _wait_room(self, stream: int) -> None:
        if not self._has_room(stream):
            room = self._full[stream] = self._engine.loop.create_future()
            try:
                await room
            finally:
                self._full.pop(stream, None)

    async def _read(self, number: int, receiver: Any, once: bool) -> None:
        engine = self._engine
        stream = stream_of(number)
        while True:
            reply = engine.binding.raw_reply(await engine.binding.receive(receiver))
            references = Adopted(objects=tuple(engine.objects.arrived(mesh) for mesh in reply.references))
            message = PortMessage(port=number, rank=reply.rank, exception=reply.exception, objects=references)
            engine.send(message, (reply.data,), stream=stream)
            if once:
                return
            await self._wait_room(stream)

    async def _send(self, header: PortSend, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        channel = await engine.objects.when(header.port)
        if not isinstance(channel, Channel):
            raise invalid(f"object {header.port} is not a port")
        given = await engine.meshes.arguments(header.arguments)
        engine.binding.port_send(channel.port, engine.calling.payload(buffers, given))

    async def _send_to(self, header: SendTo, buffers: Sequence[Fragments]) -> None:
        engine = self._engine
        target, channel = await engine.objects.when(header.target.object), await engine.objects.when(header.port)
        if not isinstance(channel, Channel):
            raise invalid(f"object {header.port} is not a port")
        given = await engine.meshes.arguments(header.arguments)
        _, inner, _ = engine.calling.actors_at(target, header.target)
        payload = engine.calling.payload(buffers, given)
        engine.binding.cast(inner, header.endpoint, header.explicit_port, payload, header.selection, channel.port)

    def _release(self, header: Release, buffers: Sequence[Fragments]) -> None:
        for number in header.objects:
            known = self._engine.objects.known(number)
            if isinstance(known, Channel) and known.reading is not None:
                known.reading.cancel()
            self._engine.lifetimes.release(number)

    def close(self) -> None:
        for known in self._engine.objects.each():
            if isinstance(known, Channel) and known.reading is not None:
                known.reading.cancel()

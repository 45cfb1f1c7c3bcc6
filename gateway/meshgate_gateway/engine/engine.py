"""The engine of one session: what the laptop asks goes to Monarch, what Monarch answers goes back.

Messages of one stream are handled in order; a message that must wait (for an object on its way) holds up its own
stream only, and what waits behind it keeps its credit. A call whose object is there is sent to the actors in the
callback that received it: no task, no queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from websockets.frames import CloseCode

from meshgate_gateway.engine import channels, meshes
from meshgate_gateway.engine.calling import CONTROL, Calling, failure_of
from meshgate_gateway.engine.code import Code
from meshgate_gateway.engine.lifetimes import Lifetimes
from meshgate_gateway.engine.link import Link
from meshgate_gateway.engine.monarch import Binding, Fault
from meshgate_gateway.engine.objects import Objects, invalid
from meshgate_gateway.engine.output import Printed, fold, in_messages
from meshgate_gateway.engine.worker_streams import WorkerStreams
from meshgate_wire import Fragments, MessageReceived, Pump, Session, WireError
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Configure,
    Done,
    EndSession,
    Failed,
    Failure,
    Header,
    Host,
    ObjectFailed,
    Output,
    stream_of,
)

log = logging.getLogger(__name__)

# Bytes of output waiting for the laptop beyond which no more is read from workers, so that who prints more waits:
# little while it listens, much while it is away, for training must not stop because a lid is closed.
QUEUED_OUTPUT = 32 * 2**20
QUEUED_WHILE_AWAY = 512 * 2**20
Handler = Callable[[Any, Sequence[Fragments]], "Awaitable[None] | None"]


class Engine:
    """Everything of one session but its process. All methods run on the loop.

    ``find_hosts(mesh)`` asks the server for a mesh's hosts; ``ended`` is set when the laptop is done for good.
    ``host``: the address at which workers reach this process, where they do not share its machine.
    """

    def __init__(
        self,
        session: Session,
        binding: Binding,
        find_hosts: Callable[[str], Awaitable[Sequence[Host]]],
        on_link: Callable[[bool], None],
        host: str | None = None,
    ) -> None:
        self.session, self.binding, self.find_hosts = session, binding, find_hosts
        self.objects = Objects()
        self.streams = WorkerStreams(self._describe, self._printed, self._process_ended)
        self.meshes = meshes.Meshes(self)
        self.lifetimes = Lifetimes(self)
        self.channels = channels.Channels(self)
        self.code = Code(self, host)
        self.calling = Calling(self.objects, binding, self.meshes.arguments, self.send, self._flush)
        self.ended = asyncio.Event()
        self.end_reason = "the client ended the session"
        self._on_link = on_link
        self._pump: Pump | None = None
        self._link: Link | None = None
        self.loop = asyncio.get_running_loop()
        self._flushing = False
        self._lanes: dict[int, deque[MessageReceived]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream_output = True
        self._handlers: dict[type, Handler] = {
            Call: self.calling.call,
            AttachHosts: self.meshes.attach,
            Configure: self._configure,
            EndSession: self._end,
            **self.meshes.handlers(),
            **self.lifetimes.handlers(),
            **self.channels.handlers(),
            **self.code.handlers(),
        }

    # --- the connection ---------------------------------------------------------------------------------

    def link_open(self, link: Link) -> None:
        if self.session.failure is not None:
            link.close(CloseCode.PROTOCOL_ERROR, str(self.session.failure))
            return
        if self._link is not None:
            self._link.close(CloseCode.GOING_AWAY, "another connection of this session took over")
            self._lost_link()
        self._link = link
        self.session.connection_made()
        self._pump = Pump(self.session, link, flushed=self._regulate)
        self._pump.flush()
        self._on_link(True)

    def link_data(self, link: Link, data: bytes | bytearray | memoryview) -> None:
        if link is not self._link:
            return
        try:
            events = self.session.receive_data(data)
        except WireError as error:
            log.warning("the connection is ended: %s", error)
            link.close(CloseCode.PROTOCOL_ERROR, str(error))
            self._lost_link()
            if not error.resumable:
                self.start(self._fail(f"the client broke the protocol: {error}"))
            return
        for event in events:
            if isinstance(event, MessageReceived):
                self._received(event)
        self.flush_soon()

    def link_writable(self, link: Link) -> None:
        if link is self._link and self._pump is not None:
            self._pump.writable()
            self._regulate()

    def link_closed(self, link: Link, reason: str) -> None:
        if link is self._link:
            log.debug("connection lost: %s", reason)
            self._lost_link()

    def _lost_link(self) -> None:
        if self._pump is not None:
            self._pump.close()
        self._link = self._pump = None
        self.session.connection_lost()
        self._on_link(False)

    def send(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL) -> None:
        self.session.send(header, buffers, stream=stream)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Everything that becomes ready in this turn of the loop leaves as one websocket message."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._pump is not None:
            self._pump.flush()
        self._regulate()

    def _regulate(self) -> None:
        """What was held up for what waits to be sent goes on where there is room again."""
        limit = QUEUED_OUTPUT if self._link is not None else QUEUED_WHILE_AWAY
        self.streams.flow(self.session.queued_on(CONTROL) < limit)
        self.channels.regulate()

    # --- dispatch ---------------------------------------------------------------------------------------

    def _received(self, message: MessageReceived) -> None:
        lane = self._lanes.get(message.stream)
        if lane is not None:
            lane.append(message)
            return
        waiting = self._handle(message)
        if waiting is not None:
            self._lanes[message.stream] = deque()
            self.session.manual(message.stream)
            self.start(self._drain(message, waiting))

    async def _drain(self, message: MessageReceived, waiting: Awaitable[None]) -> None:
        lane = self._lanes[message.stream]
        await self.guarded(message.header, waiting)
        while lane:
            following = lane.popleft()
            again = self._handle(following)
            if again is not None:
                await self.guarded(following.header, again)
            self.session.consume(following)
            self.flush_soon()  # its credit
        self.session.automatic(message.stream)
        del self._lanes[message.stream]

    def _handle(self, message: MessageReceived) -> Awaitable[None] | None:
        handler = self._handlers.get(type(message.header), _unexpected)
        try:
            return handler(message.header, message.buffers)
        except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
            self._refuse(message.header, error)
            return None

    async def guarded(self, header: Header, waiting: Awaitable[None]) -> None:
        """Waits; what is raised is the answer to ``header``."""
        try:
            await waiting
        except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
            self._refuse(header, error)

    def _refuse(self, header: Header, error: BaseException) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
            raise error
        failure = failure_of(error)
        if failure.kind == "internal":
            log.error("%s failed", type(header).__name__, exc_info=error)
        call, number = getattr(header, "call", None), getattr(header, "object", None)
        if call is not None:
            target = getattr(header, "target", None)
            stream = stream_of(target.object) if target is not None else CONTROL
            self.send(Failed(call=call, failure=failure), stream=stream)
        elif number is not None:
            self.object_failed(number, failure)
        else:
            log.warning("%s was refused: %s", type(header).__name__, failure.message)

    def object_failed(self, number: int, failure: Failure) -> None:
        self.objects.add(number, failure)
        self.send(ObjectFailed(object=number, failure=failure))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` beside everything else; kept until it ends."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- output, deaths, settings -----------------------------------------------------------------------

    def _describe(self, mesh: int, rank: int) -> Any:
        return self.meshes.describe(mesh, rank)

    def _printed(self, lines: list[Printed]) -> None:
        if self._stream_output:
            for part in in_messages(fold(lines)):
                self.send(Output(lines=part))

    def _process_ended(self, mesh: int, rank: int, pid: int) -> None:
        if not self.code.process_ended(mesh, rank):
            self.meshes.process_ended(mesh, rank, pid)

    def fault(self, fault: Fault) -> None:
        self.meshes.fault(fault)

    def _configure(self, header: Configure, buffers: Sequence[Fragments]) -> None:
        self._stream_output = header.stream_output

    async def _end(self, header: EndSession, buffers: Sequence[Fragments]) -> None:
        await self.close("the session ended")
        self.send(Done(call=header.call))
        self._flush()
        self.ended.set()

    async def _fail(self, reason: str) -> None:
        """No connection can continue the session: it ends, and the server tells the reason to whoever redials."""
        self.end_reason = reason
        await self.close(reason)
        self.ended.set()

    async def close(self, reason: str) -> None:
        """Stops every mesh of the session and whatever process is left of it."""
        await asyncio.gather(self.lifetimes.stop_all(reason), self.code.close())
        self.channels.close()
        await self.streams.close()


def _unexpected(header: Header, buffers: Sequence[Fragments]) -> None:
    raise invalid(f"a gateway does not take {type(header).__name__} messages")

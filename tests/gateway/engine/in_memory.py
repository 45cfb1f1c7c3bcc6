"""A whole engine in this process, between a client's session and a fake Monarch: no socket, no worker.

For what the parts do together: dispatch, flow control, limits. What Monarch does with meshes is tested end to end.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from meshgate_gateway.engine.engine import Engine
from meshgate_wire import MessageReceived, Role, Session
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Header,
    Host,
    MeshRef,
    OpenChannel,
    Region,
    SpawnActors,
    SpawnProcs,
)
from tests.gateway.engine.fakes import WAIT_TIMEOUT, FakeMonarch

K = TypeVar("K")
PIECE = bytes(100_000)
MANY = 1000  # pieces: 100 MB, many flow-control windows
STREAMS = 10_000  # more than any of these tests uses


def call(number: int, actors: int, *, adverb: str = "call", region: Region | None = None) -> Call:
    target = MeshRef(object=actors, region=region)
    return Call(call=number, target=target, endpoint="step", adverb=adverb)  # type: ignore[arg-type]


def client_session() -> Session:
    """Of a client whose program consumes all messages itself, except those of the control stream."""
    session = Session(Role.CLIENT)
    for stream in range(1, STREAMS):
        session.manual(stream)
    return session


class EngineClient:
    """A client connected to an engine, and the connection in between.

    ``received`` is every message, in order of arrival. With ``consumes`` false, the program does not consume the
    messages of channels, which keep their flow-control credit.
    """

    run = ""

    def __init__(self, *, consumes: bool = True, hosts: int = 2) -> None:
        self.monarch = FakeMonarch()
        self.connected: list[bool] = []
        self.closed: list[str] = []
        self.engine = Engine(self.monarch, self._find_hosts, self.connected.append)
        self.session = client_session()
        self.received: list[MessageReceived] = []
        self.consumes = consumes
        self._hosts = hosts
        self._arriving: deque[bytes] = deque()
        self._number = 0
        self.session.connection_made()
        self.engine.link.connection_opened(self)  # type: ignore[arg-type]
        self._deliver()

    async def _find_hosts(self, mesh: str) -> Sequence[Host]:
        return [Host(name=f"{mesh}-{rank}", address=f"tcp://10.0.0.{rank}:1") for rank in range(self._hosts)]

    # --- what a program does

    def send(self, header: Header, *buffers: bytes, stream: int) -> None:
        self.session.send(header, buffers, stream=stream)
        self._deliver()

    def number(self) -> int:
        self._number += 1
        return self._number

    def attach(self) -> int:
        number = self.number()
        self.send(AttachHosts(object=number, mesh="workers"), stream=number)
        return number

    def spawn_procs(self, hosts: int, *, number: int | None = None, **per_host: int) -> int:
        number = number or self.number()
        header = SpawnProcs(object=number, hosts=MeshRef(object=hosts), per_host=per_host, name="procs")
        self.send(header, stream=number)
        return number

    def spawn_all(self, **per_host: int) -> int:
        """Attaches, spawns processes and actors, and returns the number of the actors."""
        return self.spawn_actors(self.spawn_procs(self.attach(), **per_host))

    def spawn_actors(self, procs: int) -> int:
        number = self.number()
        header = SpawnActors(
            object=number, procs=MeshRef(object=procs), name="actors", class_name="a.Actor", kind="sync"
        )
        self.send(header, b"class", pickle.dumps(((), {})), stream=number)
        return number

    async def open_channel(self) -> int:
        number = self.number()
        self.send(OpenChannel(object=number), stream=number)
        await self.turns()
        return number

    def consume_all(self) -> None:
        for message in self.received:
            self.session.consume(message)
        self._deliver()

    def of(self, kind: type[K]) -> list[K]:
        """The headers of the messages of one type."""
        return [message.header for message in self.received if isinstance(message.header, kind)]

    async def until(self, condition: Callable[[], object]) -> None:
        """Lets the engine run until ``condition()`` is true. Fails after ``WAIT_TIMEOUT``."""

        async def poll() -> None:
            while not condition():
                self._deliver()
                await asyncio.sleep(0)

        await asyncio.wait_for(poll(), WAIT_TIMEOUT)

    async def turns(self, count: int = 200) -> None:
        """Lets everything that is ready run, and what that makes ready."""
        for _ in range(count):
            self._deliver()
            await asyncio.sleep(0)

    async def end(self) -> None:
        await self.engine.close("the test is over")
        self.engine.link.session.validate_state()
        self.engine.validate_state()
        self.session.validate_state()

    # --- the engine's connection

    silence = 7.0

    def write(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._arriving.append(b"".join(pieces))

    def buffered(self) -> int:
        return 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback)

    def close(self, code: int, reason: str) -> None:
        self.closed.append(reason)

    def _deliver(self) -> None:
        while self._arriving or (data := b"".join(self.session.data_to_send())):
            assert not self.closed, f"the engine closed the connection: {self.closed}"
            if not self._arriving:
                self.engine.link.connection_data(self, data)  # type: ignore[arg-type]
                continue
            for event in self.session.receive_data(self._arriving.popleft()):
                if isinstance(event, MessageReceived):
                    self.received.append(event)
                    if self.consumes:
                        self.session.consume(event)

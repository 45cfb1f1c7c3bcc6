"""An engine in this process between a laptop's session and a Monarch of memory alone: no socket, no worker.

For what the engine does with messages and memory; what Monarch does with meshes is tested end to end.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import ParamSpec

from meshgate_gateway.engine.engine import Engine
from meshgate_gateway.engine.monarch import Reply
from meshgate_wire import MessageReceived, Role, Session
from meshgate_wire.messages import AttachHosts, Header, Host, MeshRef, SpawnActors, SpawnProcs

K = TypeVar("K")
P = ParamSpec("P")
PATIENCE = 20.0


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine. Fails where it leaves a task behind."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def alone() -> None:
            await test(*args, **kwargs)
            for _ in range(10):  # a cancellation passes from task to task
                await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(alone())

    return run


class Port:
    """A port and its receiver."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Reply] = asyncio.Queue()
        self.taken = 0

    def put(self, data: bytes, rank: int | None = None) -> None:
        self.waiting.put_nowait(Reply(rank, False, data, ()))


@dataclass
class Mesh:
    name: str
    stopped: bool = False


@dataclass
class MemoryMonarch:
    """What ``Binding`` is to the engine. ``casts``: what was sent to actors, as (endpoint, payload, port)."""

    casts: list[tuple[str, Any, Port | None]] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    stopping: Callable[[Any], Coroutine[Any, Any, None]] | None = None

    def attach(self, name: str, addresses: Sequence[str]) -> Mesh:
        return Mesh(name)

    def spawn_procs(self, hosts: Mesh, per_host: Any, name: str, bootstrap: Any) -> Mesh:
        return Mesh(name)

    def spawn_actors(self, procs: Mesh, name: str, *_: Any) -> Mesh:
        return Mesh(name)

    def part(self, mesh: Mesh, region: Any) -> Mesh:
        return mesh

    part_of_actors = part

    def adopt_hosts(self, reference: Any, region: Any) -> Mesh:
        return Mesh("adopted")

    async def initialized(self, mesh: Mesh) -> None:
        return None

    async def actors_initialized(self, mesh: Mesh) -> str:
        return mesh.name

    async def stop_procs(self, mesh: Mesh, reason: str) -> None:
        if self.stopping is not None:
            await self.stopping(mesh)
        mesh.stopped = True

    stop_actors = stop_procs

    async def stop_hosts(self, mesh: Mesh) -> None:
        mesh.stopped = True

    shut_down_hosts = stop_hosts

    def arguments(self, data: Any, buffers: Any, objects: Any) -> Any:
        return b"".join(data)

    def cast(self, inner: Any, endpoint: str, explicit_port: bool, payload: Any, selection: str, port: Any) -> None:
        self.casts.append((endpoint, payload, port))

    def open_port(self) -> tuple[Port, Port]:
        port = Port()
        self.ports.append(port)
        return port, port

    async def _receive(self, port: Port) -> Reply:
        reply = await port.waiting.get()
        port.taken += 1
        return reply

    def receive(self, port: Port) -> asyncio.Future[Reply]:
        return asyncio.ensure_future(self._receive(port))

    def raw_reply(self, reply: Reply) -> Reply:
        return reply


class Laptop:
    """The laptop's end of the session, and the link between. ``got`` is every message, in order of arrival.

    With ``takes`` false its program takes no message of a channel, so that they keep their credit.
    """

    def __init__(self, *, takes: bool = True, hosts: int = 2) -> None:
        self.monarch = MemoryMonarch()
        self.engine = Engine(
            Session(Role.GATEWAY),
            self.monarch,
            self._find_hosts,
            lambda connected: None,  # type: ignore[arg-type]
        )
        self.session = Session(Role.CLIENT, manual_streams=lambda stream: stream > 0)
        self.got: list[MessageReceived] = []
        self.takes = takes
        self._hosts = hosts
        self._arriving: deque[bytes] = deque()
        self._number = 0
        self.session.connection_made()
        self.engine.link_open(self)  # type: ignore[arg-type]
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

    def spawn_up(self, **per_host: int) -> int:
        """Actors, with all they stand on."""
        return self.spawn_actors(self.spawn_procs(self.attach(), **per_host))

    def spawn_actors(self, procs: int) -> int:
        number = self.number()
        header = SpawnActors(
            object=number, procs=MeshRef(object=procs), name="actors", class_name="a.Actor", kind="sync"
        )
        self.send(header, b"class", pickle.dumps(((), {})), stream=number)
        return number

    def take_all(self) -> None:
        """The program takes what it has not taken."""
        for message in self.got:
            self.session.consume(message)
        self._deliver()

    def of(self, kind: type[K]) -> list[K]:
        """The headers of the messages of one type."""
        return [message.header for message in self.got if isinstance(message.header, kind)]

    async def settle(self, *, until: Callable[[], object]) -> None:
        """Lets the engine go on until ``until()`` is true; fails where that takes too long."""

        async def go_on() -> None:
            while not until():
                self._deliver()
                await asyncio.sleep(0)

        await asyncio.wait_for(go_on(), PATIENCE)

    async def turns(self, count: int = 200) -> None:
        """Lets everything that is ready run, and what that makes ready."""
        for _ in range(count):
            self._deliver()
            await asyncio.sleep(0)

    async def end(self) -> None:
        await self.engine.close("the test is over")
        self.engine.session.validate_state()
        self.session.validate_state()

    # --- the engine's link

    def write(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._arriving.append(b"".join(pieces))

    def buffered(self) -> int:
        return 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback)

    def close(self, code: int, reason: str) -> None:
        raise AssertionError(f"the engine closed the connection: {reason}")

    def _deliver(self) -> None:
        while self._arriving or (data := b"".join(self.session.data_to_send())):
            if not self._arriving:
                self.engine.link_data(self, data)  # type: ignore[arg-type]
                continue
            for event in self.session.receive_data(self._arriving.popleft()):
                if isinstance(event, MessageReceived):
                    self.got.append(event)
                    if self.takes:
                        self.session.consume(event)

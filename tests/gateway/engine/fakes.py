"""Small fakes of what parts of the engine get: Monarch, the client, tasks and timers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshgate_gateway.engine.monarch.interface import BatchedReply, Reply
from meshgate_gateway.engine.monarch.same_versions import SameVersions
from meshgate_gateway.engine.objects.records import ActorMesh, HostMesh, ProcMesh, attached_hosts
from meshgate_gateway.engine.objects.regions import hosts_region, procs_region
from meshgate_wire.messages import Header, Host, Launch, Region

H = TypeVar("H")
WAIT_TIMEOUT = 60.0  # seconds; reached only by a test that fails


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run, and what that makes ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Runs the event loop until ``condition()`` is true. Fails after ``WAIT_TIMEOUT``."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0)

    await asyncio.wait_for(poll(), WAIT_TIMEOUT)


# --- Monarch ------------------------------------------------------------------------------------------------


class FakePort:
    """A port and its receiver."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Reply | list[BatchedReply]] = asyncio.Queue()
        self.received = 0
        self.several = False  # how it is received: the adapter has a receiver for each way
        self.closed = False  # while its receiver waited

    def put(self, data: bytes, rank: int | None = None, *, exception: bool = False, references: Any = ()) -> None:
        self.messages.put_nowait(Reply(rank, exception, data, references))


class FakeBatchPort:
    """The port of a batch, for the replies to one of its calls, which seems to take ``seconds``."""

    seconds = 0.0

    def __init__(self, port: FakePort, number: int) -> None:
        self.port, self.number = port, number

    def put(self, data: bytes, rank: int | None = None, *, exception: bool = False, references: Any = ()) -> None:
        reply = Reply(rank, exception, data, references)
        self.port.messages.put_nowait([BatchedReply(self.number, self.seconds, reply)])


@dataclass(eq=False)
class FakeMesh:
    """A mesh of Monarch's. ``ready`` decides when and how its initialization ends."""

    name: str
    region: Region | None = None  # of a slice
    bootstrap: Any = None
    ready: asyncio.Future[None] | None = None
    stopped: str | None = None  # the reason


@dataclass
class FakeMonarch:
    """``interface.Monarch`` without Monarch. Records what it is asked to do.

    ``hold`` makes meshes that are spawned from then on wait for ``mesh.ready``.
    """

    hold: bool = False
    meshes: list[FakeMesh] = field(default_factory=list)
    launches: list[tuple[FakeMesh, Launch | None]] = field(default_factory=list)  # (hosts, launch)
    attached: list[tuple[str, list[str]]] = field(default_factory=list)
    casts: list[tuple[str, Any, Any]] = field(default_factory=list)  # (endpoint, payload, port)
    batches: list[list[str]] = field(default_factory=list)  # the endpoints of each; their calls are in ``casts`` too
    marks: list[int] = field(default_factory=list)  # the number of each call as its processes know it
    sent: list[tuple[Any, Any]] = field(default_factory=list)  # (port, payload)
    dropped_if_undeliverable: list[bool] = field(default_factory=list)  # for each of ``sent``
    ports: list[FakePort] = field(default_factory=list)
    faults: list[asyncio.Future[Any]] = field(default_factory=list)  # that supervised casts wait for
    engine_calls: list[tuple[Any, str, tuple[Any, ...]]] = field(default_factory=list)
    on_engine_call: Callable[[str, tuple[Any, ...]], Any] = lambda endpoint, args: None
    stopping: Callable[[Any], Coroutine[Any, Any, None]] | None = None
    controllers_at: str = ""
    hosts_stopped: list[tuple[FakeMesh, bool]] = field(default_factory=list)  # (mesh, shut down)

    same_versions: SameVersions = field(default_factory=SameVersions)
    processes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by the name of a mesh

    sync_context = "contextlib:nullcontext"
    log_prefix = "logging:raiseExceptions"
    root = "the engine"
    controllers_class = b"the keeper"

    def _mesh(self, name: str, bootstrap: Any = None) -> FakeMesh:
        mesh = FakeMesh(name, bootstrap=bootstrap)
        if self.hold:
            mesh.ready = asyncio.get_running_loop().create_future()
        self.meshes.append(mesh)
        return mesh

    def attach(self, name: str, hosts: Sequence[Host]) -> FakeMesh:
        self.attached.append((name, [host.address for host in hosts]))
        return self._mesh(name)

    def spawn_procs(
        self, hosts: FakeMesh, per_host: Any, name: str, bootstrap: Any, launch: Launch | None = None
    ) -> FakeMesh:
        self.launches.append((hosts, launch))
        return self._mesh(name, bootstrap)

    def with_python(self, hosts: FakeMesh, python: str) -> FakeMesh:
        return FakeMesh(f"{hosts.name} with {python}", hosts.region, ready=hosts.ready)

    def spawn_actors(self, procs: FakeMesh, name: str, *_: Any) -> FakeMesh:
        return self._mesh(name)

    def spawn_engine_actors(self, procs: FakeMesh, name: str, class_name: str, *args: Any) -> FakeMesh:
        return self._mesh(class_name)

    def process_ids(self, procs: FakeMesh) -> tuple[str, ...]:
        return self.processes.get(procs.name, tuple(f"{procs.name}-{rank}" for rank in range(4)))

    def find_controllers_at(self, address: str, secret: str) -> None:
        self.controllers_at = address

    def dump_actors(self, class_data: Any, name: str, actors: FakeMesh, region: Region, procs: Any) -> bytes:
        return f"{name} with {class_data}".encode()

    def slice_mesh(self, mesh: FakeMesh, region: Region) -> FakeMesh:
        return FakeMesh(mesh.name, region, ready=mesh.ready)

    slice_actors = slice_mesh

    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"stop_actor_timeout": "10s", **settings}

    async def settings_applied(self) -> None:
        pass

    async def wait_initialized(self, mesh: FakeMesh) -> None:
        if mesh.ready is not None:
            await asyncio.shield(mesh.ready)

    async def wait_actors_initialized(self, actors: FakeMesh) -> str:
        await self.wait_initialized(actors)
        return f"{actors.name}-unique"

    async def stop_procs(self, mesh: FakeMesh, reason: str) -> None:
        if self.stopping is not None:
            await self.stopping(mesh)
        mesh.stopped = reason

    stop_actors = stop_procs

    async def stop_hosts(self, hosts: FakeMesh) -> None:
        self.hosts_stopped.append((hosts, False))

    async def shut_down_hosts(self, hosts: FakeMesh) -> None:
        self.hosts_stopped.append((hosts, True))

    def payload(self, data: Any, buffers: Any = (), objects: Any = ()) -> Any:
        return (b"".join(data), *objects) if objects else b"".join(data)

    def engine_payload(self, *args: Any, objects: Sequence[Any] = ()) -> Any:
        return args

    def payload_keeping(self, payload: Any, number: int, label: str) -> Any:
        return ("keep", number, label, payload)

    def payload_making_room(self, payload: Any, numbers: Sequence[int]) -> Any:
        return ("room", numbers, payload)

    def kept_argument(self, delivery: int, argument: int) -> Any:
        return ("take", delivery, argument)

    def kept_reference(self, *arguments: Any) -> Any:
        return ("refer", *arguments)

    def payload_at(self, payload: Any, position: int, region: Region) -> Any:
        return ("at", position, region.sizes, payload)

    def payload_with_trace(self, payload: Any, trace: Mapping[str, str]) -> Any:
        return ("trace", dict(trace), payload)

    def cast(self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, port: Any) -> None:
        self.casts.append((endpoint, payload, port))

    def call(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> FakePort:
        self.marks.append(number)
        port, receiver = self.open_port()
        receiver.several = several
        self.cast(actors, endpoint, explicit_port, payload, port)
        return receiver

    def size_in_batch(self, payload: Any) -> int | None:
        return len(payload) if isinstance(payload, bytes) else None

    def call_batch(self, actors: Any, calls: Sequence[tuple[str, Any, int]]) -> FakePort:
        port, receiver = self.open_port()
        self.batches.append([endpoint for endpoint, *_ in calls])
        self.marks += [number for *_, number in calls]
        for number, (endpoint, payload, _) in enumerate(calls):
            self.cast(actors, endpoint, False, payload, FakeBatchPort(port, number))
        return receiver

    def replies_of(self, message: Reply | list[BatchedReply]) -> list[BatchedReply]:
        return message if isinstance(message, list) else [BatchedReply(None, 0.0, message)]

    def call_supervised(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> tuple[FakePort, asyncio.Future[Any]]:
        receiver = self.call(actors, endpoint, explicit_port, payload, number, several=several)
        self.faults.append(asyncio.get_running_loop().create_future())
        return receiver, self.faults[-1]

    async def call_engine_actors(self, actors: FakeMesh, count: int, endpoint: str, *args: Any) -> list[Any]:
        self.engine_calls.append((actors, endpoint, args))
        result = self.on_engine_call(endpoint, args)
        if asyncio.iscoroutine(result):
            result = await result
        return result if result is not None else [None] * count

    def open_port(self) -> tuple[FakePort, FakePort]:
        port = FakePort()
        self.ports.append(port)
        return port, port

    def port_name(self, port: FakePort) -> str:
        return f"port {self.ports.index(port)}"

    async def _receive(self, port: FakePort) -> Any:
        reply = await port.messages.get()
        port.received += 1
        return reply

    def receive(self, receiver: FakePort) -> asyncio.Future[Any]:
        assert not receiver.several
        return asyncio.ensure_future(self._receive(receiver))

    async def _receive_several(self, port: FakePort) -> list[Any]:
        messages = [await self._receive(port)]
        while not port.messages.empty():
            messages.append(await self._receive(port))
        return messages

    def receive_several(self, receiver: FakePort) -> asyncio.Future[list[Any]]:
        assert receiver.several
        return asyncio.ensure_future(self._receive_several(receiver))

    def close(self, receiver: FakePort) -> None:
        receiver.closed = True

    def reply_of(self, message: Reply) -> Reply:
        return message

    def port_at(self, address: str) -> str:
        return address

    def send_to_port(self, port: Any, payload: Any, *, return_undeliverable: bool = True) -> None:
        self.sent.append((port, payload))
        self.dropped_if_undeliverable.append(not return_undeliverable)

    def port_argument(self, port: Any) -> tuple[str, Any]:
        return ("port", port)

    def actors_argument(self, class_data: Any, name: str, actors: Any, region: Region, procs: Any) -> tuple[str, Any]:
        return ("actors", actors)

    def reference_from_bytes(self, kind: str, data: bytes) -> tuple[str, bytes]:
        return kind, data

    def adopt_hosts(self, reference: Any, region: Region) -> FakeMesh:
        return FakeMesh("adopted hosts", region)

    def adopt_procs(self, reference: Any, hosts: Any, region: Region, root: Region) -> FakeMesh:
        return FakeMesh("adopted procs", region)


# --- the engine around a part -------------------------------------------------------------------------------


class Sent:
    """Collects what a part sends to the client."""

    def __init__(self) -> None:
        self.messages: list[tuple[Header, int, tuple[Any, ...]]] = []

    def __call__(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = 0) -> None:
        self.messages.append((header, stream, tuple(buffers)))

    def of(self, kind: type[H]) -> list[H]:
        """The headers of one type, in order."""
        return [header for header, _, _ in self.messages if isinstance(header, kind)]


class Timers:
    """``call_later`` by hand."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], Any]]] = []

    def __call__(self, delay: float, callback: Callable[..., Any], /, *args: Any) -> None:
        self.waiting.append((delay, functools.partial(callback, *args)))

    def fire(self, delay: float) -> None:
        """Runs the callbacks that wait for exactly ``delay`` seconds."""
        due = [callback for each, callback in self.waiting if each == delay]
        self.waiting = [(each, callback) for each, callback in self.waiting if each != delay]
        for callback in due:
            callback()


def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work)


# --- records ------------------------------------------------------------------------------------------------


def host_mesh(count: int = 2, name: str = "workers") -> HostMesh:
    hosts = [Host(name=f"{name}-{rank}", address=f"tcp://10.0.0.{rank}:1") for rank in range(count)]
    return attached_hosts(FakeMesh(name), name, hosts)


def proc_mesh(
    hosts: HostMesh | None = None, name: str = "procs", version: str | None = None, **per_host: int
) -> ProcMesh:
    hosts = hosts or host_mesh()
    region = procs_region(hosts_region(len(hosts.hosts)), per_host)
    return ProcMesh(FakeMesh(name), name, region, hosts.names, hosts, version)


def actor_mesh(procs: ProcMesh | None = None, name: str = "actors") -> ActorMesh:
    procs = procs or proc_mesh()
    return ActorMesh(FakeMesh(name), name, "a.Actor", (), procs.region, procs, procs.mesh, f"{name}-unique")

"""Code sync in the simulation: a driver that edits a file, the sync agents of the hosts, and the stores on their disks.

The scan, the offers, the engine's part, the tree of relays and the stores are the real code. Agents and the gateway
listen on unix sockets in place of TCP, and what a thread does in reality runs in one callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate_sync.relay.plan import Routes
from meshgate_sync.store import store
from meshgate_sync.store.home import check_path, snapshot_path
from meshgate_sync.store.store import Store
from meshgate_sync.transport.connections import Connections
from meshgate_sync.transport.runner import Runner
from meshgate_sync.tree.delta import INLINE_LIMIT
from tests.simulation.processes import Process, World, current_process

if TYPE_CHECKING:
    from meshgate import Client
    from tests.simulation.monarch import Workers

FILE = "number.txt"


class Project:
    """The directory that drivers edit and sync."""

    def __init__(self, client: Client) -> None:
        self._top = Path(tempfile.gettempdir(), "project")
        self._top.mkdir(exist_ok=True)
        self._code = CodeSync(client, Tree(self._top))

    def save(self, number: int) -> None:
        (self._top / FILE).write_text(f"{number}\n" + "x" * (number * 7919 % 5000))

    def push(self) -> None:
        self._code.push(wait=False)


class Agent:
    """The process of a host's sync agent; ``HostAgentActor`` is the real one."""

    def __init__(self, workers: Workers, engine: Process, host: int) -> None:
        self.process = Process(engine.world, f"agent {host} of {engine.name}", self._ended)
        self._workers, self._engine, self._host = workers, engine, host
        self._runner: Runner | None = None
        workers.agents.append(self)

    def start(self, address: str, secret: str, mesh: int, rank: int) -> None:
        hello = {"secret": secret, "mesh": mesh, "rank": rank, "pid": 1, "stream": "stdout"}
        with self.process._current():
            self.process.start(self._run(address, hello))

    async def _run(self, address: str, hello: Mapping[str, Any]) -> None:
        await until_engine_ends(address, hello)
        if self._runner is not None:
            await self._runner.close()

    def _ended(self, code: int) -> None:
        self._workers.agents.remove(self)

    def request(self, endpoint: str, *args: Any) -> asyncio.Future[Any]:
        """Calls an endpoint from the engine."""
        return call_in(self.process, self._engine, lambda: getattr(self, endpoint)(*args))

    # --- the endpoints of ``HostAgentActor``

    async def listen(self, name: str, secret: bytes, owner: str, bind: str) -> tuple[str, int]:
        self._runner = Runner(name, Store(_home(self._host)), secret=secret, owner=owner)
        return await self._runner.listen(bind)

    async def configure(self, routes: tuple[Any, Any], addresses: Mapping[str, Any]) -> None:
        assert self._runner is not None
        self._runner.configure(Routes(*routes), addresses)

    async def moved(self, addresses: Mapping[str, Any]) -> None:
        if self._runner is not None:
            self._runner.restarted(addresses)


def call_in(process: Process, engine: Process, function: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
    """Runs ``function`` in ``process`` for the engine. It is not answered if the process has ended."""
    answer = engine.loop.create_future()

    async def call() -> None:
        result = await function()
        if engine.alive:
            engine.loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

    if process.alive:
        process.loop.call_soon_threadsafe(lambda: process.loop.create_task(call()))
    return answer


async def until_engine_ends(address: str, hello: Mapping[str, Any]) -> None:
    """What a process does that has nothing to print."""
    try:
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    except OSError:  # the engine has ended
        return
    writer.write(json.dumps(hello).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def open_version(process: Process, host: int, root: str) -> Path:
    """The file of version ``root`` on a host, which the process holds from now on, as ``home.open_version`` does.

    An engine starts no process from a version that its host lacks.
    """
    home = _home(host)
    path = snapshot_path(home, root)
    if not os.path.isdir(path):  # noqa: ASYNC240 - time is virtual
        process.world.problems.append(f"{process.name} was started from version {root[:12]}, which its host lacks")
    handle = os.open(os.path.join(home, "opened", root), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    process.own(handle)
    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    while os.path.lexists(check_path(home, root)):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.002)
    return Path(path, FILE)


def _home(host: int | str) -> str:
    """The directory of a host's store."""
    return os.path.join(tempfile.gettempdir(), f"home-{host}")


@contextlib.contextmanager
def with_stores(world: World) -> Iterator[None]:
    """Stores are in the simulation's directory. In some worlds the pieces of small files do not travel with offers."""
    limit = world.chance.choice((INLINE_LIMIT, 0))
    with contextlib.ExitStack() as patches:
        for part in ("code_sync", "host_agents", "reloading"):
            sources = f"meshgate_gateway.engine.code.{part}.worker_sources"
            patches.enter_context(mock.patch(sources, return_value=()))
        for path, new in (
            ("meshgate_gateway.engine.code.code_sync.default_home", lambda: _home("gateway")),
            ("meshgate_sync.upload.INLINE_LIMIT", limit),
            ("meshgate_sync.distribution.distributor.INLINE_LIMIT", limit),
            ("meshgate_sync.store.store._lock", _lock),
            ("meshgate_sync.transport.connections.Connections.listen", _listen),
        ):
            patches.enter_context(mock.patch(path, new))
        yield


async def _listen(connections: Connections, host: str, port: int) -> tuple[str, int]:
    """In place of ``Connections.listen``."""
    world = current_process().world
    world.ports += 1
    loop = asyncio.get_running_loop()
    connections._server = await loop.create_unix_server(connections._accept, world.path_of(world.ports))
    return host, world.ports


_lock_of_store = store._lock


def _lock(directory: str) -> int:
    """The lock of a running store, which the kernel releases with its process."""
    handle = _lock_of_store(directory)
    process, identity = current_process(), os.fstat(handle)

    def release() -> None:
        with contextlib.suppress(OSError):  # the store was closed
            if os.path.samestat(os.fstat(handle), identity):
                os.close(handle)

    process.at_end.append(release)
    return handle


def agents_called(agents: Sequence[Agent], endpoint: str, args: Sequence[Any]) -> list[asyncio.Future[Any]]:
    """Calls an endpoint of ``HostAgentActor`` on each of ``agents``, which are the ranks of their mesh."""
    if endpoint == "start":
        names, secret, owner, bind, _ = args
        return [agent.request("listen", names[rank], secret, owner, bind) for rank, agent in enumerate(agents)]
    routes, addresses = args
    return [agent.request("configure", routes[f"workers-{agent._host}"], addresses) for agent in agents]

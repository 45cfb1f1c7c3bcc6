"""Runners in the test's event loop, and a peer that the test controls."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshgate_sync.relay.frames import Message, Offer
from meshgate_sync.relay.plan import GATEWAY, HostSlot, plan
from meshgate_sync.store.store import Store
from meshgate_sync.transport.connections import Connection, outgoing
from meshgate_sync.transport.runner import Address, Runner
from meshgate_sync.tree.delta import encode, full_delta
from meshgate_sync.tree.tree import NOTHING, Directory
from tests.sync.trees import Content

SECRET = b"secret"


class EngineStub:
    """The engine at the gateway: supplies pieces from ``content`` and waits for hosts to be ready."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.runner: Runner | None = None
        self.ready: dict[bytes, set[str]] = {}
        self.reported = asyncio.Event()

    def request_pieces(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        assert self.runner is not None
        pieces = [(digest, self.content.pieces[digest]) for digest in digests]
        asyncio.get_running_loop().call_soon(self.runner.supply, pieces)

    def report_unreachable(self, hosts: tuple[tuple[str, str], ...]) -> None:
        raise AssertionError("every host can reach its parents")

    def report_status(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None:
        self.ready.setdefault(root, set()).update(ready)
        self.reported.set()

    async def wait(self, root: bytes, names: set[str]) -> None:
        async def all_ready() -> None:
            while not names <= self.ready.get(root, set()):
                self.reported.clear()
                await self.reported.wait()

        await asyncio.wait_for(all_ready(), 30)


class RunnerPair:
    """A gateway and one host in this event loop."""

    def __init__(self, tmp_path: Path, content: Content) -> None:
        self.engine = EngineStub(content)
        self.stores = [Store(str(tmp_path / "gateway"), snapshots=False), Store(str(tmp_path / "h0"))]
        self.gateway = Runner(GATEWAY, self.stores[0], secret=SECRET, gateway=self.engine)
        self.host = Runner("h0", self.stores[1], secret=SECRET)
        self.engine.runner = self.gateway
        self.address: Address = ("", 0)

    async def start(self, *, gateway_late: bool = False) -> None:
        self.address = await self.gateway.listen()
        await self.host.listen()
        routes = plan([HostSlot("h0")]).routes["h0"]
        if not gateway_late:
            self.gateway.configure(None, {})
        self.host.configure(routes, {GATEWAY: self.address})

    def publish(self, tree: Directory, *, striped: bool = False) -> None:
        self.gateway.publish(Offer(tree.digest, NOTHING, NOTHING, striped, encode(full_delta(tree))))

    async def close(self) -> None:
        await self.host.close()
        await self.gateway.close()
        for store in self.stores:
            store.close()


class Peer:
    """The listener of a connection that the test opens."""

    def __init__(self) -> None:
        self.opened_event = asyncio.Event()
        self.end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def opened(self, connection: Connection) -> None:
        self.opened_event.set()

    def received(self, connection: Connection, messages: list[Message]) -> None:
        """Ignored."""

    def drained(self, connection: Connection, size: int) -> None:
        """Ignored."""

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        self.end.set_result(reason)


async def connect(address: Address, secret: bytes) -> tuple[Connection, Peer]:
    peer = Peer()
    connection = outgoing(peer, secret, "stranger", GATEWAY)
    await asyncio.get_running_loop().create_connection(lambda: connection, *address)
    return connection, peer

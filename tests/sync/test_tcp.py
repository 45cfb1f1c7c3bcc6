"""Connections between runners: strangers, damage, and a disk that is slower than the network."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from pathlib import Path

import pytest

from meshgate_sync.delta import encode, whole
from meshgate_sync.digest import NOTHING
from meshgate_sync.frames import Data, Message, Offer, encode_frame
from meshgate_sync.plan import GATEWAY, HostSlot, plan
from meshgate_sync.runner import Address, Runner
from meshgate_sync.store import Store
from meshgate_sync.tcp import Connection, dialling
from meshgate_sync.tree import Directory
from tests.sync.trees import Content, on_disk, plain

SECRET = b"secret"


class Reports:
    """The gateway's program: answers from ``content``, and lets one wait for hosts to be ready."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.runner: Runner | None = None
        self.ready: dict[bytes, set[str]] = {}
        self.news = asyncio.Event()

    def ask(self, root: bytes, digests: tuple[bytes, ...]) -> None:
        assert self.runner is not None
        pieces = [(digest, self.content.pieces[digest]) for digest in digests]
        asyncio.get_running_loop().call_soon(self.runner.supply, pieces)

    def report_trouble(self, hosts: tuple[tuple[str, str], ...]) -> None:
        raise AssertionError("everyone can be reached")

    def report(self, root: bytes, ready: tuple[str, ...], failed: tuple[tuple[str, str], ...]) -> None:
        self.ready.setdefault(root, set()).update(ready)
        self.news.set()

    async def wait(self, root: bytes, names: set[str]) -> None:
        async def all_ready() -> None:
            while not names <= self.ready.get(root, set()):
                self.news.clear()
                await self.news.wait()

        await asyncio.wait_for(all_ready(), 30)


class Small:
    """A gateway and one host in this event loop."""

    def __init__(self, tmp_path: Path, content: Content) -> None:
        self.reports = Reports(content)
        self.stores = [Store(str(tmp_path / "gateway"), snapshots=False), Store(str(tmp_path / "h0"))]
        self.gateway = Runner(GATEWAY, self.stores[0], secret=SECRET, gateway=self.reports)
        self.host = Runner("h0", self.stores[1], secret=SECRET)
        self.reports.runner = self.gateway
        self.address: Address = ("", 0)

    async def start(self, *, gateway_late: bool = False) -> None:
        self.address = await self.gateway.listen()
        await self.host.listen()
        routes = plan([HostSlot("h0")]).routes["h0"]
        if not gateway_late:
            self.gateway.configure(None, {})
        self.host.configure(routes, {GATEWAY: self.address})

    def publish(self, tree: Directory, *, striped: bool = False) -> None:
        self.gateway.publish(Offer(tree.digest, NOTHING, NOTHING, striped, encode(whole(tree))))

    async def close(self) -> None:
        await self.host.close()
        await self.gateway.close()
        for store in self.stores:
            store.close()


class Stranger:
    """The other end of a connection, driven by the test."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def opened(self, connection: Connection) -> None:
        self.open.set()

    def received(self, connection: Connection, messages: list[Message]) -> None:
        """Nothing it is told matters to it."""

    def drained(self, connection: Connection, size: int) -> None:
        """Nor does what it got rid of."""

    def closed(self, connection: Connection, reason: Exception | None) -> None:
        self.end.set_result(reason)


async def connect(address: Address, secret: bytes) -> tuple[Connection, Stranger]:
    stranger = Stranger()
    connection = dialling(stranger, secret, "stranger", GATEWAY)
    await asyncio.get_running_loop().create_connection(lambda: connection, *address)
    return connection, stranger


MODEL: dict[bytes, object] = {b"a": b"1", b"large": bytes(range(200))}


def test_a_host_that_connects_before_the_gateway_is_ready_is_served(tmp_path: Path) -> None:
    async def run() -> None:
        content = Content()
        small = Small(tmp_path, content)
        await small.start(gateway_late=True)
        while not small.gateway._waiting:  # noqa: ASYNC110 - the connection is on its way through the kernel
            await asyncio.sleep(0)
        small.gateway.configure(None, {})
        tree = content.tree(MODEL)
        small.publish(tree, striped=True)
        await small.reports.wait(tree.digest, {"h0"})
        assert on_disk(small.stores[1].snapshots.path(tree.digest)) == plain(MODEL)
        await small.close()

    asyncio.run(run())


def test_a_stranger_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        content = Content()
        small = Small(tmp_path, content)
        await small.start()
        _, stranger = await connect(small.address, b"wrong")
        assert "secret" in str(await asyncio.wait_for(stranger.end, 30))
        reader, writer = await asyncio.open_connection(*small.address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        tree = content.tree(MODEL)
        small.publish(tree)
        await small.reports.wait(tree.digest, {"h0"})
        await small.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\1\xff",
        b"".join(encode_frame(Data(b"d" * 32, b"not what the digest says"))),
    ],
)
def test_a_damaged_frame_ends_its_connection_alone(tmp_path: Path, frame: bytes) -> None:
    async def run() -> None:
        content = Content()
        small = Small(tmp_path, content)
        await small.start()
        connection, stranger = await connect(small.address, SECRET)
        await asyncio.wait_for(stranger.open.wait(), 30)
        connection.write([frame], 0)
        await asyncio.wait_for(stranger.end, 30)
        tree = content.tree(MODEL)
        small.publish(tree)
        await small.reports.wait(tree.digest, {"h0"})
        await small.close()

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(5))
def test_who_connects_while_a_runner_closes_holds_nothing_up(tmp_path: Path, turns: int) -> None:
    async def run() -> None:
        with contextlib.closing(Store(str(tmp_path), snapshots=False)) as store:
            runner = Runner(GATEWAY, store, secret=SECRET, gateway=Reports(Content()))
            with socket.create_connection(await runner.listen()) as connection:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await asyncio.wait_for(runner.close(), 10)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        gc.collect()  # a connection left open tells of itself, and warnings are errors

    asyncio.run(run())


def test_a_peer_that_connects_again_replaces_its_earlier_connection(tmp_path: Path) -> None:
    async def run() -> None:
        small = Small(tmp_path, Content())
        await small.start()
        _, first = await connect(small.address, SECRET)
        await asyncio.wait_for(first.open.wait(), 30)
        second, again = await connect(small.address, SECRET)
        await asyncio.wait_for(first.end, 30)
        await asyncio.wait_for(again.open.wait(), 30)
        assert not again.end.done()
        second.close()
        await small.close()

    asyncio.run(run())


def test_reading_pauses_while_the_disk_does_not_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.store_thread._MOST_UNKEPT", 20)
    pauses: list[str] = []
    for name in ("pause_reading", "resume_reading"):
        original = getattr(Connection, name)

        def spy(self: Connection, original: object = original, name: str = name) -> None:
            pauses.append(name)
            original(self)  # type: ignore[operator]

        monkeypatch.setattr(Connection, name, spy)

    async def run() -> None:
        content = Content()
        small = Small(tmp_path, content)
        await small.start()
        tree = content.tree({b"large": bytes(range(250)) * 4})
        small.publish(tree)
        await small.reports.wait(tree.digest, {"h0"})
        await small.close()

    asyncio.run(run())
    assert "pause_reading" in pauses
    assert pauses[-1] == "resume_reading"


def test_a_store_that_fails_unexpectedly_fails_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        content = Content()
        small = Small(tmp_path, content)
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
        failed = asyncio.Event()
        monkeypatch.setattr(small.reports, "report", lambda root, ready, bad: failed.set() if bad else None)
        await small.start()
        tree = content.tree(MODEL)

        def explode(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(small.host.disk, "add", explode)
        small.publish(tree)
        await asyncio.wait_for(failed.wait(), 30)
        assert str(problems[0]) == "a bug"
        await small.close()

    asyncio.run(run())

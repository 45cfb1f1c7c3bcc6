from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshgate_sync.relay.commands import PeerLink
from meshgate_sync.relay.frames import Data, Heartbeat, Message, encode_frame
from meshgate_sync.relay.plan import GATEWAY
from meshgate_sync.store.store import Store
from meshgate_sync.transport.connections import Connections
from meshgate_sync.transport.runner import Runner
from tests.sync.runners import SECRET, EngineStub, RunnerPair, connect
from tests.sync.trees import Content


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_during_close_does_not_delay_it(tmp_path: Path, turns: int) -> None:
    async def run() -> None:
        with contextlib.closing(Store(str(tmp_path), snapshots=False)) as store:
            runner = Runner(GATEWAY, store, secret=SECRET, gateway=EngineStub(Content()))
            with socket.create_connection(await runner.listen()) as connection:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await asyncio.wait_for(runner.close(), 10)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        gc.collect()  # a connection left open would warn, and warnings are errors

    asyncio.run(run())


def test_a_peer_that_connects_again_replaces_its_earlier_connection(tmp_path: Path) -> None:
    async def run() -> None:
        pair = RunnerPair(tmp_path, Content())
        await pair.start()
        _, first = await connect(pair.address, SECRET)
        await asyncio.wait_for(first.opened_event.wait(), 30)
        second, again = await connect(pair.address, SECRET)
        await asyncio.wait_for(first.end, 30)
        await asyncio.wait_for(again.opened_event.wait(), 30)
        assert not again.end.done()
        second.close()
        await pair.close()

    asyncio.run(run())


class Links:
    """Records what happens to links."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    def link_opened(self, link: PeerLink) -> None:
        self.events.put_nowait(("opened", link))

    def link_received(self, link: PeerLink, messages: list[Message]) -> None:
        self.events.put_nowait(("received", link, *messages))

    def link_drained(self, link: PeerLink, size: int) -> None:
        self.events.put_nowait(("drained", link, size))

    def link_lost(self, link: PeerLink, reason: str) -> None:
        self.events.put_nowait(("lost", link, reason))

    async def next(self) -> tuple[object, ...]:
        return await asyncio.wait_for(self.events.get(), 30)


PARENT, CHILD = PeerLink("parent", up=True), PeerLink("child", up=False)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Connections, Links, Connections, Links]]:
    """A parent that listens and a child that has its address."""
    above, below = Links(), Links()
    parent, child = Connections("parent", SECRET, above), Connections("child", SECRET, below)
    address = await parent.listen("127.0.0.1", 0)
    parent.activate({})
    child.activate({"parent": address, "absent": ("127.0.0.1", 1)})
    try:
        yield parent, above, child, below
    finally:
        await child.close()
        await parent.close()


def test_both_sides_of_a_link_are_notified_and_exchange_messages() -> None:
    async def run() -> None:
        async with pair() as (parent, above, child, below):
            child.connect("parent")
            assert await below.next() == ("opened", PARENT)
            assert await above.next() == ("opened", CHILD)
            parent.write(CHILD, list(encode_frame(Heartbeat(True))), 0)
            parent.write(CHILD, list(encode_frame(Data(b"d" * 32, b"data"))), 4)
            assert await above.next() == ("drained", CHILD, 4)
            received = (await below.next())[1:]
            while len(received) < 3:
                received += (await below.next())[2:]
            assert received == (PARENT, Heartbeat(True), Data(b"d" * 32, b"data"))

    asyncio.run(run())


def test_a_parent_that_cannot_be_reached_is_reported_with_the_reason() -> None:
    async def run() -> None:
        async with pair() as (_, _, child, below):
            child.connect("absent")
            reason = "cannot reach absent at 127.0.0.1:1 (Connection refused)"
            assert await below.next() == ("lost", PeerLink("absent", up=True), reason)
            child.connect(GATEWAY)
            _, _, unknown = await below.next()
            assert unknown == "cannot reach the gateway (its address is not known to child)"

    asyncio.run(run())


def test_a_link_that_was_disconnected_is_not_reported_on_its_own_side() -> None:
    async def run() -> None:
        async with pair() as (_, above, child, below):
            child.connect("parent")
            assert await below.next() == ("opened", PARENT)
            assert await above.next() == ("opened", CHILD)
            child.disconnect(PARENT)
            assert await above.next() == ("lost", CHILD, "")
            child.connect("parent")
            assert await below.next() == ("opened", PARENT)

    asyncio.run(run())

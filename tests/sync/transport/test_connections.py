from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage, PeerRefused
from meshgate_sync.relay.commands import PeerLink
from meshgate_sync.relay.frames import Data, Heartbeat, Message, encode_frame
from meshgate_sync.relay.plan import GATEWAY
from meshgate_sync.store.store import Store
from meshgate_sync.transport.connections import ChildHandshake, Connections, ParentHandshake
from meshgate_sync.transport.runner import Runner
from tests.sync.runners import SECRET, EngineStub, RunnerPair, connect
from tests.sync.trees import Content


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_during_close_does_not_delay_it(tmp_path: Path, turns: int) -> None:
    with contextlib.closing(Store(str(tmp_path), snapshots=False)) as store:
        runner = Runner(GATEWAY, store, secret=SECRET, gateway=EngineStub(Content()))
        with socket.create_connection(await runner.listen()) as connection:
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(runner.close(), 10)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    gc.collect()  # a connection left open would warn, and warnings are errors


async def test_a_peer_that_connects_again_replaces_its_earlier_connection(tmp_path: Path) -> None:
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


async def test_both_sides_of_a_link_are_notified_and_exchange_messages() -> None:
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


async def test_a_parent_that_cannot_be_reached_is_reported_with_the_reason() -> None:
    async with pair() as (_, _, child, below):
        child.connect("absent")
        reason = "cannot reach absent at 127.0.0.1:1 (Connection refused)"
        assert await below.next() == ("lost", PeerLink("absent", up=True), reason)
        child.connect(GATEWAY)
        _, _, unknown = await below.next()
        assert unknown == "cannot reach the gateway (its address is not known to child)"


async def test_a_link_that_was_disconnected_is_not_reported_on_its_own_side() -> None:
    async with pair() as (_, above, child, below):
        child.connect("parent")
        assert await below.next() == ("opened", PARENT)
        assert await above.next() == ("opened", CHILD)
        child.disconnect(PARENT)
        assert await above.next() == ("lost", CHILD, "")
        child.connect("parent")
        assert await below.next() == ("opened", PARENT)


MODEL: dict[bytes, object] = {b"a": b"1", b"large": bytes(range(200))}


async def test_a_peer_without_the_secret_is_refused_and_others_are_served(tmp_path: Path) -> None:
    content = Content()
    pair = RunnerPair(tmp_path, content)
    await pair.start()
    _, stranger = await connect(pair.address, b"wrong")
    assert "secret" in str(await asyncio.wait_for(stranger.end, 30))
    reader, writer = await asyncio.open_connection(*pair.address)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    tree = content.tree(MODEL)
    pair.publish(tree)
    await pair.engine.wait(tree.digest, {"h0"})
    await pair.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\1\xff",
        b"".join(encode_frame(Data(b"d" * 32, b"not the data of this digest"))),
    ],
)
async def test_a_malformed_frame_closes_only_its_own_connection(tmp_path: Path, frame: bytes) -> None:
    content = Content()
    pair = RunnerPair(tmp_path, content)
    await pair.start()
    connection, stranger = await connect(pair.address, SECRET)
    await asyncio.wait_for(stranger.opened_event.wait(), 30)
    connection.write([frame], 0)
    await asyncio.wait_for(stranger.end, 30)
    tree = content.tree(MODEL)
    pair.publish(tree)
    await pair.engine.wait(tree.digest, {"h0"})
    await pair.close()


def shake(child: ChildHandshake, parent: ParentHandshake, step: int, after: bytes = b"") -> bytes:
    """Runs the handshake ``step`` bytes at a time; returns the bytes that the parent received after it."""
    to_parent = child.opening
    to_child = b""
    for start in range(0, len(to_parent), step):
        to_child += parent.receive(to_parent[start : start + step])
    proof = None
    for start in range(0, len(to_child), step):
        proof = child.receive(to_child[start : start + step])
    assert proof is not None
    reply, rest = proof
    assert rest == b""
    last = reply + after
    for start in range(0, len(last), step):
        if parent.name is None:
            assert parent.receive(last[start : start + step]) == b""
            rest = parent.rest
        else:
            rest += last[start : start + step]
    return rest


@given(st.integers(1, 200), st.binary(max_size=20))
def test_both_sides_are_authenticated_for_any_split_of_the_bytes(step: int, after: bytes) -> None:
    parent = ParentHandshake(b"secret")
    assert shake(ChildHandshake(b"secret", "höst-1"), parent, step, after) == after
    assert parent.name == "höst-1"


def test_a_parent_without_the_secret_is_refused() -> None:
    child = ChildHandshake(b"secret", "host")
    reply = ParentHandshake(b"other").receive(child.opening)
    with pytest.raises(PeerRefused, match="parent"):
        child.receive(reply)


def test_a_child_without_the_secret_is_refused() -> None:
    parent = ParentHandshake(b"secret")
    parent.receive(ChildHandshake(b"secret", "host").opening)
    with pytest.raises(PeerRefused, match="child"):
        parent.receive(bytes(32))


def test_a_recorded_proof_is_not_accepted_again() -> None:
    child, first, second = ChildHandshake(b"secret", "host"), ParentHandshake(b"secret"), ParentHandshake(b"secret")
    outcome = child.receive(first.receive(child.opening))
    assert outcome is not None
    second.receive(child.opening)
    with pytest.raises(PeerRefused):
        second.receive(outcome[0])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n", b"MGR1" + bytes(16) + b"\xff\xff"])
def test_other_protocols_and_long_names_are_rejected(opening: bytes) -> None:
    with pytest.raises(MalformedMessage):
        ParentHandshake(b"secret").receive(opening)

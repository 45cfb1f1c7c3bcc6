from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate_sync.errors import MalformedMessage, PeerRefused
from meshgate_sync.relay.frames import Data, encode_frame
from meshgate_sync.transport.tcp import ChildHandshake, ParentHandshake
from tests.sync.runners import SECRET, RunnerPair, connect
from tests.sync.trees import Content

MODEL: dict[bytes, object] = {b"a": b"1", b"large": bytes(range(200))}


def test_a_peer_without_the_secret_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def run() -> None:
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

    asyncio.run(run())


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\1\xff",
        b"".join(encode_frame(Data(b"d" * 32, b"not the data of this digest"))),
    ],
)
def test_a_malformed_frame_closes_only_its_own_connection(tmp_path: Path, frame: bytes) -> None:
    async def run() -> None:
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

    asyncio.run(run())


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

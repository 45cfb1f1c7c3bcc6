from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshgate_sync.relay.frames import Data, encode_frame
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

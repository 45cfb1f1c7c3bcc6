"""The server's end of a websocket, with a real client at the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from websockets.asyncio.client import ClientConnection, connect

from meshgate_gateway.http.messages import HeadParser
from meshgate_gateway.http.text_websocket import TextWebSocket


@asynccontextmanager
async def with_websocket() -> AsyncIterator[tuple[TextWebSocket, ClientConnection]]:
    far, near = socket.socketpair()
    near.setblocking(False)
    connecting = asyncio.create_task(_connect(far))
    async with TextWebSocket(near, await _read_head(near)) as websocket:
        client = await connecting
        yield websocket, client
        closing = asyncio.create_task(client.close())
    await closing


async def _connect(sock: socket.socket) -> ClientConnection:
    return await connect("ws://gateway/v1/jobs", sock=sock, proxy=None)


async def _read_head(connection: socket.socket) -> bytes:
    parser = HeadParser()
    while (request := parser.feed(await asyncio.get_running_loop().sock_recv(connection, 4096))) is None:
        continue
    return request.head


async def test_messages_pass_in_both_directions() -> None:
    async with with_websocket() as (websocket, client):
        await client.send("question")
        assert await websocket.receive() == "question"
        assert await websocket.send("answer")
        assert await client.recv() == "answer"


async def test_pings_are_answered_while_other_work_runs() -> None:
    async with with_websocket() as (websocket, client):
        pong = asyncio.get_running_loop().create_future()

        async def ping() -> str:
            await (await client.ping())
            pong.set_result(None)
            return "done"

        assert await websocket.answer_pings_during(ping()) == "done"
        assert pong.done()


async def test_a_peer_that_closes_is_distinguished_from_a_cut() -> None:
    async with with_websocket() as (websocket, client):
        await asyncio.gather(client.close(), websocket.wait_closed())
        assert websocket.closed_by_peer
        assert not await websocket.send("too late")
    async with with_websocket() as (websocket, client):
        client.transport.abort()
        await websocket.wait_closed()
        assert not websocket.closed_by_peer
        assert not await websocket.send("too late")


async def test_a_fragmented_or_binary_message_ends_the_connection() -> None:
    async with with_websocket() as (websocket, client):
        await client.send(b"binary")
        assert await websocket.receive() is None


async def test_a_close_that_arrives_with_a_message_is_not_lost() -> None:
    async with with_websocket() as (websocket, client):
        client.protocol.send_text(b"question")
        client.protocol.send_close()
        client.transport.write(b"".join(client.protocol.data_to_send()))  # in one read
        assert await websocket.receive() == "question"
        assert not websocket.closed_by_peer
        await websocket.wait_closed()
        assert websocket.closed_by_peer
        assert await websocket.receive() is None

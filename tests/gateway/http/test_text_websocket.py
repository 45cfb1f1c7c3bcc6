"""The server's end of a websocket, with a real client at the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import ClientConnection, connect

from meshgate_gateway.http.messages import HeadParser
from meshgate_gateway.http.text_websocket import TextWebSocket

DEADLINE = 60.0


def with_websocket(test: Callable[[TextWebSocket, ClientConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        far, near = socket.socketpair()
        near.setblocking(False)
        connecting = asyncio.create_task(_connect(far))
        async with TextWebSocket(near, await _read_head(near)) as websocket:
            client = await connecting
            await test(websocket, client)
            closing = asyncio.create_task(client.close())
        await closing

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


async def _connect(sock: socket.socket) -> ClientConnection:
    return await connect("ws://gateway/v1/jobs", sock=sock, proxy=None)


async def _read_head(connection: socket.socket) -> bytes:
    parser = HeadParser()
    while (request := parser.feed(await asyncio.get_running_loop().sock_recv(connection, 4096))) is None:
        continue
    return request.head


def test_messages_pass_in_both_directions() -> None:
    async def test(websocket: TextWebSocket, client: ClientConnection) -> None:
        await client.send("question")
        assert await websocket.receive() == "question"
        assert await websocket.send("answer")
        assert await client.recv() == "answer"

    with_websocket(test)


def test_pings_are_answered_while_other_work_runs() -> None:
    async def test(websocket: TextWebSocket, client: ClientConnection) -> None:
        pong = asyncio.get_running_loop().create_future()

        async def ping() -> str:
            await (await client.ping())
            pong.set_result(None)
            return "done"

        assert await websocket.answer_pings_during(ping()) == "done"
        assert pong.done()

    with_websocket(test)


def test_a_peer_that_closes_is_distinguished_from_a_cut() -> None:
    async def closes(websocket: TextWebSocket, client: ClientConnection) -> None:
        await asyncio.gather(client.close(), websocket.wait_closed())
        assert websocket.closed_by_peer
        assert not await websocket.send("too late")

    async def cut(websocket: TextWebSocket, client: ClientConnection) -> None:
        client.transport.abort()
        await websocket.wait_closed()
        assert not websocket.closed_by_peer
        assert not await websocket.send("too late")

    with_websocket(closes)
    with_websocket(cut)


def test_a_fragmented_or_binary_message_ends_the_connection() -> None:
    async def test(websocket: TextWebSocket, client: ClientConnection) -> None:
        await client.send(b"binary")
        assert await websocket.receive() is None

    with_websocket(test)

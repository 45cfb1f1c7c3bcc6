"""The server's end of a websocket, with a real client at the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import ClientConnection, connect

from meshgate_gateway.http.messages import HeadParser, Request
from meshgate_gateway.http.server import listen
from meshgate_gateway.http.text_websocket import TextWebSocket, proxy_bytes
from tests.ports import closed_port

DEADLINE = 60.0
CREDENTIALS = {"Authorization": "Bearer of-the-job", "Meshgate-Caller": "alice"}
HEAD = (
    b"GET /v1/jobs/team/trainer/v1/job?one=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
    b"Meshgate-caller: bob\r\nMeshgate-Proof-Key: 00\r\n\r\n"
)


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


def parsed(head: bytes) -> Request:
    request = HeadParser().feed(head)
    assert request is not None
    return request


def with_proxy(test: Callable[[socket.socket, socket.socket], Awaitable[None]], head: bytes = HEAD) -> None:
    """Runs ``test`` with the client's and the upstream server's socket."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        client, connection = socket.socketpair()
        client.setblocking(False)
        with listen("127.0.0.1", 0) as listener, client:
            port = listener.getsockname()[1]
            proxying = asyncio.create_task(
                proxy_bytes(connection, parsed(head), "/v1/job", "127.0.0.1", port, CREDENTIALS)
            )
            upstream, _ = await loop.sock_accept(listener)
            with upstream:
                await test(client, upstream)
            await proxying

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


async def read(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := await asyncio.get_running_loop().sock_recv(source, size - len(data))):
        data += more
    return data


FORWARDED = (
    b"GET /v1/job?one=1 HTTP/1.1\r\nAuthorization: Bearer of-the-job\r\nMeshgate-Caller: alice\r\nHost: x\r\n\r\n"
)


def test_the_upstream_server_receives_the_head_with_the_new_path_and_other_credentials() -> None:
    """What the client says about the caller does not get there."""

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(FORWARDED)) == FORWARDED

    with_proxy(test)


def test_the_upstream_server_receives_query_and_body() -> None:
    head = b"POST /v1/jobs/team/trainer/v1/job?after=3&wait=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
    credentials = b"Authorization: Bearer of-the-job\r\nMeshgate-Caller: alice\r\n"
    rest = b"Host: x\r\nContent-Length: 4\r\n\r\nbody"
    expected = b"POST /v1/job?after=3&wait=1 HTTP/1.1\r\n" + credentials + rest

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(expected)) == expected

    with_proxy(test, head)


def test_bytes_are_copied_in_both_directions_until_one_side_ends() -> None:
    async def test(client: socket.socket, upstream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await read(upstream, len(FORWARDED))
        await loop.sock_sendall(client, b"question")
        assert await read(upstream, 8) == b"question"
        await loop.sock_sendall(upstream, b"answer")
        assert await read(client, 6) == b"answer"
        client.shutdown(socket.SHUT_WR)
        assert await read(upstream, 1) == b""
        await loop.sock_sendall(upstream, b"rest")
        upstream.shutdown(socket.SHUT_WR)
        assert await read(client, 5) == b"rest"

    with_proxy(test)


def test_the_connection_is_closed_if_the_upstream_server_does_not_listen() -> None:
    async def run() -> None:
        client, connection = socket.socketpair()
        client.setblocking(False)
        with client, closed_port() as port:
            await proxy_bytes(connection, parsed(HEAD), "/v1/job", "127.0.0.1", port, CREDENTIALS)
            assert await read(client, 1) == b""

    asyncio.run(asyncio.wait_for(run(), DEADLINE))

"""A connection forwarded to another server: the rewritten head, then bytes in both directions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from meshgate_gateway.http.byte_proxy import proxy_bytes
from meshgate_gateway.http.messages import HeadParser, Request
from meshgate_gateway.http.server import listen
from tests.ports import closed_port

DEADLINE = 60.0
HEAD = b"GET /v1/jobs/team/trainer/v1/job HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n\r\n"


def parsed(head: bytes) -> Request:
    request = HeadParser().feed(head)
    assert request is not None
    return request


def with_proxy(test: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Runs ``test`` with the client's and the upstream server's socket."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        client, connection = socket.socketpair()
        client.setblocking(False)
        with listen("127.0.0.1", 0) as listener, client:
            port = listener.getsockname()[1]
            proxying = asyncio.create_task(proxy_bytes(connection, parsed(HEAD), "/v1/job", "127.0.0.1", port))
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


def test_the_upstream_server_receives_the_head_with_the_new_path_and_the_credentials() -> None:
    expected = b"GET /v1/job HTTP/1.1\r\nAuthorization: Bearer token\r\nHost: x\r\n\r\n"

    async def test(client: socket.socket, upstream: socket.socket) -> None:
        assert await read(upstream, len(expected)) == expected

    with_proxy(test)


def test_bytes_are_copied_in_both_directions_until_one_side_ends() -> None:
    async def test(client: socket.socket, upstream: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await read(upstream, len(HEAD) - len("/v1/jobs/team/trainer"))
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
            await proxy_bytes(connection, parsed(HEAD), "/v1/job", "127.0.0.1", port)
            assert await read(client, 1) == b""

    asyncio.run(asyncio.wait_for(run(), DEADLINE))

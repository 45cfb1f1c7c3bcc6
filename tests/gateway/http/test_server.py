"""The server's limits on the time and number of pending connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from meshgate_gateway.http.messages import Request, Response
from meshgate_gateway.http.server import Server, listen
from tests.gateway.captured_logs import capture_logs
from tests.ports import has_ipv6

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def hello(_request: Request, _connection: object) -> Response | None:
    return Response(HTTPStatus.OK, {"hello": "world"})


@asynccontextmanager
async def with_server(**options: float) -> AsyncIterator[Dial]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server([listener], hello, **options)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve())
    writers: list[asyncio.StreamWriter] = []

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        yield dial
    finally:
        for writer in writers:
            writer.close()
        serving.cancel()
        await server.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(("api", "reached"), [("10.96.0.1", [True, False]), ("fd00::1", [True, True])])
def test_all_addresses_are_those_of_ipv6_too_in_a_cluster_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, api: str, reached: list[bool]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", api)
    with listen("0.0.0.0", 0) as listener:
        port = listener.getsockname()[1]
        assert [_is_open(loopback, port) for loopback in ("127.0.0.1", "::1")] == reached
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def _is_open(host: str, port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection((host, port)):
        return True
    return False


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_an_incomplete_head_times_out(sent: bytes) -> None:
    async with with_server(head_timeout=0.05) as dial:
        reader, writer = await dial()
        writer.write(sent)
        response = await reader.read()
        assert response.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"no complete request within 0.05 s" in response


async def test_sending_slowly_does_not_extend_the_timeout() -> None:
    async with with_server(head_timeout=0.2) as dial:
        reader, writer = await dial()

        async def dribble() -> None:
            while True:
                writer.write(b"A")
                await asyncio.sleep(0.01)

        dribbling = asyncio.create_task(dribble())
        response = await reader.read()
        dribbling.cancel()
        assert response.startswith(b"HTTP/1.1 408 ")


async def test_above_the_limit_the_oldest_pending_connection_is_closed() -> None:
    async with with_server(max_pending=3) as dial:
        pending = [await dial() for _ in range(3)]
        reader, writer = await dial()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await pending[0][0].read() == b""
        for other_reader, other_writer in pending[1:]:
            other_writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await other_reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_burst_of_connections_does_not_exceed_the_limit_and_is_counted_in_the_log() -> None:
    limit, burst = 8, 200

    with capture_logs() as events:
        async with with_server(max_pending=limit) as dial:
            readers = [reader for reader, _ in await asyncio.gather(*(dial() for _ in range(burst)))]
            ends = [asyncio.ensure_future(reader.read()) for reader in readers]
            while sum(end.done() for end in ends) < burst - limit:
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
    closed = [event["closed"] for event in events if event["event"].startswith("too many pending connections")]
    assert sum(closed) == burst - limit
    assert len(closed) <= 2


async def test_a_thousand_requests_leave_no_connection_open() -> None:
    async with with_server() as dial:

        async def get() -> None:
            reader, writer = await dial()
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.read()).endswith(b'{"hello": "world"}\n')
            writer.close()

        for _ in range(20):
            await asyncio.gather(*(get() for _ in range(50)))


async def test_a_client_that_is_still_sending_reads_the_whole_response() -> None:
    async with with_server() as dial:
        reader, writer = await dial()
        writer.write(b"GET / HTTP/1.1\r\nA: " + b"a" * 60_000)
        response = await reader.read()
        assert response.startswith(b"HTTP/1.1 431 ")
        assert response.endswith(b'16384 bytes"}\n')


async def test_a_failing_handler_fails_only_its_request() -> None:
    async def fail(_request: Request, _connection: object) -> Response | None:
        raise ZeroDivisionError

    listener = listen("127.0.0.1", 0)
    server = Server([listener], fail)
    serving = asyncio.create_task(server.serve())
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
        writer.close()
    serving.cancel()
    await server.close()

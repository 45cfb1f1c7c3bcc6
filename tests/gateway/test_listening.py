"""The limits on strangers: on time, and on how many may dawdle at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import pytest

from meshgate_gateway.http import Request, Response
from meshgate_gateway.server import Server, listen

DEADLINE = 20.0
Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def hello(_request: Request, _connection: object) -> Response | None:
    return Response(HTTPStatus.OK, {"hello": "world"})


def with_server(test: Callable[[Dial], Awaitable[None]], **options: float) -> None:
    async def run() -> None:
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
            await asyncio.wait_for(test(dial), DEADLINE)
        finally:
            for writer in writers:
                writer.close()
            serving.cancel()
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_who_does_not_finish_the_head_in_time_is_told_so(sent: bytes) -> None:
    async def test(dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"no complete request within 0.05 s" in answer

    with_server(test, head_timeout=0.05)


def test_sending_now_and_then_wins_no_time() -> None:
    async def test(dial: Dial) -> None:
        reader, writer = await dial()

        async def dribble() -> None:
            while True:
                writer.write(b"A")
                await asyncio.sleep(0.01)

        dribbling = asyncio.create_task(dribble())
        answer = await reader.read()
        dribbling.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")

    with_server(test, head_timeout=0.2)


def test_when_too_many_dawdle_the_one_that_has_longest_gives_way() -> None:
    async def test(dial: Dial) -> None:
        dawdlers = [await dial() for _ in range(3)]
        reader, writer = await dial()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await dawdlers[0][0].read() == b""
        for dawdling, late in dawdlers[1:]:
            late.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await dawdling.read()).startswith(b"HTTP/1.1 200 OK\r\n")

    with_server(test, max_unanswered=3)


def test_a_thousand_visits_leave_nothing_open() -> None:
    async def test(dial: Dial) -> None:
        async def visit() -> None:
            reader, writer = await dial()
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.read()).endswith(b'{"hello": "world"}\n')
            writer.close()

        for _ in range(20):
            await asyncio.gather(*(visit() for _ in range(50)))

    with_server(test)


def test_an_answer_is_read_whole_by_a_client_that_still_sends() -> None:
    async def test(dial: Dial) -> None:
        reader, writer = await dial()
        writer.write(b"GET / HTTP/1.1\r\nA: " + b"a" * 60_000)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert answer.endswith(b'16384 bytes"}\n')

    with_server(test)


def test_a_failing_answer_is_an_error_of_that_request_alone() -> None:
    async def run() -> None:
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

    asyncio.run(run())

"""The socket to which worker processes connect: who may, and what strangers can make it hold."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshgate_gateway.engine import worker_streams
from meshgate_gateway.engine.output import Printed
from meshgate_gateway.engine.worker_streams import HELLO_LIMIT, Source, WorkerStreams
from tests.gateway.engine.in_memory import on_a_loop


class Heard:
    """A listening socket and what it tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended: list[tuple[int, int, int]] = []
        self.printed = asyncio.Event()
        self.over = asyncio.Event()
        self.streams = WorkerStreams(lambda mesh, rank: Source("workers", "workers-0"), self._printed, self._ended)

    def _printed(self, lines: list[Printed]) -> None:
        self.lines += [line.text for line in lines]
        self.printed.set()

    def _ended(self, mesh: int, rank: int, pid: int) -> None:
        self.ended.append((mesh, rank, pid))
        self.over.set()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.streams.address.removeprefix("unix:"))

    async def says(self, data: bytes) -> bool:
        """Whether who says this is heard out."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            writer.write(b"a line\n")
            printed = asyncio.ensure_future(self.printed.wait())
            closed = asyncio.ensure_future(reader.read())
            await asyncio.wait([printed, closed], return_when=asyncio.FIRST_COMPLETED, timeout=10)
            return self.printed.is_set()
        finally:
            printed.cancel()
            closed.cancel()
            writer.close()

    def hello(self, **other: object) -> bytes:
        said = {"secret": self.streams.secret, "mesh": 1, "rank": 0, "pid": 7, "stream": "stdout", **other}
        return json.dumps(said).encode() + b"\n"


@asynccontextmanager
async def listening() -> AsyncIterator[Heard]:
    heard = Heard()
    await heard.streams.listen(None)
    try:
        yield heard
    finally:
        await heard.streams.close()


@on_a_loop
async def test_a_worker_is_heard_and_its_end_is_told() -> None:
    async with listening() as heard:
        assert await heard.says(heard.hello())
        await asyncio.wait_for(heard.over.wait(), 10)
        assert heard.lines == ["a line"]
        assert heard.ended == [(1, 0, 7)]


@on_a_loop
async def test_what_a_process_has_printed_is_read_although_it_is_dropped() -> None:
    async with listening() as heard:
        reader, writer = await heard.connect()
        writer.write(heard.hello() + b"first\n")
        await asyncio.wait_for(heard.printed.wait(), 10)
        heard.streams.flow(False)
        writer.write(b"last\n")
        heard.streams.drop(1)
        assert await asyncio.wait_for(reader.read(), 10) == b""  # at which it ends itself
        writer.close()
        heard.streams.flow(True)
        await asyncio.wait_for(heard.over.wait(), 10)
        assert heard.ended == [(1, 0, 7)]
    assert heard.lines == ["first", "last"]


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\n",
        b"[" * 2000 + b"\n",
        b'{"secret": "\\u00e9\\u00e9", "mesh": 1, "rank": 0, "pid": 7, "stream": "stdout"}\n',
        b'{"secret": "\\ud800", "mesh": 1, "rank": 0, "pid": 7, "stream": "stdout"}\n',
        b'{"secret": "0123", "mesh": 1, "rank": 0, "pid": 7, "stream": "stdout"}\n',
        b"x" * (HELLO_LIMIT + 1),
        b"x" * 3_000_000,
        b"",
    ],
    ids=range(9),
)
@on_a_loop
async def test_a_stranger_is_turned_away_with_a_line_in_the_log(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    broken: list[object] = []
    loop.set_exception_handler(lambda loop, context: broken.append(context))
    caplog.set_level(logging.WARNING)
    async with listening() as heard:
        assert not await heard.says(said or b"\n")
        assert not heard.ended
    assert not broken
    assert "connected to the worker socket" in caplog.text


@on_a_loop
async def test_little_is_read_of_who_has_not_said_what_it_is() -> None:
    async with listening() as heard:
        reader, writer = await heard.connect()
        sent = 0
        while sent < 50_000_000 and not reader.at_eof():
            writer.write(bytes(65_536))
            sent += 65_536
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except (asyncio.TimeoutError, ConnectionError):
                break
        writer.close()
        assert sent < 2_000_000


@on_a_loop
async def test_of_too_many_strangers_the_oldest_gives_way_and_workers_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_streams, "MAX_STRANGERS", 3)
    async with listening() as heard:
        strangers = [await heard.connect() for _ in range(3)]
        assert await heard.says(heard.hello())
        assert await strangers[0][0].read() == b""
        assert len(heard.streams._strangers) == 2
        for _, writer in strangers:
            writer.close()

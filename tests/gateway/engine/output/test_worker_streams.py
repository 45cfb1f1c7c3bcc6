"""The socket that worker processes connect to: which connections it accepts, and how much it buffers for others."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from meshgate_gateway.engine.interfaces import Answer
from meshgate_gateway.engine.output import worker_streams
from meshgate_gateway.engine.output.connections import MeshOutput, OutputConnection
from meshgate_gateway.engine.output.lines import PrintedLine
from meshgate_gateway.engine.output.worker_streams import HELLO_LIMIT, WorkerStreams
from tests.gateway.engine.fakes import until


@pytest.fixture(autouse=True)
def _results_wait_for_output_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 1000)


class Referring:
    """A process with references, which gets an answer to each line."""

    def __init__(
        self, place: tuple[int, int], write: Callable[[bytes], object], said: list[tuple[tuple[int, int], bytes]]
    ) -> None:
        self._place, self._write, self._said = place, write, said

    def received(self, line: bytes) -> None:
        self._said.append((self._place, line))
        self._write(b"+\n")

    def end(self) -> None:
        self._said.append((self._place, b""))
        self._write(b"too late")


class Listener:
    """A listening socket and what it reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.late: list[str] = []
        self.reports: list[tuple[str, int, int]] = []
        self.labels: list[tuple[str, int, str]] = []
        self.asked: list[tuple[int, int, int, bool, bool]] = []
        self.label = ("workers", "workers-0")
        self.ended: list[tuple[int, int, int]] = []
        self.printed = asyncio.Event()
        self.closed = asyncio.Event()
        self.watched: list[tuple[int, int]] = []
        self.said: list[tuple[tuple[int, int], bytes]] = []
        self.streams = WorkerStreams(
            label=lambda mesh, rank: self.label,
            printed=self._printed,
            ended=self._ended,
            watched=self._watched,
            controllers=self._controllers,
            reported=self._reported,
            late=self.late.append,
            ask=self._ask,
            fetch_kept=self._fetch_kept,
            refers=self._refers,
        )

    def _ask(self, mesh: int, rank: int, nbytes: int, *, reply: bool, kept: bool) -> str:
        self.asked.append((mesh, rank, nbytes, reply, kept))
        return "too large" if nbytes > 100 else ""

    def _reported(self, port: str, messages: int, nbytes: int, answer: Answer) -> None:
        self.reports.append((port, messages, nbytes))
        answer(False, 1.5)

    def _printed(self, lines: list[PrintedLine]) -> None:
        self.lines += [line.text for line in lines]
        self.labels += [(line.mesh, line.rank, line.host) for line in lines]
        self.printed.set()

    def _ended(self, mesh: int, rank: int, pid: int) -> None:
        self.ended.append((mesh, rank, pid))
        self.closed.set()

    async def _fetch_kept(self, mesh: int, rank: int, number: int, at: int) -> bytes:
        return f"+{(mesh, rank, number, at)}".encode()

    def _refers(self, mesh: int, rank: int, write: Callable[[bytes], object]) -> Referring:
        return Referring((mesh, rank), write, self.said)

    async def _controllers(self) -> bytes:
        return b"+a pickle"

    def _watched(self, mesh: int, rank: int) -> None:
        self.watched.append((mesh, rank))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.streams.address.removeprefix("unix:"))

    async def accepts(self, data: bytes) -> bool:
        """Whether the output of a connection that starts with ``data`` is read."""
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
        hello = {"secret": self.streams.secret, "mesh": 1, "rank": 0, "pid": 7, "stream": "stdout", **other}
        return json.dumps(hello).encode() + b"\n"


@asynccontextmanager
async def listening(host: str | None = None) -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.streams.listen(host)
    try:
        yield listener
    finally:
        await listener.streams.close()


async def test_a_workers_output_and_its_end_are_reported() -> None:
    async with listening() as listener:
        assert await listener.accepts(listener.hello())
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert listener.lines == ["a line"]
        assert listener.ended == [(1, 0, 7)]


async def test_output_of_a_dropped_process_is_read_to_the_end() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
        writer.write(listener.hello() + b"first\n")
        await asyncio.wait_for(listener.printed.wait(), 10)
        listener.streams.set_reading(False)
        writer.write(b"last\n")
        listener.streams.drop(1)
        assert await asyncio.wait_for(reader.read(), 10) == b""  # at which a process ends itself
        writer.close()
        listener.streams.set_reading(True)
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert listener.ended == [(1, 0, 7)]
    assert listener.lines == ["first", "last"]


@pytest.mark.parametrize(
    "sent",
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
async def test_a_connection_that_is_not_a_worker_is_closed_and_logged(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    broken: list[object] = []
    loop.set_exception_handler(lambda loop, context: broken.append(context))
    caplog.set_level(logging.WARNING)
    async with listening() as listener:
        assert not await listener.accepts(sent or b"\n")
        assert not listener.ended
    assert not broken
    assert "closed a connection to the worker socket" in caplog.text


async def test_little_is_read_from_a_connection_that_has_not_identified_itself() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
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


async def test_above_the_limit_the_oldest_unidentified_connection_is_closed_and_workers_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_streams, "MAX_UNIDENTIFIED", 3)
    async with listening() as listener:
        unidentified = [await listener.connect() for _ in range(3)]
        assert await listener.accepts(listener.hello())
        assert await unidentified[0][0].read() == b""
        assert len(listener.streams._unidentified) == 2
        for _, writer in unidentified:
            writer.close()


async def test_output_is_not_read_while_reading_is_paused() -> None:
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello() + b"first\n")
        await asyncio.wait_for(listener.printed.wait(), 10)
        listener.printed.clear()
        listener.streams.set_reading(False)
        writer.write(b"second\n")
        await asyncio.sleep(3 * worker_streams.FOLDING_WINDOW)  # it would have been reported by now
        assert listener.lines == ["first"]
        listener.streams.set_reading(True)
        await asyncio.wait_for(listener.printed.wait(), 10)
        assert listener.lines == ["first", "second"]
        writer.close()


async def test_the_last_lines_keep_their_label_although_the_mesh_is_gone() -> None:
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello(rank=3) + b"first\n")
        await asyncio.wait_for(listener.printed.wait(), 10)
        listener.label = ("", "")
        writer.write(b"last")
        writer.close()
        await until(lambda: len(listener.lines) == 2)
        assert listener.labels == [("workers", 3, "workers-0")] * 2


async def test_an_unfinished_line_is_reported_although_its_end_is_still_missing() -> None:
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello() + b"loading 10%")
        await asyncio.wait_for(listener.printed.wait(), 10)
        assert listener.lines == ["loading 10%"]
        writer.close()


async def test_only_the_end_of_standard_output_is_the_end_of_a_process() -> None:
    async with listening() as listener:
        assert await listener.accepts(listener.hello(stream="stderr"))
        assert await listener.accepts(listener.hello())
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert len(listener.ended) == 1


async def test_a_process_of_a_dropped_mesh_that_connects_late_is_closed_at_once() -> None:
    async with listening() as listener:
        listener.streams.drop(1)
        reader, writer = await listener.connect()
        writer.write(listener.hello())
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_what_a_process_of_a_dropped_mesh_printed_before_it_was_known_is_read() -> None:
    async with listening() as listener:
        listener.streams.drop(1)
        reader, writer = await listener.connect()
        writer.write(listener.hello() + b"last\n")
        assert await asyncio.wait_for(reader.read(), 10) == b""  # at which a process ends itself
        writer.close()
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert listener.ended == [(1, 0, 7)]
    assert listener.lines == ["last"]


async def test_a_flood_is_handled_in_bounded_batches_between_which_others_have_their_turn() -> None:
    count = 100_000
    async with listening() as listener:
        batches: list[int] = []
        turns_at: list[int] = []
        turns = 0

        def printed(lines: list[PrintedLine]) -> None:
            batches.append(len(lines))
            turns_at.append(turns)

        listener.streams._printed = printed
        _, writer = await listener.connect()
        writer.write(listener.hello() + b"\n" * count)
        while sum(batches) < count:
            turns += 1
            await asyncio.sleep(0)
        writer.close()
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert max(batches) <= worker_streams.MAX_BATCH
        most_in_a_turn = max(turns_at.count(turn) for turn in set(turns_at))
        assert most_in_a_turn <= worker_streams.PIECE // worker_streams.MAX_BATCH + 1


async def test_a_watchers_connection_reports_the_process_and_its_end_and_prints_nothing() -> None:
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello(mesh=-3, rank=2, stream="watch") + b"not output\n")
        await until(lambda: listener.watched)
        assert (listener.watched, listener.ended) == ([(-3, 2)], [])
        writer.close()
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert (listener.ended, listener.lines) == ([(-3, 2, 7)], [])


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_the_kernel_closes_a_watchers_connection_through_a_network_if_its_host_is_lost(run: Any) -> None:
    async def connected() -> None:
        async with listening("127.0.0.1") as listener:
            _, writer = await asyncio.open_connection(*listener.streams.address.split(":")[1:])
            accepted: list[Any] = []
            watch = listener.streams._watch

            async def watched(hello: Any, reader: asyncio.StreamReader) -> None:
                accepted.append(reader._transport.get_extra_info("socket"))  # type: ignore[attr-defined]
                await watch(hello, reader)

            listener.streams._watch = watched  # type: ignore[method-assign]
            writer.write(listener.hello(mesh=-3, rank=2, stream="watch"))
            await until(lambda: listener.watched)
            (connection,) = accepted
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            writer.close()
            await asyncio.wait_for(listener.closed.wait(), 10)

    run(connected())


async def test_a_worker_that_asks_for_the_controllers_gets_them() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
        writer.write(listener.hello(stream="controllers"))
        assert await asyncio.wait_for(reader.read(), 10) == b"+a pickle"
        writer.close()


async def test_a_worker_that_has_a_reference_to_a_kept_value_gets_an_answer() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
        writer.write(listener.hello(stream="kept", object=5, at=7))
        assert await asyncio.wait_for(reader.read(), 10) == b"+(1, 0, 5, 7)"
        writer.close()


async def test_what_a_process_says_of_its_references_is_passed_on_until_it_ends() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
        writer.write(listener.hello(stream="references", rank=3) + b"+5\n=1 0 9\n")
        assert await reader.readexactly(4) == b"+\n+\n"
        writer.close()
        await until(lambda: len(listener.said) == 3)
        assert listener.said == [((1, 3), b"+5\n"), ((1, 3), b"=1 0 9\n"), ((1, 3), b"")]


async def test_a_worker_that_asks_for_room_gets_it_or_the_reason_why_not() -> None:
    async with listening() as listener:
        for nbytes, answer in ((100, b"+"), (101, b"-too large")):
            reader, writer = await listener.connect()
            writer.write(listener.hello(stream="large", nbytes=nbytes, reply=True, kept=nbytes == 101))
            assert await asyncio.wait_for(reader.read(), 10) == answer
            writer.close()
        assert [asked[2:] for asked in listener.asked] == [(100, True, False), (101, True, True)]


async def test_a_process_reports_what_it_sends_to_ports_and_is_answered() -> None:
    async with listening() as listener:
        reader, writer = await listener.connect()
        writer.write(listener.hello(stream="ports") + b'{"port": "a port", "messages": 2, "nbytes": 9}\n')
        assert json.loads(await reader.readline()) == {"port": "a port", "closed": False, "factor": 1.5}
        assert listener.reports == [("a port", 2, 9)]
        writer.close()


async def test_the_processes_of_a_cancelled_call_hear_of_it_on_their_standard_output() -> None:
    async with listening() as listener:
        connected = []
        for rank in range(3):
            reader, writer = await listener.connect()
            writer.write(listener.hello(rank=rank) + b"%d\n" % rank)
            connected.append((reader, writer))
        error_reader, error_writer = await listener.connect()
        error_writer.write(listener.hello(rank=0, stream="stderr") + b"3\n")
        connected.append((error_reader, error_writer))
        await until(lambda: len(listener.lines) == 4)
        listener.streams.cancel(1, {0, 2}, 12)
        listener.streams.cancel(9, {0, 2}, 13)  # an unknown mesh
        assert await connected[0][0].readline() == b"12\n"
        assert await connected[2][0].readline() == b"12\n"
        listener.streams.cancel(1, {3}, 15)
        listener.streams.cancel(1, {3}, 16)
        reader, writer = await listener.connect()  # of a process that starts
        writer.write(listener.hello(rank=3))
        assert [await reader.readline() for _ in range(2)] == [b"15\n", b"16\n"]
        connected.append((reader, writer))
        listener.streams.cancel(1, {4}, 17)
        listener.streams.drop(1)
        listener.streams.cancel(1, {0, 1, 2}, 14)  # too late
        assert not any(mesh == 1 for mesh, _ in listener.streams._cancelled)
        assert [await reader.read() for reader, _ in connected] == [b""] * 5
        for _, writer in connected:
            writer.close()


async def printing(listener: Listener, **hello: object) -> asyncio.StreamWriter:
    """The connection of a process whose first line has been printed."""
    _, writer = await listener.connect()
    writer.write(listener.hello(**hello) + b"started\n")
    await until(lambda: "started" in listener.lines)
    listener.lines.clear()
    return writer


async def test_there_is_nothing_to_wait_for_if_nothing_was_printed() -> None:
    async with listening() as listener:
        assert listener.streams.unread(1, [0]) is None
        writer = await printing(listener)
        assert listener.streams.unread(1, [0]) is None
        writer.close()


async def test_what_was_written_before_is_printed_when_the_wait_is_over() -> None:
    async with listening() as listener:
        out, err = await printing(listener), await printing(listener, stream="stderr")
        lines = [f"{number} of many" for number in range(1000)]  # takes several turns of the event loop
        out.write("".join(f"{line}\n" for line in lines).encode())
        err.write(b"an error\n")
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        await unread
        assert sorted(listener.lines) == sorted([*lines, "an error"])
        assert listener.late == []
        out.close()
        err.close()


async def test_a_line_in_the_folding_window_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as listener:
        writer = await printing(listener)
        monkeypatch.setattr(worker_streams, "FOLDING_WINDOW", 1000)
        writer.write(b"a line\n")
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        await unread
        assert listener.lines == ["a line"]
        writer.write(b"another\n")
        await until(lambda: listener.streams._batch)
        assert listener.streams.unread(1, [0]) is None
        assert listener.lines == ["a line", "another"]
        writer.close()


async def test_a_line_without_an_end_is_printed_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "UNFINISHED_LINE_TIMEOUT", 1000)
    async with listening() as listener:
        writer = await printing(listener)
        writer.write(b"no end")
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        await unread
        assert listener.lines == ["no end"]
        assert listener.streams.unread(1, [0]) is None
        writer.close()


async def test_output_of_other_ranks_and_meshes_is_not_waited_for() -> None:
    async with listening() as listener:
        writer = await printing(listener, rank=3)
        writer.write(b"a line\n")
        assert listener.streams.unread(1, [0, 1, 2]) is None
        assert listener.streams.unread(2, [3]) is None
        assert listener.streams.unread(1, [3]) is not None
        writer.close()


async def test_the_end_of_a_process_ends_the_wait() -> None:
    async with listening() as listener:
        writer = await printing(listener)
        writer.write(b"last words")
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        writer.close()
        await unread
        assert listener.lines == ["last words"]
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert listener.streams.unread(1, [0]) is None


async def test_nothing_waits_while_the_client_takes_no_output() -> None:
    async with listening() as listener:
        writer = await printing(listener)
        listener.streams.set_reading(False)
        writer.write(b"a line\n")
        assert listener.streams.unread(1, [0]) is None
        writer.close()


async def test_what_a_reply_says_was_printed_is_waited_for_until_it_arrives() -> None:
    async with listening() as listener:
        out, err = await printing(listener), await printing(listener, stream="stderr")
        before = len(listener.hello()) + len("started\n")
        listener.streams.mark(1, 0, (before + 7, 0))
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        assert listener.streams.unread(1, [1]) is None
        out.write(b"a line\n")
        await unread
        assert listener.lines == ["a line"]
        assert listener.streams.unread(1, [0]) is None
        out.close()
        err.close()


async def test_a_reply_that_arrives_before_the_output_connections_waits_for_both() -> None:
    async with listening() as listener:
        position = len(listener.hello()) + len("a line\n")
        for rank in range(2):
            listener.streams.mark(1, rank, (0, 0))
            listener.streams.mark(1, rank, (position, len(listener.hello(stream="stderr"))))
        unread, also = listener.streams.unread(1, [0, 1, 2]), listener.streams.unread(1, [1])
        assert unread is not None
        assert also is not None
        assert listener.streams.unread(1, [2]) is None
        writers = [await printing(listener, rank=2)]
        for rank in range(2):
            for stream in ("stdout", "stderr"):
                assert not unread.done()
                _, writer = await listener.connect()
                writers.append(writer)
                writer.write(listener.hello(rank=rank, stream=stream))
                connected = len(writers)
                await until(lambda: len(listener.streams._connected[1]) == connected)  # noqa: B023
        assert not unread.done()
        for number in (1, 3):
            writers[number].write(b"a line\n")
        await asyncio.gather(unread, also)
        assert (listener.lines, listener.late) == (["a line", "a line"], [])
        listener.streams.mark(1, 0, (position, 0))
        assert listener.streams.unread(1, [0, 1]) is None
        for writer in writers:
            writer.close()


async def test_the_output_connections_of_processes_that_have_ended_are_not_waited_for() -> None:
    async with listening() as listener:
        other = await printing(listener, rank=7, stream="stderr")
        writers = [await printing(listener, stream=stream) for stream in ("stdout", "stderr")]
        for writer in writers:
            writer.close()
        await until(lambda: listener.ended)
        listener.streams.mark(1, 0, (1000, 0))
        assert listener.streams.unread(1, [0]) is None
        other.close()
        await until(lambda: not listener.streams._outputs)
        listener.streams.mark(1, 0, (1000, 0))
        assert listener.streams.unread(1, [0]) is None


async def test_the_end_of_a_mesh_ends_the_wait_for_output_connections() -> None:
    async with listening() as listener:
        for mesh in (1, 2):
            listener.streams.mark(mesh, 0, (1000, 0))
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        listener.streams.drop(1)
        await unread
        listener.streams.mark(1, 0, (1000, 0))
        assert listener.streams.unread(1, [0]) is None
        listener.streams.set_reading(False)
        assert listener.streams.unread(2, [0]) is None


async def test_output_connections_that_come_too_late_are_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as listener:
        monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 0.01)
        position = len(listener.hello()) + len("started\n") + len("a line\n")
        for _ in range(2):
            listener.streams.mark(1, 0, (position, 0))
            unread = listener.streams.unread(1, [0])
            if not listener.late:
                assert unread is not None
                await unread
            else:
                assert unread is None
        assert len(listener.late) == 1
        monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 1000)
        err, out = await printing(listener, stream="stderr"), await printing(listener)
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        out.write(b"a line\n")
        await unread
        assert listener.lines == ["a line"]
        for writer in (out, err):
            writer.close()


async def test_what_did_not_arrive_in_time_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as listener:
        writer = await printing(listener)
        monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 0.01)
        listener.streams.mark(1, 0, (len(listener.hello()) + len("started\n") + 7, 0))
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        await unread
        assert len(listener.late) == 1
        assert listener.streams.unread(1, [0]) is None
        listener.streams.mark(1, 0, (len(listener.hello()) + len("started\n") + 14, 0))
        assert listener.streams.unread(1, [0]) is None
        writer.write(b"a line\n")
        await until(lambda: listener.lines)
        monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 1000)
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        writer.write(b"a line\n")
        await unread
        assert len(listener.lines) == 2
        writer.close()


async def test_a_wait_that_takes_too_long_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "OUTPUT_TIMEOUT", 0.001)
    async with listening() as listener:
        writer = await printing(listener)
        for _ in range(2):
            writer.write(b"a line\n")
            unread = listener.streams.unread(1, [0])
            assert unread is not None
            listener.streams.set_reading(False)
            await unread
            listener.streams.set_reading(True)
        (late,) = listener.late
        assert late.startswith("a result was sent before all that its ranks had printed")
        writer.close()


async def test_a_wait_that_is_over_does_not_expire() -> None:
    events: list[str] = []
    countdown = worker_streams._Countdown(2, lambda: events.append("done"), lambda: events.append("expired"))
    countdown.count()
    assert (events, countdown._timer.cancelled()) == ([], False)
    countdown.count()
    assert (events, countdown._timer.cancelled()) == (["done"], True)


async def test_a_process_that_was_not_run_for_a_while_still_reads_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    async with listening() as listener:
        writer = await printing(listener)
        writer.write(b"a line\n")
        unread = listener.streams.unread(1, [0])
        assert unread is not None
        passed = worker_streams.OUTPUT_TIMEOUT
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + passed)
        await unread
        assert (listener.lines, listener.late) == (["a line"], [])
        writer.close()


async def test_a_line_that_was_read_whole_is_not_cut_where_output_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as listener:
        writer = await printing(listener)
        monkeypatch.setattr(worker_streams, "UNFINISHED_LINE_TIMEOUT", 0)
        monkeypatch.setattr(worker_streams, "TURN", 0)  # pauses after each piece
        monkeypatch.setattr(worker_streams, "PAUSE", 1)
        writer.write(b"x" * (3 * worker_streams.PIECE) + b"\n")
        await until(lambda: listener.lines)
        assert [len(line) for line in listener.lines] == [3 * worker_streams.PIECE]
        writer.close()


async def test_processes_that_print_nothing_are_not_looked_at() -> None:
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello())
        await until(lambda: listener.streams._outputs)
        outputs = listener.streams._outputs[1]
        assert not outputs.selector.select(0)
        assert not outputs.busy
        writer.close()


async def test_a_connection_that_cannot_be_watched_ends_its_process_and_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(outputs: MeshOutput, output: OutputConnection) -> None:
        raise ConnectionError("no more connections can be watched")

    monkeypatch.setattr(MeshOutput, "add", refuse)
    async with listening() as listener:
        _, writer = await listener.connect()
        writer.write(listener.hello())
        await asyncio.wait_for(listener.closed.wait(), 10)
        assert (listener.ended, listener.streams._outputs) == ([(1, 0, 7)], {})
        writer.close()

"""The socket that worker processes connect to: it carries what they print, and its end shows that a process ended.

Each process of a session holds two connections to its engine for life, one per output stream (``set_up_process`` in
``on_worker/process.py`` opens them). The kernel closes them however the process dies, so a death is known at once,
and a process whose engine is gone ends itself. Monarch's supervision reports the reason a moment later.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import async_timeout
from pydantic import BaseModel

from meshgate_gateway.engine.interfaces import Answer, Ask
from meshgate_gateway.engine.on_worker.process import keep_alive
from meshgate_gateway.engine.output.connections import CountingReader, MeshOutput, OutputConnection, WorkerHello
from meshgate_gateway.engine.output.lines import LineEnd, PrintedLine
from meshgate_sync.transport.connections import stop_listening

log = logging.getLogger(__name__)

HELLO_LIMIT = 4096  # bytes read from a connection that has not identified itself
HELLO_TIMEOUT = 10.0
MAX_UNIDENTIFIED = 1024  # connections that have not identified themselves; above it, the oldest is closed
FOLDING_WINDOW = 0.02  # seconds within which equal lines of many ranks are folded
PIECE = 4096  # bytes of output that are handled in one turn of the event loop
MAX_BATCH = 1024  # lines that are folded at once
TURN = 0.001  # seconds of the event loop that output takes before it pauses, so that calls proceed
PAUSE = 3  # times as long as that; also leaves the client, which prints more slowly, time for replies
OUTPUT_TIMEOUT = 0.5  # seconds that a result waits for output of its ranks that is not read yet
TIMEOUT_PARTS = 5  # of that; between them what has arrived is read, even if this process was not run for a while
LATE_INTERVAL = 60.0  # seconds between two reports of results that came before output
UNFINISHED_LINE_TIMEOUT = 0.1  # seconds after which a line without an end is sent as it is


_LATE = (
    "a result was sent before all that its ranks had printed: reading that took more than "
    f"{OUTPUT_TIMEOUT} s. The lines follow"
)


class PortReport(BaseModel):
    """What a process has sent to a port since its last report."""

    port: str
    messages: int
    nbytes: int


@dataclass(slots=True)
class _Early:
    """A process whose replies have arrived before its output connections."""

    mark: tuple[int, int]  # of the last reply
    waiting: list[Callable[[], None]] = field(default_factory=list)  # for these connections
    late: bool = False  # they came too late once, so no result waits for them


class Referring(Protocol):
    """A process that has references to kept values."""

    def received(self, line: bytes) -> None: ...

    def end(self) -> None: ...


class WorkerStreams:
    """Listens for the processes of one session.

    ``label(mesh, rank)`` returns the names of a process's mesh and host, or empty strings if the mesh is unknown.
    ``printed(lines)`` receives output, one batch per folding window. ``ended(mesh, rank, pid)`` is called when the
    connection of a process closes, ``watched(mesh, rank)`` when a watcher connects. ``controllers()`` returns
    the answer to a worker that asks for the session's controllers; ``reported(port, messages, nbytes, answer)`` gets
    what a worker has sent to a port; ``ask`` decides on large messages; ``fetch_kept(mesh, rank, object, at)`` gets a
    kept value to a worker that has a reference to it, and returns what to answer; ``refers(mesh, rank, write)`` returns
    what gets each line that a process with references sends, and to which ``write`` answers; ``late(text)`` gets a
    line for the user when a result could not wait for output. All are called on the event loop.
    """

    def __init__(
        self,
        *,
        label: Callable[[int, int], tuple[str, str]],
        printed: Callable[[list[PrintedLine]], None],
        ended: Callable[[int, int, int], None],
        watched: Callable[[int, int], None],
        controllers: Callable[[], Awaitable[bytes]],
        reported: Callable[[str, int, int, Answer], None],
        late: Callable[[str], None],
        ask: Ask,
        fetch_kept: Callable[[int, int, int, int], Awaitable[bytes]],
        refers: Callable[[int, int, Callable[[bytes], object]], Referring],
    ) -> None:
        self._label, self._printed, self._ended, self._watched = label, printed, ended, watched
        self._controllers, self._reported, self._late, self._ask = controllers, reported, late, ask
        self._fetch_kept, self._refers = fetch_kept, refers
        self._outputs: dict[int, MeshOutput] = {}  # by mesh
        self._met: set[int] = set()  # meshes that have had an output connection
        self._early: dict[tuple[int, int], _Early] = {}  # by mesh and rank
        self._reported_late = float("-inf")
        self.secret = secrets.token_hex(16)
        self.address = ""
        self._server: asyncio.Server | None = None
        self._folder: str | None = None
        self._batch: list[PrintedLine] = []
        self._loop_time = 0.0  # seconds of the event loop that output has taken since it last paused
        self._pause: asyncio.Future[None] | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        # Dictionaries instead of sets, because their order does not depend on addresses: the simulation replays.
        self._readers: dict[asyncio.Task[None], None] = {}
        self._unidentified: dict[asyncio.Task[None], None] = {}  # of the readers, oldest first
        self._connected: dict[int, dict[asyncio.StreamWriter, WorkerHello]] = {}
        self._cancelled: dict[tuple[int, int], list[int]] = {}  # calls, by mesh and rank of processes that still start
        self._dropped: set[int] = set()
        self._reading = asyncio.Event()
        self._reading.set()
        self.paused = False  # whether output is not read

    async def listen(self, host: str | None) -> None:
        """Listens on a free port of ``host``, or, if it is None, on a unix socket that only this user can reach."""
        if host is None:
            self._folder = tempfile.mkdtemp(prefix="meshgate-")
            path = os.path.join(self._folder, "workers")
            self._server = await asyncio.get_running_loop().create_unix_server(self._protocol, path)
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.get_running_loop().create_server(self._protocol, host, 0)
            self.address = f"tcp:{host}:{self._server.sockets[0].getsockname()[1]}"

    def set_reading(self, reading: bool) -> None:
        """Pauses or resumes reading output. Workers block if they print more than a socket holds during a pause."""
        self.paused = not reading
        if reading:
            self._reading.set()
        else:
            self._reading.clear()

    def drop(self, mesh: int) -> None:
        """Ends the processes of a mesh, including those that have not connected yet. Output until then is still read.

        Each process ends itself when it reads the end of its connection.
        """
        self._dropped.add(mesh)
        for key in [key for key in self._early if key[0] == mesh]:
            _wake(self._early.pop(key))
        for key in [key for key in self._cancelled if key[0] == mesh]:
            del self._cancelled[key]
        for writer in self._connected.get(mesh, ()):
            if not writer.is_closing():
                writer.write_eof()

    def cancel(self, mesh: int, ranks: Collection[int], call: int) -> None:
        """Lets processes know that ``call`` is cancelled, those that have not connected yet once they do. They read
        nothing else, so a line never waits."""
        if mesh in self._dropped:
            return
        starting = set(ranks)
        for writer, hello in self._connected.get(mesh, {}).items():
            if hello.stream == "stdout" and hello.rank in ranks:
                starting.discard(hello.rank)
                _write_cancelled(writer, [call])
        for rank in starting:
            self._cancelled.setdefault((mesh, rank), []).append(call)

    async def close(self) -> None:
        """Stops listening and closes every connection, which ends the processes."""
        if self._server is not None:
            await stop_listening(self._server)
        for reader in tuple(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._flush()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def mark(self, mesh: int, rank: int, positions: tuple[int, int]) -> None:
        """A reply of this process comes after that much of its output (``Reply.printed``)."""
        outputs = self._outputs.get(mesh)
        known = outputs.mark(rank, positions) if outputs is not None else mesh in self._met
        if not known and mesh not in self._dropped:
            self._early.setdefault((mesh, rank), _Early(positions)).mark = positions

    def unread(self, mesh: int, ranks: Collection[int]) -> asyncio.Future[None] | None:
        """What to wait for until all that these processes have written is passed to ``printed``; None: it is.

        What a process writes to a unix socket is readable here at once; through a network, its reply has a mark. The
        future is done after ``OUTPUT_TIMEOUT`` in any case, or after twice that if a process has replied before its
        output connections were here. While reading is paused, it is None, because the client does not take what it
        gets. Output that came too late once is not waited for until it has arrived.
        """
        if self._early and self._reading.is_set():
            found = [self._early.get((mesh, rank)) for rank in ranks]
            if early := [each for each in found if each is not None and not each.late]:
                return self._unread_once_connected(mesh, ranks, early)
        outputs = self._outputs.get(mesh)
        if outputs is None:
            return None
        readable = outputs.selector.select(0)
        if not readable and not outputs.busy:
            if self._batch:
                self._flush()
            return None
        chosen = set(ranks)
        behind = [output for output in outputs.behind(readable) if output.hello.rank in chosen]
        waiting = [(output, written) for output in behind if (written := output.written()) > output.handled]
        if not waiting or not self._reading.is_set():
            self._show_unfinished(outputs, behind)
            return None
        done = asyncio.get_running_loop().create_future()

        def finish(late: bool) -> None:
            if done.done():
                return
            self._show_unfinished(outputs, behind)
            done.set_result(None)
            if late:
                for output, _ in waiting:
                    outputs.miss(output)
                self._report_late()

        countdown = _Countdown(len(waiting), lambda: finish(late=False), lambda: finish(late=True))
        for output, written in waiting:
            output.waiting.append((written, countdown.count))
        return done

    def _unread_once_connected(
        self, mesh: int, ranks: Collection[int], early: Sequence[_Early]
    ) -> asyncio.Future[None]:
        """As ``unread``, for ranks of which the ``early`` processes have yet to connect."""
        done = asyncio.get_running_loop().create_future()

        def connected() -> None:
            unread = self.unread(mesh, ranks)
            if unread is None:
                finish()
            else:
                unread.add_done_callback(finish)

        def finish(_: object = None) -> None:
            if not done.done():
                done.set_result(None)

        def expire() -> None:
            self._report_late()
            for each in early:
                each.late = True
                _wake(each)

        countdown = _Countdown(len(early), connected, expire)
        for each in early:
            each.waiting.append(countdown.count)
        return done

    def _report_late(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported_late > LATE_INTERVAL:
            self._reported_late = now
            self._late(_LATE)

    def _show_unfinished(self, outputs: MeshOutput, behind: Sequence[OutputConnection]) -> None:
        """Passes on all lines so far, with those that have no end yet."""
        for output in behind:
            if output.unfinished is not None:
                output.unfinished.cancel()
                self._add_unfinished(outputs, output)
        self._flush()

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(CountingReader(HELLO_LIMIT), self._accept)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unidentified) >= MAX_UNIDENTIFIED:
            log.warning(
                "%d connections to the worker socket have not identified themselves; closing one", MAX_UNIDENTIFIED
            )
            oldest = next(iter(self._unidentified))
            del self._unidentified[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._readers[task] = None
        self._unidentified[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._readers.pop(task, None)
        self._unidentified.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello, size = await self._read_hello(reader)
            if (task := asyncio.current_task()) is not None:
                self._unidentified.pop(task, None)
            if hello is not None:
                await self._serve_worker(hello, size, reader, writer)
        except (ConnectionError, asyncio.TimeoutError) as error:
            log.debug("lost the connection of a worker: %s", error)
        finally:
            writer.close()

    async def _serve_worker(
        self, hello: WorkerHello, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        dropped = hello.mesh in self._dropped
        if dropped and hello.stream not in ("stdout", "stderr"):
            return
        if hello.stream == "controllers":
            writer.write(await self._controllers())
            await writer.drain()
            return
        if hello.stream == "kept":
            writer.write(await self._fetch_kept(hello.mesh, hello.rank, hello.object, hello.at))
            await writer.drain()
            return
        if hello.stream == "large":
            refused = self._ask(hello.mesh, hello.rank, hello.nbytes, reply=hello.reply, kept=hello.kept)
            writer.write(f"-{refused}".encode() if refused else b"+")
            await writer.drain()
            return
        if hello.stream == "watch":
            if self._folder is None:  # no provider reports the loss of a host for this process, which may close nothing
                keep_alive(writer.get_extra_info("socket"))
            await self._watch(hello, reader)
            return
        if hello.stream == "ports":
            await self._read_reports(reader, writer)
        elif hello.stream == "references":
            await self._read_references(hello, reader, writer)
        else:
            await self._serve_output(hello, size, reader, writer, dropped=dropped)

    async def _serve_output(
        self,
        hello: WorkerHello,
        size: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        dropped: bool,
    ) -> None:
        connected = self._connected.setdefault(hello.mesh, {})
        connected[writer] = hello
        if dropped:
            writer.write_eof()
        elif hello.stream == "stdout":
            _write_cancelled(writer, self._cancelled.pop((hello.mesh, hello.rank), ()))
        try:
            descriptor = writer.get_extra_info("socket").fileno()
            await self._read_output(hello, reader, descriptor, size)
        finally:
            connected.pop(writer, None)
            if not connected:
                self._connected.pop(hello.mesh, None)

    async def _watch(self, hello: WorkerHello, reader: asyncio.StreamReader) -> None:
        """Reports the end of a process that another actor has spawned; it sends nothing more."""
        self._watched(hello.mesh, hello.rank)
        try:
            while await reader.read(HELLO_LIMIT):
                pass
        finally:
            self._ended(hello.mesh, hello.rank, hello.pid)

    async def _read_reports(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what a process reports, until it ends."""
        while line := await reader.readline():
            report = PortReport.model_validate_json(line)

            def answer(closed: bool, factor: float, port: str = report.port) -> None:
                if not writer.is_closing():
                    writer.write(json.dumps({"port": port, "closed": closed, "factor": factor}).encode() + b"\n")

            self._reported(report.port, report.messages, report.nbytes, answer)

    async def _read_references(
        self, hello: WorkerHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        def write(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data)

        process = self._refers(hello.mesh, hello.rank, write)
        try:
            while line := await reader.readline():
                process.received(line)
        finally:
            process.end()

    async def _read_hello(self, reader: asyncio.StreamReader) -> tuple[WorkerHello | None, int]:
        """The first line, and its size in bytes."""
        try:
            async with async_timeout.timeout(HELLO_TIMEOUT):
                line = await reader.readline()  # ValueError past the limit
            hello = WorkerHello.model_validate_json(line)
        except ValueError:
            log.warning("closed a connection to the worker socket that did not identify itself as a worker")
            return None, 0
        if not secrets.compare_digest(hello.secret.encode(), self.secret.encode()):
            log.warning("closed a connection to the worker socket that has the secret of another session")
            return None, 0
        return hello, len(line)

    async def _read_output(self, hello: WorkerHello, reader: asyncio.StreamReader, descriptor: int, start: int) -> None:
        assert isinstance(reader, CountingReader)
        output = OutputConnection(hello, reader, descriptor, start)
        if (outputs := self._outputs.get(hello.mesh)) is None:
            outputs = self._outputs[hello.mesh] = MeshOutput()
            self._met.add(hello.mesh)
        data = b""
        try:
            outputs.add(output)
            early = self._early.get(key := (hello.mesh, hello.rank))
            if early is not None and outputs.mark(hello.rank, early.mark):
                _wake(self._early.pop(key))
            while data := await reader.read(65_536):
                if output.unfinished is not None and not output.splitter.has_bars:  # bars may never rest
                    output.unfinished.cancel()
                    output.unfinished = None
                while data:
                    await self._reading.wait()
                    await self._paused()
                    started = time.monotonic()  # the loop's clock stands still during a turn
                    piece, data = data[:PIECE], data[PIECE:]
                    self._add_lines(output, output.splitter.feed(piece))
                    self._loop_time += time.monotonic() - started
                    self._handled(outputs, output, len(piece), more=bool(data))
        finally:
            if outputs.remove(output):
                del self._outputs[hello.mesh]
            if output.unfinished is not None:
                output.unfinished.cancel()
            self._add_lines(output, output.splitter.feed(data))  # not empty if this was cancelled in between
            self._add_lines(output, output.splitter.end())
            output.ended()
            if hello.stream == "stdout":
                self._ended(hello.mesh, hello.rank, hello.pid)

    def _handled(self, outputs: MeshOutput, output: OutputConnection, count: int, *, more: bool) -> None:
        """``count`` more bytes have been split into lines. ``more``: others that were read with them follow."""
        if not more and output.splitter.pending and output.unfinished is None:
            flush = functools.partial(self._add_unfinished, outputs, output)
            output.unfinished = asyncio.get_running_loop().call_later(UNFINISHED_LINE_TIMEOUT, flush)
        output.handle(count)
        if output.settled:
            outputs.busy.pop(output, None)

    def _add_unfinished(self, outputs: MeshOutput, output: OutputConnection) -> None:
        output.unfinished = None
        self._add_lines(output, output.splitter.flush())
        if output.settled:
            outputs.busy.pop(output, None)

    def _add_lines(self, output: OutputConnection, lines: list[tuple[str, LineEnd]]) -> None:
        hello, label = output.hello, self._label(output.hello.mesh, output.hello.rank)
        if label[0]:  # the last lines may arrive when the mesh is gone
            output.label = label
        mesh, host = output.label
        stream: Literal["stdout", "stderr"] = "stderr" if hello.stream == "stderr" else "stdout"
        for text, end in lines:
            if text or end == "\n":
                self._add(PrintedLine(stream, mesh, hello.rank, host, text, end, hello.mesh))

    async def _paused(self) -> None:
        """Yields to calls. If output has taken its turn of the event loop, waits."""
        if self._pause is None and self._loop_time >= TURN:
            loop = asyncio.get_running_loop()
            self._pause = loop.create_future()
            loop.call_later(PAUSE * self._loop_time, self._resume)
        if self._pause is not None:
            await asyncio.shield(self._pause)
        else:
            await asyncio.sleep(0)

    def _resume(self) -> None:
        pause, self._pause, self._loop_time = self._pause, None, 0.0
        if pause is not None:
            pause.set_result(None)

    def _add(self, line: PrintedLine) -> None:
        self._batch.append(line)
        if len(self._batch) >= MAX_BATCH:
            self._flush()
        elif self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FOLDING_WINDOW, self._flush)

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._batch:
            batch, self._batch = self._batch, []
            self._printed(batch)


class _Countdown:
    """Calls ``done`` once ``count`` has been called ``left`` times, which cancels ``expire``.

    That is called after ``OUTPUT_TIMEOUT``, in parts: between them, what has arrived is read.
    """

    def __init__(self, left: int, done: Callable[[], object], expire: Callable[[], object]) -> None:
        self._left, self._done, self._expire, self._parts = left, done, expire, TIMEOUT_PARTS
        self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(OUTPUT_TIMEOUT / TIMEOUT_PARTS, self._next)

    def _next(self) -> None:
        self._parts -= 1
        if self._parts:
            self._wait()
        else:
            self._expire()

    def count(self) -> None:
        self._left -= 1
        if not self._left:
            self._timer.cancel()
            self._done()


def _wake(early: _Early) -> None:
    waiting, early.waiting = early.waiting, []
    for connected in waiting:
        connected()


def _write_cancelled(writer: asyncio.StreamWriter, calls: Iterable[int]) -> None:
    if not writer.is_closing():
        writer.writelines(b"%d\n" % call for call in calls)

"""Where worker processes connect: what they print comes in, and their end is noticed when the socket closes.

Each process of a session holds two connections to its engine for life, one for each output stream (``on_worker.begin``
makes them). The kernel closes them when a process dies, however it dies, so a death is known at once; and a process
whose engine is gone ends itself. Monarch's own supervision tells the reason, a moment later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from meshgate_gateway.engine.output import LineSplitter, Printed
from meshgate_sync.tcp import stop_listening

log = logging.getLogger(__name__)

HELLO_LIMIT = 4096  # bytes that are read of who has not proved to be a worker
HELLO_TIMEOUT = 10.0
MAX_STRANGERS = 1024  # who have not yet; the one that has dawdled longest gives way
FOLDING_WINDOW = 0.02  # seconds; output of many ranks within it is told together
UNFINISHED_LINE = 0.1  # seconds that a line without an end waits for it


class Hello(BaseModel):
    secret: str
    mesh: int
    rank: int
    pid: int
    stream: Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Source:
    """Who prints: for labels."""

    mesh: str
    host: str


class WorkerStreams:
    """Listens for the processes of one session.

    ``describe(mesh, rank)`` gives the label of a process; ``printed(lines)`` receives output, a batch a window;
    ``ended(mesh, rank, pid)`` is called when a process's connection closes. All on the loop.
    """

    def __init__(
        self,
        describe: Callable[[int, int], Source],
        printed: Callable[[list[Printed]], None],
        ended: Callable[[int, int, int], None],
    ) -> None:
        self._describe, self._printed, self._ended = describe, printed, ended
        self.secret = secrets.token_hex(16)
        self.address = ""
        self._server: asyncio.Server | None = None
        self._folder: str | None = None
        self._batch: list[Printed] = []
        self._telling: asyncio.TimerHandle | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # of the readers, the oldest first
        self._connected: dict[int, set[asyncio.StreamWriter]] = {}
        self._dropped: set[int] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def listen(self, host: str | None) -> None:
        """On ``host`` at a free port, or with None on a unix socket that only this user can reach."""
        if host is None:
            self._folder = tempfile.mkdtemp(prefix="meshgate-")
            path = os.path.join(self._folder, "workers")
            self._server = await asyncio.start_unix_server(self._accept, path, limit=HELLO_LIMIT)
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._accept, host, 0, limit=HELLO_LIMIT)
            self.address = f"tcp:{host}:{self._server.sockets[0].getsockname()[1]}"

    def flow(self, flowing: bool) -> None:
        """Whether output is read. While it is not, workers that print a lot wait, and nobody's memory fills."""
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    def drop(self, mesh: int) -> None:
        """Ends the processes of a mesh, also those that are still coming up: each ends itself when nothing more can
        come from here. What it has printed until then is still read."""
        self._dropped.add(mesh)
        for writer in self._connected.get(mesh, ()):
            if not writer.is_closing():
                writer.write_eof()

    async def close(self) -> None:
        """Stops listening and drops every process still connected, which ends it."""
        if self._server is not None:
            await stop_listening(self._server)
        for reader in tuple(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._tell()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            log.warning("%d connections to the worker socket have not said what they are", MAX_STRANGERS)
            dawdler = next(iter(self._strangers))
            del self._strangers[dawdler]
            dawdler.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._readers.add(task)
        self._strangers[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._readers.discard(task)
        self._strangers.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await self._hello(reader)
            if (known := asyncio.current_task()) is not None:
                self._strangers.pop(known, None)
            if hello is not None and hello.mesh not in self._dropped:
                await self._read_as(hello, reader, writer)
        except (ConnectionError, asyncio.TimeoutError) as error:
            log.debug("a worker's connection broke: %s", error)
        finally:
            writer.close()

    async def _read_as(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = self._connected.setdefault(hello.mesh, set())
        connected.add(writer)
        try:
            await self._read(hello, reader)
        finally:
            connected.discard(writer)
            if not connected:
                self._connected.pop(hello.mesh, None)

    async def _hello(self, reader: asyncio.StreamReader) -> Hello | None:
        try:
            line = await asyncio.wait_for(reader.readline(), HELLO_TIMEOUT)  # ValueError past the limit
            hello = Hello.model_validate_json(line)
        except ValueError:
            log.warning("something that is not a worker of this session connected to the worker socket")
            return None
        if not secrets.compare_digest(hello.secret.encode(), self.secret.encode()):
            log.warning("a process with another session's secret connected to the worker socket")
            return None
        return hello

    async def _read(self, hello: Hello, reader: asyncio.StreamReader) -> None:
        splitter = LineSplitter()
        loop = asyncio.get_running_loop()
        unfinished: asyncio.TimerHandle | None = None
        source = Source("", "")

        def take(lines: list[tuple[str, Literal["\n", "\r", ""]]]) -> None:
            nonlocal source
            told = self._describe(hello.mesh, hello.rank)
            source = told if told.mesh else source  # its last lines may come when its mesh is no longer known
            for text, end in lines:
                if text or end == "\n":
                    self._add(Printed(hello.stream, source.mesh, hello.rank, source.host, text, end))

        try:
            while data := await reader.read(65_536):
                await self._flowing.wait()
                if unfinished is not None:
                    unfinished.cancel()
                    unfinished = None
                take(splitter.feed(data))
                if splitter.pending:
                    unfinished = loop.call_later(UNFINISHED_LINE, lambda: take(splitter.flush()))
        finally:
            if unfinished is not None:
                unfinished.cancel()
            take(splitter.flush())
            if hello.stream == "stdout":
                self._ended(hello.mesh, hello.rank, hello.pid)

    def _add(self, line: Printed) -> None:
        self._batch.append(line)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(FOLDING_WINDOW, self._tell)

    def _tell(self) -> None:
        self._telling = None
        if self._batch:
            batch, self._batch = self._batch, []
            self._printed(batch)

"""Serves the page on loopback, and over a websocket what changes; decides which requests may see the job.

Those are the requests of the page in which the one-time link was opened. It shows the newest status of the job and its
last lines of output, read from the gateway. ``Feed.poll`` blocks on the network, so the server calls it in a thread.
A page may ask what a process runs, have what ranks use measured, and end a session or the job; nothing else here
changes the job.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import resources
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from meshgate.jobs.output import OutputReader
from meshgate.jobs.runs import LineSplitter
from meshgate.ranks import OWN_MESHES
from meshgate.ranks.streams import may_connect
from meshgate.session.serial_thread import SerialThread
from meshgate_wire.status import LIVE_STATES, JobStatus, OutputPage, RunOutput, RunStatus

MAX_LINES = 5000
MAX_PAGES = 64  # of output in one poll
EVENTS_INTERVAL = 15.0  # seconds
RUN_OUTPUT = 64 * 1024  # bytes of what a run had printed before this looked
INTERVAL = 1.0  # seconds between two looks at the job
USAGE_INTERVAL = 2.0  # seconds between two looks at what ranks use
_COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
LIVE_PATH = "/live"
SUBPROTOCOL = "meshgate-ui"
"""Pages offer it and, as a second one, their secret: scripts can set no other header of a websocket."""


class WatchedJob(Protocol):
    """A running job."""

    def status(self) -> JobStatus: ...

    def _output(self, after: dict[str, int]) -> OutputPage: ...

    def _run_output(self, name: str, after: int) -> RunOutput: ...

    def end_session(self, name: str, cached_path: str | None) -> object: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class _RunReader:
    """How far the output of one run has been read. ``id`` is that of the run: its name may become a later one's."""

    id: str
    position: int
    splitter: LineSplitter = field(default_factory=LineSplitter)


@dataclass(slots=True)
class _Measuring:
    ended: threading.Event  # set: the thread that measures ends after the look that it has begun
    usage: dict[str, Any] = field(default_factory=dict)  # the newest look


class StackRequest(BaseModel):
    """What a page sends to see what a process runs: its session, its host, the name of its mesh, and its rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session: str
    host: str
    mesh: str
    rank: int


class EndRequest(BaseModel):
    """What a page sends to end a session, by its id, or the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    end: str = Field(pattern="^([0-9a-f]{32}|job)$")


class MeasureRequest(BaseModel):
    """What a page sends to have what ranks use measured, or no longer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measure: bool


REQUEST: TypeAdapter[StackRequest | EndRequest | MeasureRequest] = TypeAdapter(
    StackRequest | EndRequest | MeasureRequest
)
Meter: TypeAlias = Callable[[], dict[str, Any]]
"""Looks at what ranks use: ``ranks`` has mesh, rank, CPU, memory, GPU and GPU memory of each, ``problems`` why a host
could not be read, by its name."""


class Feed:
    """``read_stack`` returns what a process runs. ``read_events`` returns the cluster's recent events about the job, if
    it runs in one. ``open_meter`` opens a session in which a meter looks at what ranks use, for as long as a page wants
    that. ``may_end``: whether the page has a button that ends the job."""

    def __init__(
        self,
        source: WatchedJob,
        title: str,
        read_stack: Callable[[StackRequest], str],
        open_meter: Callable[[], contextlib.AbstractContextManager[Meter]],
        read_events: Callable[[], Sequence[dict[str, Any]]] | None = None,
        *,
        may_end: bool = True,
    ) -> None:
        self._source, self._title, self._read_stack, self._read_events = source, title, read_stack, read_events
        self._open_meter, self._may_end = open_meter, may_end
        self._measuring = _Measuring(threading.Event())
        self._measuring.ended.set()
        self._status: dict[str, Any] | None = None
        self._at = 0.0  # when the status was read
        self._problem = self._events_problem = ""
        self._job_ended = False  # by a page
        self._events: Sequence[dict[str, Any]] = ()
        self._next_events = 0.0
        self._output = OutputReader(source._output)
        self._readers: dict[str, _RunReader] = {}
        self._lines: deque[dict[str, Any]] = deque(maxlen=MAX_LINES)
        self._count = 0  # of lines so far

    def poll(self) -> None:
        """Reads what is new. A failure becomes the problem that the page shows, until reading that succeeds again."""
        if self._job_ended:  # another job of this name would not be what the page shows
            return
        self._problem = _problem_of(self._read_job)
        if time.monotonic() >= self._next_events:
            self._events_problem = _problem_of(self._read_cluster)
            self._next_events = time.monotonic() + EVENTS_INTERVAL

    def measure(self, wanted: bool) -> None:
        """Starts or ends looking at what ranks use, in a thread of its own: a host may take long to answer."""
        current = self._measuring
        if not wanted:
            current.ended.set()
            self._measuring = _Measuring(current.ended)
        elif current.ended.is_set():
            self._measuring = started = _Measuring(threading.Event())
            threading.Thread(target=self._measure, args=[started], name="meshgate-page-usage", daemon=True).start()

    def _measure(self, measuring: _Measuring) -> None:
        try:
            with self._open_meter() as look:
                while not measuring.ended.is_set():
                    measuring.usage = look()
                    measuring.ended.wait(USAGE_INTERVAL)
        except Exception as error:  # noqa: BLE001 - the page shows it
            measuring.usage = {"problems": {"": f"{type(error).__name__}: {error}"}}
            measuring.ended.set()

    def answer(self, asked: StackRequest | EndRequest) -> str:
        """The JSON that answers a page: what the process runs, or that the session or the job has ended; or why not."""
        try:
            if isinstance(asked, StackRequest):
                text = self._read_stack(asked)
            elif asked.end == "job":
                self._source.kill()
                self._job_ended = True
                self._measuring.ended.set()
                text = "The job has ended."
            else:
                self._source.end_session(asked.end, None)
                text = f"Session {asked.end[:8]} has ended."
        except Exception as error:  # noqa: BLE001 - the page shows it
            text = f"{type(error).__name__}: {error}"
        return json.dumps({"stack": text} if isinstance(asked, StackRequest) else {"ended": text, "what": asked.end})

    def _read_job(self) -> None:
        status = self._source.status()
        self._status = status.model_dump(mode="json")
        self._at = time.monotonic()
        self._read_output()
        for run in status.runs:
            self._read_run(run)

    def _read_cluster(self) -> None:
        if self._read_events is not None:
            self._events = self._read_events()

    def _read_output(self) -> None:
        for session, printed in self._output.fresh(MAX_PAGES):
            if isinstance(printed, str):
                self._add_lines("meshgate", [f"session {session[:8]}: {printed}\n"], "stderr")
            else:
                self._lines.append({"session": session, **printed.model_dump(mode="json")})
                self._count += 1

    def _read_run(self, run: RunStatus) -> None:
        reader = self._readers.get(run.name)
        if reader is None or run.id not in ("", reader.id):  # without one, its files are damaged
            reader = self._readers[run.name] = _RunReader(run.id, max(0, run.printed - RUN_OUTPUT))
        while reader.position < run.printed:
            page = self._source._run_output(run.name, reader.position)
            if page.run.id not in ("", reader.id):  # the next poll reads the later run
                return
            data = base64.b64decode(page.data)
            reader.position = page.start + len(data)
            self._add_lines(f"run {run.name}", reader.splitter.split(data))
            if not data:
                break
        if not run.live:
            self._add_lines(f"run {run.name}", reader.splitter.split(b"", final=True))

    def _add_lines(self, source: str, lines: list[str], stream: str = "stdout") -> None:
        """Adds lines that no actor has printed."""
        common = {"session": "", "stream": stream, "mesh": source, "ranks": [], "count": 1, "host": ""}
        for line in lines:
            text = line.rstrip("\r\n")
            self._lines.append({**common, "number": self._count, "text": text, "end": line[len(text) :]})
            self._count += 1

    def message(self, seen: int) -> tuple[str, int]:
        """The JSON for a page that has received ``seen`` lines, and how many it has received afterwards."""
        kept = len(self._lines)
        fresh = min(self._count - seen, kept)
        lines = list(islice(self._lines, kept - fresh, kept))
        body = {
            "title": self._title,
            "status": self._status,
            "at": self._at,
            "problem": "the job has ended" if self._job_ended else self._problem or self._events_problem,
            "measuring": not self._measuring.ended.is_set(),
            "usage": self._measuring.usage,
            "may_end": self._may_end and not self._job_ended,
            "events": list(self._events),
            "lines": lines,
        }
        return json.dumps(body), self._count


def _problem_of(read: Callable[[], object]) -> str:
    """What the page says if ``read`` fails; "" if it does not."""
    try:
        read()
    except Exception as error:  # noqa: BLE001 - the page shows it
        return f"{type(error).__name__}: {error}"
    return ""


# The page itself has no secrets. The link carries one behind ``#``, which browsers do
# not send; the page sends it when it opens its websocket, where it works once and is exchanged for another. There are
# no cookies, because a browser sends those to every port of this machine, behind which may be a server of another
# user. Requests under another host name, which a hostile page could have bound to loopback, and websockets of other
# origins are refused.


@dataclass(frozen=True, slots=True)
class Refused:
    status: HTTPStatus
    reason: str


Decision: TypeAlias = Refused | Literal["page", "live"]


class PageAccess:
    """``port`` is that of the server. ``secret`` is what a page that was let in sends from then on."""

    def __init__(self, port: int) -> None:
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}
        self.secret = secrets.token_urlsafe(32)
        self._once: str | None = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{port}/#{self._once}"

    def decide(self, path: str, *, host: str | None, origin: str | None, offered: str | None) -> Decision:
        """What to answer a GET of ``path`` with; the others are its headers, ``offered`` the subprotocols."""
        if host not in self._hosts:
            return Refused(HTTPStatus.FORBIDDEN, f"unknown host {host!r}: open the link that meshgate ui prints")
        found = path.partition("?")[0]
        if found != LIVE_PATH:
            return "page" if found == "/" else Refused(HTTPStatus.NOT_FOUND, "there is only one page, at /")
        if origin not in self._origins:
            return Refused(HTTPStatus.FORBIDDEN, "websockets of other pages are not accepted")
        presented = (offered or "").rpartition(",")[2].strip()
        if self._once is not None and _equal(presented, self._once):
            self._once = None
            return "live"
        if _equal(presented, self.secret):
            return "live"
        return Refused(HTTPStatus.FORBIDDEN, "this link has been used, or is not complete: run meshgate ui again")


def _equal(presented: str, expected: str) -> bool:
    return hmac.compare_digest(presented.encode("utf-8", "surrogateescape"), expected.encode())


async def run_page(feed: Feed, port: int, started: Callable[[str], object]) -> None:
    """Serves on ``port`` (0: a free one) until cancelled. Calls ``started`` with the one-time link.

    Raises OSError if the port is in use.
    """
    server = PageServer(feed)
    protocols = [Subprotocol(SUBPROTOCOL)]
    listen = serve(
        server.live, "127.0.0.1", port, process_request=server.answer, compression=None, subprotocols=protocols
    )
    async with listen as listening:
        server.access = PageAccess(next(iter(listening.sockets)).getsockname()[1])
        started(server.access.url)
        try:
            await server.poll()
        finally:
            server.close()


class PageServer:
    """``access`` is set before the first request is answered."""

    access: PageAccess

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        page = _read("page.html").replace("{{live_states}}", " ".join(sorted(LIVE_STATES)))
        page = page.replace("{{own_meshes}}", " ".join(sorted(OWN_MESHES)))
        self._page = page.replace("{{style}}", _read("page.css")).replace("{{script}}", _read("page.js"))
        self._thread = SerialThread("meshgate-page-answers")  # a daemon: a read that waits does not hold up Ctrl-C
        self._answering: set[asyncio.Task[None]] = set()  # one for each page that is open
        self._watched = asyncio.Event()  # whether a page is open
        self._polled: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the next poll

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """The HTTP response; None for the websocket."""
        if not may_connect(connection.transport.get_extra_info("socket")):
            return _text(HTTPStatus.FORBIDDEN, "another user of this machine serves this page")
        names = ("Host", "Origin", "Sec-WebSocket-Protocol")
        if any(len(request.headers.get_all(name)) > 1 for name in names):
            return _text(HTTPStatus.BAD_REQUEST, "a header is repeated")
        host, origin, offered = (request.headers.get(name) for name in names)
        decision = self.access.decide(request.path, host=host, origin=origin, offered=offered)
        if isinstance(decision, Refused):
            return _text(decision.status, decision.reason)
        if decision == "live":
            return None
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        body = self._page.replace("{{nonce}}", nonce).encode()
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
        return _response(HTTPStatus.OK, body, headers)

    async def live(self, connection: ServerConnection) -> None:
        """Sends a page its secret and then, after each poll, what is new, at the page's speed."""
        seen = 0
        self._watched.set()
        answering = asyncio.create_task(self._answer(connection))
        self._answering.add(answering)
        try:
            await connection.send(json.dumps({"secret": self.access.secret}))
            while not answering.done():
                await asyncio.wait({answering, self._polled}, return_when=asyncio.FIRST_COMPLETED)
                message, seen = self._feed.message(seen)
                await connection.send(message)
        except ConnectionClosed:
            return
        finally:
            answering.cancel()
            self._answering.discard(answering)
            if not self._answering:
                self._watched.clear()
                self._feed.measure(False)

    async def _answer(self, connection: ServerConnection) -> None:
        """Answers a page, one request after the other, until it closes the connection or sends anything else."""
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                try:
                    asked = REQUEST.validate_json(message)
                except ValidationError:
                    await connection.close(CloseCode.POLICY_VIOLATION, "not a request of this page")
                    return
                if isinstance(asked, MeasureRequest):
                    self._feed.measure(asked.measure)
                else:
                    await connection.send(await self._answered(asked))

    async def _answered(self, asked: StackRequest | EndRequest) -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def read() -> None:
            if answer.cancelled():  # the page has been closed
                return
            text = self._feed.answer(asked)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the command has ended
                loop.call_soon_threadsafe(settle, text)

        def settle(text: str) -> None:
            if not answer.cancelled():
                answer.set_result(text)

        self._thread.call(read)
        return await answer

    def close(self) -> None:
        """Gives up what pages wait for, and lets the thread end that answers. Does not wait for it."""
        for answering in self._answering:
            answering.cancel()
        self._thread.close(0)

    async def poll(self) -> None:
        """Reads the job's state as long as a page is open, until cancelled."""
        while True:
            await self._watched.wait()
            await asyncio.to_thread(self._feed.poll)
            polled, self._polled = self._polled, asyncio.get_running_loop().create_future()
            polled.set_result(None)
            await asyncio.sleep(INTERVAL)


def _read(name: str) -> str:
    return resources.files("meshgate.ui").joinpath(name).read_text(encoding="utf-8")


def _text(status: HTTPStatus, text: str) -> Response:
    return _response(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})


def _response(status: HTTPStatus, body: bytes, headers: dict[str, str]) -> Response:
    fields = Headers({**_COMMON_HEADERS, **headers, "Content-Length": str(len(body)), "Connection": "close"})
    return Response(status.value, status.phrase, fields, body)

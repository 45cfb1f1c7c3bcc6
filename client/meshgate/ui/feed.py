"""What the page shows: the newest status of the job and its last lines of output, read from the gateway.

``poll`` blocks on the network, so the server calls it in a thread. Nothing here changes the job.
"""

from __future__ import annotations

import base64
import codecs
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from meshgate.errors import MeshgateError
from meshgate.jobs.runs import LINE
from meshgate_wire.status import JobStatus, OutputPage, RunOutput, RunStatus

MAX_LINES = 5000
MAX_PAGES = 64  # of output in one poll
EVENTS_INTERVAL = 15.0  # seconds
RUN_OUTPUT = 64 * 1024  # bytes of what a run had printed before this looked


class Source(Protocol):
    """A running job."""

    def status(self) -> JobStatus: ...

    def _output(self, after: dict[str, int]) -> OutputPage: ...

    def _run_output(self, name: str, after: int) -> RunOutput: ...


@dataclass(slots=True)
class _RunReader:
    """How far the output of one run has been read. ``age`` is that of the run then: a younger one is another run."""

    age: float
    position: int
    text: str = ""  # the beginning of a line
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Feed:
    """``read_events`` returns the cluster's recent events about the job, if it runs in one."""

    def __init__(
        self, source: Source, title: str, read_events: Callable[[], Sequence[dict[str, Any]]] | None = None
    ) -> None:
        self._source, self._title, self._read_events = source, title, read_events
        self._status: dict[str, Any] | None = None
        self._at = 0.0  # when the status was read
        self._problem = ""
        self._events: Sequence[dict[str, Any]] = ()
        self._next_events = 0.0
        self._seen: dict[str, int] = {}
        self._readers: dict[str, _RunReader] = {}
        self._lines: deque[dict[str, Any]] = deque(maxlen=MAX_LINES)
        self._count = 0  # of lines so far

    def poll(self) -> None:
        """Reads what is new. A failure becomes the problem that the page shows, until a later poll succeeds."""
        try:
            status = self._source.status()
            self._status = status.model_dump(mode="json")
            self._at = time.monotonic()
            self._read_output()
            for run in status.runs:
                self._read_run(run)
            if self._read_events is not None and time.monotonic() >= self._next_events:
                self._events = self._read_events()
                self._next_events = time.monotonic() + EVENTS_INTERVAL
            self._problem = ""
        except MeshgateError as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _read_output(self) -> None:
        for _ in range(MAX_PAGES):
            page = self._source._output(dict(self._seen))
            for session in page.sessions:
                for line in session.lines:
                    self._seen[session.session] = line.number
                    self._lines.append({"session": session.session, **line.model_dump(mode="json")})
                    self._count += 1
            if not any(session.lines for session in page.sessions):
                return

    def _read_run(self, run: RunStatus) -> None:
        reader = self._readers.get(run.name)
        if reader is None or run.age < reader.age:
            reader = self._readers[run.name] = _RunReader(run.age, max(0, run.printed - RUN_OUTPUT))
        reader.age = run.age
        while reader.position < run.printed:
            page = self._source._run_output(run.name, reader.position)
            data = base64.b64decode(page.data)
            reader.position = page.start + len(data)
            reader.text += reader.decoder.decode(data)
            lines = [line[0] for line in LINE.finditer(reader.text)]
            reader.text = reader.text[sum(map(len, lines)) :]
            for line in lines:
                self._add_run_line(run.name, line)
            if not data:
                break
        if reader.text and not run.live:  # a last line without an end
            self._add_run_line(run.name, reader.text)
            reader.text = ""

    def _add_run_line(self, run: str, line: str) -> None:
        text = line.rstrip("\r\n")
        facts = {"number": self._count, "stream": "stdout", "mesh": f"run {run}", "ranks": [], "count": 1, "host": ""}
        self._lines.append({"session": "", **facts, "text": text, "end": line[len(text) :]})
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
            "problem": self._problem,
            "events": list(self._events),
            "lines": lines,
        }
        return json.dumps(body), self._count

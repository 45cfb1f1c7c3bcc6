"""The runs of a job, as the server sees them: it takes submissions, answers questions and passes on requests to stop.

What it knows is on disk and with the supervisor, so that the next server goes on where this one was.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import structlog
from pydantic import ValidationError

from meshgate_gateway.child_process import ChildProcess, ExitStatus
from meshgate_gateway.http.auth import RUNS_PATH, Identity, Origin, audit
from meshgate_gateway.http.messages import MalformedRequest, Request, Response
from meshgate_gateway.runs.records import RunDirectory, Submitted, read_output
from meshgate_gateway.supervisor.link import SupervisedProcess, SupervisorLink
from meshgate_processes.marks import end_processes
from meshgate_wire.status import RUN_NAME, RunOutput, Runs, Submission

log = structlog.get_logger()

RUN_PATH = re.compile(rf"{RUNS_PATH}/({RUN_NAME.strip('^$')})(/output|/stop)?")
KEY = "run/"  # of a runner among the supervisor's processes
KEPT = "runs"  # the key of what the supervisor keeps
MAX_LIVE = 32
MAX_ENDED = 20  # runs that have ended and are kept with their output and files
MAX_WAIT = 15.0  # seconds that a request waits for news
POLL = 0.1
MAX_GRACE = 24 * 3600.0
END_TIMEOUT = 6.5  # seconds that runs have to end with their gateway: a runner kills its program after 5
COMMAND = (sys.executable, "-m", "meshgate_gateway.runs.runner")


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs run. ``variables`` tell a program how to reach this gateway; ``set_aside`` are variables of the
    gateway that are not for programs. ``refusal``: why this gateway runs no programs, or ""."""

    environment: Mapping[str, str]
    variables: Mapping[str, str]
    meshes: Callable[[], Mapping[str, int]]
    set_aside: tuple[str, ...] = ()
    refusal: str = ""


class Service:
    """All runs of this gateway. ``changed`` is set when one starts or ends. ``job`` names it in the audit log."""

    def __init__(
        self, place: Place, supervisor: SupervisorLink, changed: asyncio.Event, job: Mapping[str, str] | None = None
    ) -> None:
        self._job = job or {}
        self._place, self._supervisor, self._changed = place, supervisor, changed
        self._loop = asyncio.get_running_loop()
        self._runners: dict[str, ChildProcess] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}  # each notes the end of a run
        self._directory: Path | None = None
        self._ended_at: float | None = None
        if kept := supervisor.kept.get(KEPT):
            self._directory = Path(kept.note["directory"])
        for key, process in supervisor.children.items():
            if key.startswith(KEY):
                self._watch(key.removeprefix(KEY), process)

    @property
    def live(self) -> bool:
        """Whether a run has not ended yet."""
        return bool(self._runners)

    @property
    def idle_since(self) -> float | None:
        """When the last run ended, on the loop's clock; None if there has been none."""
        return self._ended_at

    async def respond(self, request: Request, caller: Identity, origin: Origin) -> Response:
        """The response to an authenticated request below ``RUNS_PATH``. Raises MalformedRequest."""
        path = urlsplit(request.path).path
        if path == RUNS_PATH:
            return await self._submit(request, caller, origin) if request.method == "POST" else self._list()
        found = RUN_PATH.fullmatch(path)
        run = None if found is None else self._find(found[1])
        if found is None or run is None:
            name = "" if found is None else f" {found[1]!r}"
            known = ", ".join(each.name for each in self._runs()) or "none"
            return Response.error(HTTPStatus.NOT_FOUND, f"there is no run{name}; the runs of this job: {known}")
        if (found[2] == "/stop") is not (request.method == "POST"):
            posts = f"{RUNS_PATH} and {RUNS_PATH}/<name>/stop"
            reason = f"the method {request.method} is not allowed here: POST is for {posts}"
            return Response.error(HTTPStatus.METHOD_NOT_ALLOWED, reason)
        if found[2] == "/stop":
            return self._stop(run, request, caller, origin)
        return await (self._output(run, request) if found[2] else self._status(run, request))

    async def close(self) -> None:
        """Ends all runs, with a few seconds for their programs, and removes their files."""
        for name in self._runners:
            RunDirectory(self._home() / name).request_stop(END_TIMEOUT - 1.5)
        await asyncio.gather(*(runner.stop(END_TIMEOUT) for runner in [*self._runners.values()]))
        for task in self._ends.values():
            task.cancel()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    # --- requests

    async def _submit(self, request: Request, caller: Identity, origin: Origin) -> Response:
        try:
            submission = Submission.model_validate_json(request.body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"invalid submission: {where}: {first['msg']}") from None
        end = self._ends.get(submission.name)
        if end is not None and not RunDirectory(self._home() / submission.name).record().live:
            await asyncio.wait([end], timeout=MAX_WAIT)  # its program has ended, and its runner is about to
        refused = self._refusal(submission)
        audit("submit run", origin, caller=caller.caller, refused=refused, run=submission.name, **self._job)
        if refused is not None:
            return Response.error(HTTPStatus.CONFLICT, refused)
        try:
            run = self._start(submission, caller)
        except OSError as error:
            reason = f"the run {submission.name} cannot be started: {error}"
            return Response.error(HTTPStatus.INSUFFICIENT_STORAGE, reason)
        return Response(HTTPStatus.OK, run.status().model_dump(mode="json"))

    def _refusal(self, submission: Submission) -> str | None:
        if self._place.refusal:
            return self._place.refusal
        if submission.name in self._runners:
            return f"a run called {submission.name} has not ended yet: choose another name, or stop it first"
        if len(self._runners) >= MAX_LIVE:
            return f"{MAX_LIVE} runs have not ended yet, which is the limit: stop one first"
        return None

    def _start(self, submission: Submission, caller: Identity) -> RunDirectory:
        """Raises OSError."""
        run = RunDirectory(self._home() / submission.name)
        self._remove_old(submission.name)
        job = {**submission.job.model_dump(), "meshes": dict(self._place.meshes())}
        variables = {
            **self._place.variables,
            "MESHGATE_RUN": submission.name,
            "MESHGATE_RUN_JOB": json.dumps(job),
        }
        run.create(
            Submitted(
                submission=submission,
                owner=caller.caller,
                time=time.time(),
                variables=variables,
                set_aside=self._place.set_aside,
            )
        )
        lifetime, held = os.pipe()
        try:
            command = [*COMMAND, str(run.path), "fd:0"]
            environment = self._place.environment
            process = self._supervisor.start(f"{KEY}{run.name}", {}, command, environment, [lifetime], [held])
        except OSError:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        finally:
            os.close(lifetime)
            os.close(held)
        self._watch(run.name, process)
        log.info("run started", run=run.name, pid=process.pid)
        return run

    def _list(self) -> Response:
        runs = self._runs()
        statuses = [run.status() for run in runs]
        for run, status in zip(runs, statuses, strict=True):
            if status.news:
                run.note_reported()
        return Response(HTTPStatus.OK, Runs(runs=tuple(statuses)).model_dump(mode="json"))

    def _stop(self, run: RunDirectory, request: Request, caller: Identity, origin: Origin) -> Response:
        try:
            grace = float(json.loads(request.body or b"{}").get("grace", 30.0))
        except (ValueError, TypeError, AttributeError):
            grace = -1.0
        if not 0 <= grace <= MAX_GRACE:
            reason = 'the body must be {"grace": <seconds>}, at most a day'
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, reason)
        audit("stop run", origin, caller=caller.caller, run=run.name, **self._job)
        if run.name in self._runners:
            run.request_stop(grace)  # which its runner looks for
        return Response(HTTPStatus.OK, run.status().model_dump(mode="json"))

    async def _status(self, run: RunDirectory, request: Request) -> Response:
        """Waits for the end of the run if it is asked to."""
        if (end := self._ends.get(run.name)) is not None:
            await asyncio.wait([end], timeout=_number(request, "wait", MAX_WAIT))
        status = run.status()
        if status.news:
            run.note_reported()
        return Response(HTTPStatus.OK, status.model_dump(mode="json"))

    async def _output(self, run: RunDirectory, request: Request) -> Response:
        """Waits for more output, or the end of the run, if it is asked to."""
        after = int(_number(request, "after", 1 << 60))
        deadline = self._loop.time() + _number(request, "wait", MAX_WAIT)
        while True:
            status = run.status()  # before the output: when the run has ended, all of it is there
            start, data = await asyncio.to_thread(read_output, run.output, after)
            if data or not status.live or self._loop.time() >= deadline:
                break
            await asyncio.sleep(POLL)
        page = RunOutput(start=start, data=base64.b64encode(data).decode("ascii"), run=status)
        return Response(HTTPStatus.OK, page.model_dump(mode="json"))

    # --- runs

    def _home(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="meshgate-runs-", dir=self._place.environment.get("TMPDIR")))
            self._supervisor.keep(KEPT, {"directory": str(self._directory)})
        return self._directory

    def _runs(self) -> list[RunDirectory]:
        """The oldest first."""
        if self._directory is None:
            return []
        found = [RunDirectory(path) for path in self._directory.iterdir() if (path / "record").exists()]
        return sorted(found, key=lambda run: run.submitted().time)

    def _find(self, name: str) -> RunDirectory | None:
        return next((run for run in self._runs() if run.name == name), None)

    def _remove_old(self, name: str) -> None:
        """Makes room for a run called ``name``: removes the ended one of that name, and the oldest ended ones."""
        ended = [run for run in self._runs() if run.name not in self._runners]
        for run in [*ended[: max(0, len(ended) - MAX_ENDED + 1)], *(run for run in ended if run.name == name)]:
            shutil.rmtree(run.path, ignore_errors=True)

    def _watch(self, name: str, process: SupervisedProcess) -> None:
        runner = ChildProcess(process, on_line=lambda line: log.warning("runner", run=name, line=line))
        self._runners[name] = runner
        self._changed.set()
        self._ends[name] = asyncio.create_task(self._wait_ended(name, runner, process))

    async def _wait_ended(self, name: str, runner: ChildProcess, process: SupervisedProcess) -> None:
        end = await runner.wait()
        try:
            await self._note_end(RunDirectory(self._home() / name), end)
        except OSError as error:
            log.warning("cannot note the end of a run", run=name, reason=str(error))
        process.forget()
        del self._runners[name], self._ends[name]
        self._ended_at = self._loop.time()
        self._changed.set()

    async def _note_end(self, run: RunDirectory, end: ExitStatus) -> None:
        """Raises OSError."""
        record = run.record()
        if record.live:  # its runner was killed before it could note anything
            mark = f"MESHGATE_RUN_PROJECT={run.project}"
            await asyncio.to_thread(end_processes, mark)
            reason = f"its runner {end.reason}"
            run.write_record(record.model_copy(update={"state": "failed", "reason": reason, "ended": time.time()}))
        status = run.status()
        log.info("run ended", run=run.name, state=status.state, exit_code=status.exit_code, reason=status.reason)


def _number(request: Request, name: str, limit: float) -> float:
    """A number of the query, 0 if it is missing, at most ``limit``. Raises MalformedRequest."""
    try:
        values = parse_qs(urlsplit(request.path).query, max_num_fields=16).get(name, ["0"])
        return min(max(0.0, float(values[-1])), limit)
    except ValueError:
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"{name} in the query must be a number") from None

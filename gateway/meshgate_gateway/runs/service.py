"""The runs of a job, as the server sees them: it takes submissions, answers questions and passes on requests to stop.

What it knows is on disk and with the supervisor, so that the next server goes on where this one was.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

from meshgate_gateway.child_process import ChildProcess, ExitStatus
from meshgate_gateway.http.auth import RUNS_PATH, Identity, Origin, audit, digest_of
from meshgate_gateway.http.messages import MalformedRequest, Request, Response
from meshgate_gateway.logs import EventLog
from meshgate_gateway.runs.records import PROGRAM_ENDED, SECRET, RunDirectory, Submitted, read_output
from meshgate_gateway.supervisor.link import SupervisedProcess, SupervisorLink
from meshgate_processes.marks import end_processes
from meshgate_wire.fields import first_problem
from meshgate_wire.status import (
    MAX_GRACE,
    NAME_REUSED,
    RUN_NAME,
    RunOutput,
    Runs,
    RunStatus,
    StopRequest,
    Submission,
)

log = EventLog()

RUN_PATH = re.compile(rf"{RUNS_PATH}/({RUN_NAME.strip('^$')})(/output|/stop)?")
KEY = "run/"  # of a runner among the supervisor's processes
KEPT = "runs"  # the key of what the supervisor keeps
MAX_LIVE = 32
MAX_ENDED = 20  # runs that have ended and are kept with their output and files
MAX_WAIT = 15.0  # seconds that a request waits for news
POLL = 0.1
END_TIMEOUT = 6.5  # seconds that runs have to end with their gateway: a runner kills its program after 5
SESSION_TIMEOUT = 12.0  # seconds that the sessions of a program have to end: an engine that hangs is killed after 7
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
    """All runs of this gateway. ``changed`` is set when one starts or ends, and ``ended(name)`` is called when its
    program has ended, also before a restart, and returns what ends with it. ``job`` names it in the audit log."""

    def __init__(
        self,
        place: Place,
        supervisor: SupervisorLink,
        changed: asyncio.Event,
        ended: Callable[[str], Collection[asyncio.Task[None]]],
        job: Mapping[str, str] | None = None,
    ) -> None:
        self._job = job or {}
        self._place, self._supervisor, self._changed, self._on_end = place, supervisor, changed, ended
        self._loop = asyncio.get_running_loop()
        self._runners: dict[str, ChildProcess] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}  # each notes the end of a run
        self._directory: Path | None = None
        self._ended_at: float | None = None
        self._identities: dict[bytes, Identity] = {}  # of the runs that have not ended, by the SHA-256 of their secrets
        self._closing = False
        self._restarting: dict[str, asyncio.Task[None]] = {}  # each ends the sessions of a run
        self._removing: set[asyncio.Task[None]] = set()
        if kept := supervisor.kept.get(KEPT):
            self._directory = Path(kept.note["directory"])
        for key, process in supervisor.children.items():
            if key.startswith(KEY):
                self._watch(key.removeprefix(KEY), process)
                self._prepare_restart(key.removeprefix(KEY))  # the last server may have died after PROGRAM_ENDED

    def identify(self, token: str | None) -> Identity | None:
        """The run with this secret, unless it has ended. To look up a digest takes no time that depends on secrets."""
        return None if token is None else self._identities.get(digest_of(token))

    async def statuses(self) -> tuple[RunStatus, ...]:
        """All runs, the oldest first. Their files are read in a thread: those of 52 runs, as large as they may be, take
        40 ms, and a page of the job requests its status every second."""
        runs, had_runner = self._runs(), set(self._runners)
        found = await asyncio.to_thread(lambda: [run.status(has_runner=run.name in had_runner) for run in runs])
        # Meanwhile, a run may have been removed, have ended, or have begun under the name of an earlier one.
        return _oldest_first(
            status if (run.name in self._runners) == (run.name in had_runner) else self._status_of(run)
            for run, status in zip(runs, found, strict=True)
            if run.path.is_dir()
        )

    def _statuses_now(self) -> tuple[RunStatus, ...]:
        return _oldest_first(map(self._status_of, self._runs()))

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
        run = next((run for run in self._runs() if found is not None and run.name == found[1]), None)
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
        self._closing = True
        for name in self._runners:
            try:
                RunDirectory(self._home() / name).request_stop(END_TIMEOUT - 1.5)
            except OSError as error:  # its runner is killed below, and its program then
                log.warning("cannot ask a run to stop", run=name, reason=str(error))
        await asyncio.gather(*(runner.stop(END_TIMEOUT) for runner in [*self._runners.values()]))
        for task in [*self._ends.values(), *self._restarting.values(), *self._removing]:
            task.cancel()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    # --- requests

    async def _submit(self, request: Request, caller: Identity, origin: Origin) -> Response:
        try:
            submission = Submission.model_validate_json(request.body)
        except ValidationError as error:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"invalid submission: {first_problem(error)}") from None
        audited = partial(audit, "submit run", origin, caller=caller.caller, run=submission.name, **self._job)
        end = self._ends.get(submission.name)
        if end is not None and not self._status_of(RunDirectory(self._home() / submission.name)).live:
            await asyncio.wait([end], timeout=MAX_WAIT)  # its program has ended, and its runner is about to
        if (known := self._known(submission)) is not None:
            audited(repeated=True)
            return Response(HTTPStatus.OK, known.model_dump(mode="json"))
        refused = self._refusal(submission)
        audited(refused=refused)
        if refused is not None:
            return Response.error(HTTPStatus.CONFLICT, refused)
        try:
            run = self._start(submission, caller)
        except OSError as error:
            log.warning("run not started", run=submission.name, reason=str(error))
            reason = f"the run {submission.name} cannot be started on the gateway's machine: {error}"
            return Response.error(HTTPStatus.INSUFFICIENT_STORAGE, reason)
        return Response(HTTPStatus.OK, self._status_of(run).model_dump(mode="json"))

    def _known(self, submission: Submission) -> RunStatus | None:
        """The run that an earlier request of this id has started; one that a server has left before it had a runner
        does not count, since nothing of its program has run."""
        run = RunDirectory(self._directory / submission.name) if self._directory is not None else None
        if not submission.id or run is None or not run.path.is_dir():
            return None
        try:
            same, state = run.submitted().submission.id == submission.id, run.record().state
        except (OSError, ValueError):  # a damaged run is not known to be this one
            return None
        return self._status_of(run) if same and (run.name in self._runners or state != "starting") else None

    def _refusal(self, submission: Submission) -> str | None:
        if self._place.refusal:
            return self._place.refusal
        if self._closing:  # since the request came
            return "the gateway is shutting down"
        if submission.name in self._runners:
            return f"a run called {submission.name} has not ended yet: choose another name, or stop that run first"
        if len(self._runners) >= MAX_LIVE:
            return f"{MAX_LIVE} runs have not ended yet, which is the limit: stop one first"
        return None

    def _start(self, submission: Submission, caller: Identity) -> RunDirectory:
        """Raises OSError, and leaves nothing then but the removal of older runs."""
        run = RunDirectory(self._home() / submission.name)
        secret = secrets.token_urlsafe(32)
        job = {**submission.job.model_dump(), "meshes": dict(self._place.meshes())}
        variables = {
            **self._place.variables,
            "MESHGATE_RUN": submission.name,
            "MESHGATE_RUN_JOB": json.dumps(job),
        }
        submitted = Submitted(
            submission=submission,
            identity=caller.name,
            owner=caller.caller,
            secret=digest_of(secret).hex(),
            time=time.time(),
            variables=variables,
            set_aside=self._place.set_aside,
        )
        self._create(run, submitted)
        lifetime, held = os.pipe()
        try:
            command = [*COMMAND, str(run.path), "fd:0"]
            environment = {**self._place.environment, SECRET: secret}
            process = self._supervisor.start(f"{KEY}{run.name}", {}, command, environment, [lifetime], [held])
        except OSError:
            self._remove(run.path)
            raise
        finally:
            os.close(lifetime)
            os.close(held)
        self._watch(run.name, process)
        log.info("run started", run=run.name, pid=process.pid)
        return run

    def _create(self, run: RunDirectory, submitted: Submitted) -> None:
        """Makes room for the run, and its directory. It has its name only once it is complete. Raises OSError."""
        ended = [each for each in self._statuses_now() if each.name not in self._runners]
        new = RunDirectory(self._home() / f".new-{secrets.token_hex(4)}")
        try:
            new.create(submitted)
            old = {each.name for each in ended[: max(0, len(ended) - MAX_ENDED + 1)]}
            for name in old | ({run.name} & {each.name for each in ended}):
                self._remove(self._home() / name)
            new.path.rename(run.path)
        except OSError:
            shutil.rmtree(new.path, ignore_errors=True)
            raise

    def _list(self) -> Response:
        statuses = self._statuses_now()  # at once, so that each end is news in one answer only
        for status in statuses:
            self._note_reported(status)
        return Response(HTTPStatus.OK, Runs(runs=statuses).model_dump(mode="json"))

    def _note_reported(self, status: RunStatus) -> None:
        if status.news:
            try:
                RunDirectory(self._home() / status.name).note_reported()
            except OSError as error:  # it is news again then
                log.warning("cannot note that the end of a run was reported", run=status.name, reason=str(error))

    def _stop(self, run: RunDirectory, request: Request, caller: Identity, origin: Origin) -> Response:
        audited = partial(audit, "stop run", origin, caller=caller.caller, run=run.name, **self._job)
        try:
            requested = StopRequest.model_validate_json(request.body or b"{}")
            if requested.id and self._status_of(run).id not in ("", requested.id):
                reason = NAME_REUSED.format(run.name)
                audited(refused=reason)
                return Response.error(HTTPStatus.CONFLICT, reason)
            if run.name in self._runners:
                run.request_stop(requested.grace)  # which its runner looks for
        except ValidationError:
            body = '{"grace": <seconds>, "id": <that of the run, or "">}'
            reason = f"the body must be {body}, with a number of seconds from 0 to {MAX_GRACE}"
            audited(refused=reason)
            raise MalformedRequest(HTTPStatus.BAD_REQUEST, reason) from None
        except OSError as error:
            reason = f"the run {run.name} cannot be stopped: {error}; make room on the gateway's disk"
            audited(refused=reason)
            return Response.error(HTTPStatus.INSUFFICIENT_STORAGE, reason)
        audited()
        return Response(HTTPStatus.OK, self._status_of(run).model_dump(mode="json"))

    async def _status(self, run: RunDirectory, request: Request) -> Response:
        """Waits for the end of the run if it is asked to."""
        if (end := self._ends.get(run.name)) is not None:
            await asyncio.wait([end], timeout=_number(request, "wait", MAX_WAIT))
        status = self._status_of(run)
        self._note_reported(status)
        return Response(HTTPStatus.OK, status.model_dump(mode="json"))

    async def _output(self, run: RunDirectory, request: Request) -> Response:
        """Waits for more output, or the end of the run, if it is asked to."""
        after = int(_number(request, "after", 1 << 60))
        deadline = self._loop.time() + _number(request, "wait", MAX_WAIT)
        while True:
            status = self._status_of(run)  # before the output: when the run has ended, all of it is there
            try:
                start, data = await asyncio.to_thread(read_output, run.output, after)
            except (OSError, ValueError) as error:  # a damaged directory, or one that was removed meanwhile
                reason = f"the output of the run {run.name} cannot be read on the gateway's machine: {error}"
                return Response.error(HTTPStatus.CONFLICT, reason)
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
        if self._directory is None or not self._directory.is_dir():  # something else has removed it
            return []
        return [RunDirectory(path) for path in self._directory.iterdir() if not path.name.startswith(".")]

    def _status_of(self, run: RunDirectory) -> RunStatus:
        return run.status(has_runner=run.name in self._runners)

    def _remove(self, path: Path) -> None:
        """Frees the name at once; the files, of which there may be many, go in a thread. Raises OSError."""
        gone = path.rename(path.with_name(f".removed-{secrets.token_hex(4)}"))
        task = asyncio.create_task(asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    def _watch(self, name: str, process: SupervisedProcess) -> None:
        try:
            submitted = RunDirectory(self._home() / name).submitted()
        except (OSError, ValueError) as error:  # its program cannot reach the job any more
            log.warning("cannot read what was submitted", run=name, reason=str(error))
        else:
            identity = Identity(submitted.identity, submitted.owner, run=name)
            self._identities[bytes.fromhex(submitted.secret)] = identity
        runner = ChildProcess(process, on_line=partial(self._on_line, name))
        self._runners[name] = runner
        self._changed.set()
        self._ends[name] = asyncio.create_task(self._wait_ended(name, runner, process))

    def _on_line(self, name: str, line: str) -> None:
        if line == PROGRAM_ENDED:
            self._prepare_restart(name)
        else:
            log.warning("runner", run=name, line=line)

    def _prepare_restart(self, name: str) -> None:
        """If the program of a run waits to be started again, ends the sessions that it held: otherwise their processes
        keep GPUs and ports. Its runner waits for that, so none of the next start can be among them."""
        if name not in self._restarting:
            task = self._restarting[name] = asyncio.create_task(self._end_sessions(name))
            task.add_done_callback(lambda _: self._restarting.pop(name))

    async def _end_sessions(self, name: str) -> None:
        run = RunDirectory(self._home() / name)
        try:
            record = run.record()
            if record.state == "restarting" and run.sessions_ended() <= record.restarts:
                if ending := self._on_end(name):
                    await asyncio.wait(ending, timeout=SESSION_TIMEOUT)
                run.note_sessions_ended(record.restarts + 1)
        except (OSError, ValueError) as error:  # its runner then waits no longer than it must
            log.warning("cannot prepare the restart of a run", run=name, reason=str(error))

    async def _wait_ended(self, name: str, runner: ChildProcess, process: SupervisedProcess) -> None:
        end = await runner.wait()
        try:
            await self._note_end(RunDirectory(self._home() / name), end)
        except (OSError, ValueError) as error:  # it is lost then
            log.warning("cannot note the end of a run", run=name, reason=str(error))
        process.forget()
        del self._runners[name], self._ends[name]
        self._identities = {digest: each for digest, each in self._identities.items() if each.run != name}
        self._on_end(name)
        self._ended_at = self._loop.time()
        self._changed.set()

    async def _note_end(self, run: RunDirectory, end: ExitStatus) -> None:
        """Raises OSError, and ValueError if its record is damaged."""
        record = run.record()
        if record.live:  # its runner was killed before it could note anything
            mark = f"MESHGATE_RUN_PROJECT={run.project}"
            await asyncio.to_thread(end_processes, mark)
            reason = f"its runner {end.reason}"
            run.write_record(record.model_copy(update={"state": "lost", "reason": reason, "ended": time.time()}))
        status = run.status(has_runner=False)
        log.info("run ended", run=run.name, state=status.state, exit_code=status.exit_code, reason=status.reason)


def _oldest_first(statuses: Iterable[RunStatus]) -> tuple[RunStatus, ...]:
    return tuple(sorted(statuses, key=lambda status: -status.age))


def _number(request: Request, name: str, limit: float) -> float:
    """A number of the query, 0 if it is missing, at most ``limit``. Raises MalformedRequest."""
    try:
        values = parse_qs(urlsplit(request.path).query, max_num_fields=16).get(name, ["0"])
        return min(max(0.0, float(values[-1])), limit)
    except ValueError:
        raise MalformedRequest(HTTPStatus.BAD_REQUEST, f"{name} in the query must be a number") from None

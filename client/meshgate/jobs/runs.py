"""Programs that run in the cluster, beside the job's gateway: ``job.submit()``, and the runs that it returns.

``JobTrait`` inherits ``RunAccess``. A program is sent as the synced version of the project and a command; the gateway
keeps what it prints and how it ends, so that a run needs neither this process nor this machine any more.
"""

from __future__ import annotations

import base64
import codecs
import os
import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import ValidationError

from meshgate.errors import ConnectionFailedError, JobNotRunning
from meshgate.session.gateway_client import request_json
from meshgate_wire.status import MAX_SUBMISSION, JoinableJob, RunOutput, Runs, RunStatus, Submission

if TYPE_CHECKING:
    from meshgate.code_sync.project import Tree
    from meshgate.code_sync.push import SyncReport
    from meshgate.jobs.state import JobState
    from meshgate.session.dialing import Dialer
    from meshgate.session.session import ClientSession

PATH = "/v1/runs"
WAIT = 10.0  # seconds that the gateway may hold an answer back until there is news
OUTAGE = 120.0  # seconds for which a gateway that cannot be reached does not end a wait
RETRY = 1.0
STOP_GRACE = 30.0
REFUSALS = frozenset({400, 404, 405, 409, 413, 507})
PYTHON = re.compile(r"python(3(\.\d+)?)?")
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r(?!$)|\n)")


class Run:
    """A program that was submitted to a job, and runs beside its gateway.

    Any process that finds the job can have it, from ``job.run(name)``. Its methods raise GatewayError if the gateway
    cannot be reached, and InvalidRequestError (a ValueError) if it does not know the run.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self._dialer = dialer
        self._last: RunStatus | None = None

    def __repr__(self) -> str:
        state = "" if self._last is None else f", {self._last.state}"
        return f"Run({self.name!r}{state})"

    def status(self) -> RunStatus:
        """How far it is: its state, age, exit code, and why it ended."""
        return self._note(RunStatus.model_validate(self._get("")))

    @property
    def exit_code(self) -> int | None:
        """Of the program, negative for a signal; None while it runs, and if it could not be started."""
        if self._last is None or self._last.live:
            self.status()
        assert self._last is not None
        return None if self._last.live else self._last.exit_code

    def logs(self, follow: bool = False) -> Iterator[str]:
        """What the program printed, stdout and stderr, line by line with the ends of the lines, ``\\r`` too.

        With ``follow``, goes on until the run has ended. The gateway keeps the last 64 MB.
        """
        return self._lines([0], follow=follow)

    def _lines(self, position: list[int], *, follow: bool) -> Iterator[str]:
        """What the program printed after ``position[0]`` bytes, which grows with what was read."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for data in self._output(position, follow=follow):
            text += decoder.decode(data)
            end = 0
            for line in LINE.finditer(text):
                end = line.end()
                yield line[0]
            text = text[end:]
        if text := text + decoder.decode(b"", final=True):
            yield text

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits until the run has ended; returns its exit code. Raises TimeoutError after ``timeout`` seconds.

        Goes on while the gateway cannot be reached for up to two minutes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT if deadline is None else max(0.0, min(WAIT, deadline - time.monotonic()))
            status = self._note(RunStatus.model_validate(_patiently(self._get, f"?wait={left:.1f}")))
            if not status.live:
                return status.exit_code
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run {self.name} has not ended within {timeout:g} s: it is {status.state}")

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Sends SIGTERM to the program, and SIGKILL to it and all that it started after ``grace`` seconds. Does not
        wait; does nothing if the run has ended."""
        body = b'{"grace": %r}' % float(grace)
        answer = request_json(self._dialer, f"{PATH}/{quote(self.name)}/stop", body, refusals=REFUSALS)
        self._note(RunStatus.model_validate(answer))

    def _output(self, position: list[int], *, follow: bool) -> Iterator[bytes]:
        wait = WAIT if follow else 0
        while True:
            page = RunOutput.model_validate(_patiently(self._get, f"/output?after={position[0]}&wait={wait}"))
            data = base64.b64decode(page.data)
            if page.start > position[0]:
                yield b"\n[meshgate: %d bytes of older output are no longer kept]\n" % (page.start - position[0])
            position[0] = page.start + len(data)
            self._note(page.run)
            if data:
                yield data
            elif not (follow and page.run.live):
                return

    def _note(self, status: RunStatus) -> RunStatus:
        self._last = status
        return status

    def _get(self, rest: str) -> object:
        return request_json(self._dialer, f"{PATH}/{quote(self.name)}{rest}", refusals=REFUSALS)


class RunAccess(ABC):
    """What a job offers of the programs that run beside its gateway."""

    @property
    @abstractmethod
    def _running(self) -> RunAccess | None: ...

    @abstractmethod
    def _dialer(self) -> Dialer: ...

    @abstractmethod
    def state(self) -> JobState: ...

    @abstractmethod
    def sync(self, *, sync_dirs: Sequence[str] | None = None, quiet: bool = False) -> SyncReport: ...

    def _joinable(self) -> JoinableJob:
        """What this job is to a program that runs in it. For job types."""
        return JoinableJob(kind=type(self).__name__)

    def submit(
        self,
        command: Sequence[str],
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
        memory: int | None = None,
        processes: int | None = None,
        disk: int | None = None,
        sync_dirs: Sequence[str] | None = None,
    ) -> Run:
        """Runs ``command`` beside the job's gateway, from the code as it is now, and returns at once.

        The program goes on when this process ends, until it ends itself, is stopped, or the job ends. It runs in a copy
        of the synced project (``sync_dirs``, as in ``sync``), in the same directory of it as this process; ``env`` is
        added to its environment. In it, a job that is this one attaches to this one. ``name`` is for people, and is
        free again once its run has ended. The program is started again up to ``restarts`` times if it fails.
        ``memory`` and ``disk`` (bytes) and ``processes`` limit all its processes together; the defaults are half of
        the machine's or container's memory, 4 GB and 4096. Applies the job if it does not run. A cut connection starts
        nothing twice. Raises ValueError if the command cannot run there or a run of this name has not ended,
        ConnectionFailedError if the gateway cannot be reached for two minutes, and what ``sync`` raises.
        """
        from meshgate.code_sync.session_sync import sync_for  # noqa: PLC0415 - few programs submit others

        if isinstance(command, str) or not command:
            raise TypeError(f"submit({command!r}): pass the program and its arguments, such as ['python', 'train.py']")
        self.state()
        running = self._require_runs()
        report = self.sync(sync_dirs=sync_dirs, quiet=True)
        client: ClientSession = running._client  # type: ignore[attr-defined]
        tree = sync_for(client, None).tree
        directory = _directory(tree)
        try:
            submission = Submission(
                name=name or _name_of(command),
                id=secrets.token_hex(16),  # a request that is repeated after a cut starts nothing again
                command=tuple(_translate(command, tree)),
                version=report.version,
                directory=directory,
                paths=tree.paths,
                environment=dict(env or {}),
                restarts=restarts,
                memory=memory,
                processes=processes,
                disk=disk,
                job=self._joinable(),
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"submit({where}={first['input']!r}): {first['msg']}") from None
        body = submission.model_dump_json(exclude_defaults=True).encode()
        if len(body) > MAX_SUBMISSION:
            raise ValueError(
                f"submit(): command and env= have {len(body)} bytes as JSON, and the limit is {MAX_SUBMISSION}: put "
                "long arguments into a file of the project"
            )
        try:
            answer = _patiently(lambda path: request_json(running._dialer(), path, body, refusals=REFUSALS), PATH)
        except ConnectionFailedError as error:
            raise ConnectionFailedError(
                f"it is not known whether the run {submission.name} was started: {error}. Look with job.runs() or "
                "`meshgate runs` once the gateway can be reached"
            ) from error
        run = Run(submission.name, running._dialer())
        run._note(RunStatus.model_validate(answer))
        return run

    def runs(self) -> list[Run]:
        """The runs of the running job, the oldest first. Raises GatewayError, and JobNotRunning before ``state()``."""
        dialer = self._require_runs()._dialer()
        found = []
        for status in Runs.model_validate(request_json(dialer, PATH, refusals=REFUSALS)).runs:
            run = Run(status.name, dialer)
            run._note(status)
            found.append(run)
        return found

    def run(self, name: str) -> Run:
        """The run called ``name``. Raises as its methods, and JobNotRunning before ``state()``."""
        run = Run(name, self._require_runs()._dialer())
        run.status()
        return run

    def _run_output(self, name: str, after: int) -> RunOutput:
        """What the run printed from byte ``after`` on, at most 1 MiB of it."""
        path = f"{PATH}/{quote(name)}/output?after={after}"
        return RunOutput.model_validate(request_json(self._require_runs()._dialer(), path, refusals=REFUSALS))

    def _require_runs(self) -> RunAccess:
        running = self._running
        if running is None:
            raise JobNotRunning(f"{self!r} is not running: call state() first")
        return running


def _patiently(ask: Callable[[str], object], rest: str) -> object:
    """``ask(rest)``, again and again for a while if the gateway cannot be reached."""
    deadline = time.monotonic() + OUTAGE
    while True:
        try:
            return ask(rest)
        except ConnectionFailedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY)


def _name_of(command: Sequence[str]) -> str:
    """A name for people: that of the script and four digits."""
    words = [word for word in command if not word.startswith("-")]
    word = next((word for word in words if not PYTHON.fullmatch(os.path.basename(word))), words[0] if words else "run")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(word).stem).strip("-") or "run"
    return f"{stem[:40]}-{secrets.token_hex(2)}"


def _directory(tree: Tree) -> str:
    """This working directory, relative to the project."""
    try:
        relative = Path.cwd().resolve().relative_to(tree.top.resolve())
    except ValueError:
        raise ValueError(
            f"submit(): the working directory {Path.cwd()} is outside of the synced project {tree.top}: change to a "
            "directory inside of it, or name this one in sync_dirs"
        ) from None
    return "" if str(relative) == "." else str(relative)


def _translate(command: Sequence[str], tree: Tree) -> Iterator[str]:
    """``command`` as it runs elsewhere: this interpreter is ``python``, and files of the project are relative to the
    working directory. Raises ValueError if its script does not exist or is not in the project."""
    program, *arguments = map(str, command)
    is_python = program == sys.executable or PYTHON.fullmatch(os.path.basename(program)) is not None
    yield "python" if program == sys.executable else _relative(program, tree)
    if is_python and arguments and arguments[0].endswith(".py"):
        script = Path(arguments[0])
        if not script.is_file():
            raise ValueError(f"submit(): the script {script} does not exist in {Path.cwd()}")
        if not script.resolve().is_relative_to(tree.top.resolve()):
            raise ValueError(f"submit(): {script} is outside of the synced project {tree.top}: move it there")
    for argument in arguments:
        yield _relative(argument, tree)


def _relative(argument: str, tree: Tree) -> str:
    path = Path(argument)
    if path.is_absolute() and path.exists() and path.resolve().is_relative_to(tree.top.resolve()):
        return os.path.relpath(path.resolve(), Path.cwd().resolve())
    return argument

"""Programs that run in the cluster, beside the job's gateway: how they are submitted, and the runs that this starts.

``run_access`` has the methods of a job. A program is sent as the synced version of the project and a command; the
gateway keeps what it prints and how it ends, so that a run needs neither this process nor this machine any more.
"""

from __future__ import annotations

import base64
import codecs
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from meshgate.errors import ConnectionFailedError, InvalidRequestError
from meshgate.session.gateway_client import request_json
from meshgate_wire.status import (
    MAX_GRACE,
    MAX_SUBMISSION,
    NAME_REUSED,
    JoinableJob,
    Program,
    RunOutput,
    Runs,
    RunStatus,
    StopRequest,
    Submission,
)

if TYPE_CHECKING:
    from meshgate.code_sync.project import Tree
    from meshgate.session.dialing import Dialer

PATH = "/v1/runs"
WAIT = 10.0  # seconds that the gateway may hold an answer back until there is news
OUTAGE = 120.0  # seconds for which a gateway that cannot be reached does not end a wait
RETRY = 1.0
STOP_GRACE = 30.0
REFUSALS = frozenset({400, 404, 405, 409, 413, 507})
PYTHON = re.compile(r"python(3(\.\d+)?)?")
LINE_END = re.compile(r"\r\n|\r(?!$)|\n")  # a "\r" at the end of what has arrived may belong to a "\n"

P = TypeVar("P", bound=Program)
Answer = TypeVar("Answer")
Args = ParamSpec("Args")
_WANTED = {
    ("name", "string_pattern_mismatch"): (
        "the name of a run begins with a letter from A to Z or a digit, and has at most 63 letters, digits, '.', '_' "
        "and '-'"
    ),
    ("command", "string_pattern_mismatch"): "an argument of a program has no null byte",
    ("environment", "string_pattern_mismatch"): (
        "the name of a variable has no '=', and neither name nor value has a null byte"
    ),
}
"""What a wrong argument should be, by its field and pydantic's type of the error."""


class LineSplitter:
    """Splits the output of a program, which arrives in parts, into lines with their ends."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a line

    def split(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that end in ``data``; with ``final``, also a last one without an end."""
        start, searched, lines = 0, max(0, len(self._rest) - 1), []
        text = self._rest + self._decoder.decode(data, final)
        for end in LINE_END.finditer(text, searched):
            lines.append(text[start : end.end()])
            start = end.end()
        self._rest = text[start:]
        if final and self._rest:
            lines.append(self._rest)
            self._rest = ""
        return lines


class Run:
    """A program that was submitted to a job, and runs beside its gateway.

    Any process that finds the job can have it, from ``job.run(name)``. Its methods raise GatewayError if the gateway
    cannot be reached, and InvalidRequestError (a ValueError) if it does not know the run, or a later run has its name.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self._dialer = dialer
        self._id = ""  # of its submission, from the first answer that has it: its name may become that of a later run
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
        splitter = LineSplitter()
        for data in self._output(position, follow=follow):
            yield from splitter.split(data)
        yield from splitter.split(b"", final=True)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits until the run has ended; returns its exit code. Raises TimeoutError after ``timeout`` seconds.

        Goes on while the gateway cannot be reached for up to two minutes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT if deadline is None else max(0.0, min(WAIT, deadline - time.monotonic()))
            status = self._note(RunStatus.model_validate(patiently(self._get, f"?wait={left:.1f}")))
            if not status.live:
                return status.exit_code
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run {self.name} has not ended within {timeout:g} s: it is {status.state}")

    def stop(self, grace: float = STOP_GRACE) -> None:
        """Sends SIGTERM to the program, and SIGKILL to it and all that it started after ``grace`` seconds. Does not
        wait; does nothing if the run has ended. Raises ValueError if ``grace`` is not 0 to 86,400 seconds."""
        if not isinstance(grace, (int, float)) or not 0 <= grace <= MAX_GRACE:
            raise ValueError(f"stop(grace={grace!r}): expected a number of seconds, 0 to {MAX_GRACE}")
        body = StopRequest(grace=float(grace), id=self._id).model_dump_json().encode()
        answer = request_json(self._dialer, f"{PATH}/{quote(self.name)}/stop", body, refusals=REFUSALS)
        self._note(RunStatus.model_validate(answer))

    def output(self, after: int) -> RunOutput:
        """What the program printed from byte ``after`` on, at most 1 MiB of it."""
        return self._note_page(RunOutput.model_validate(self._get(f"/output?after={after}")))

    def _output(self, position: list[int], *, follow: bool) -> Iterator[bytes]:
        wait = WAIT if follow else 0
        while True:
            answer = patiently(self._get, f"/output?after={position[0]}&wait={wait}")
            page = self._note_page(RunOutput.model_validate(answer))
            data = base64.b64decode(page.data)
            if page.start > position[0]:
                yield b"\n[meshgate: %d bytes of older output are no longer kept]\n" % (page.start - position[0])
            position[0] = page.start + len(data)
            if data:
                yield data
            elif not (follow and page.run.live):
                return

    def _note(self, status: RunStatus) -> RunStatus:
        """``status``; how this run ended if that is known, and ``status`` is that of a later run."""
        if self._id and status.id not in ("", self._id):
            if self._last is None or self._last.live:
                raise InvalidRequestError(NAME_REUSED.format(self.name))
            return self._last
        self._id, self._last = self._id or status.id, status
        return status

    def _note_page(self, page: RunOutput) -> RunOutput:
        if self._note(page.run) is not page.run:
            raise InvalidRequestError(NAME_REUSED.format(self.name))
        return page

    def _get(self, rest: str) -> object:
        return request_json(self._dialer, f"{PATH}/{quote(self.name)}{rest}", refusals=REFUSALS)


def program_of(command: Sequence[str], name: str | None, **options: Any) -> Program:
    """The program to submit. Raises ValueError if no gateway would take it."""
    command = [str(word) for word in command]
    name = name or _name_of(command)
    identifier = secrets.token_hex(16)  # a request that is repeated after a cut starts nothing again
    program = _validated(Program, name=name, id=identifier, command=tuple(command), **options)
    script = _script_of(command)
    if script is not None and not os.path.isfile(script):
        raise ValueError(f"submit(): the script {script} does not exist in {Path.cwd()}")
    return program


def submit(dialer: Callable[[], Dialer], tree: Tree, version: str, program: Program, job: JoinableJob) -> Run:
    """Starts a run of ``version`` of ``tree`` at the gateway that ``dialer`` finds. Raises as ``job.submit()``."""
    fields = {**dict(program), "command": tuple(_translate(program.command, tree))}
    directory = _directory(tree)
    submission = _validated(Submission, **fields, version=version, directory=directory, paths=tree.paths, job=job)
    body = submission.model_dump_json(exclude_defaults=True).encode()
    if len(body) > MAX_SUBMISSION:
        raise ValueError(
            f"submit(): command and env= have {len(body)} bytes as JSON, and the limit is {MAX_SUBMISSION}: put "
            "long arguments into a file of the project"
        )
    try:
        answer = patiently(lambda path: request_json(dialer(), path, body, refusals=REFUSALS), PATH)
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"it is not known whether the run {submission.name} was started: {error}. Look with job.runs() or "
            "`meshgate runs` once the gateway can be reached"
        ) from error
    run = Run(submission.name, dialer())
    run._note(RunStatus.model_validate(answer))
    return run


def _validated(model: type[P], **fields: Any) -> P:
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]").replace("environment", "env", 1)
        wanted = _WANTED.get((str(first["loc"][0]), first["type"]), first["msg"])
        raise ValueError(f"submit({where}={first['input']!r:.100}): {wanted}") from None


def list_runs(dialer: Dialer) -> list[Run]:
    """The runs of the gateway behind ``dialer``, the oldest first. Raises GatewayError."""
    found = []
    for status in Runs.model_validate(request_json(dialer, PATH, refusals=REFUSALS)).runs:
        run = Run(status.name, dialer)
        run._note(status)
        found.append(run)
    return found


def patiently(ask: Callable[Args, Answer], *args: Args.args, **options: Args.kwargs) -> Answer:
    """What ``ask`` returns, which is called again and again for a while if the gateway cannot be reached."""
    deadline = time.monotonic() + OUTAGE
    while True:
        try:
            return ask(*args, **options)
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
    """This working directory, relative to the project. It may be above parts of that: the gateway has it as well."""
    here = Path.cwd().resolve()
    if (place := tree.place(here)) is None:
        raise ValueError(
            f"submit(): the working directory {here} is outside of the synced project {tree}: change to a directory "
            "inside of it, or name this one in sync_dirs"
        )
    return place


def _script_of(command: Sequence[str]) -> Path | None:
    """The script that ``command`` runs with Python."""
    program, *arguments = command
    is_python = program == sys.executable or PYTHON.fullmatch(os.path.basename(program)) is not None
    return Path(arguments[0]) if is_python and arguments and arguments[0].endswith(".py") else None


def _translate(command: Sequence[str], tree: Tree) -> Iterator[str]:
    """``command`` as it runs elsewhere: this interpreter is ``python``, and files of the project are relative to the
    working directory. Raises ValueError if its script is not in the project."""
    script = _script_of(command)
    if script is not None and not tree.has(script.resolve()):
        raise ValueError(f"submit(): {script} is outside of the synced project {tree}: move it there")
    program, *arguments = command
    yield "python" if program == sys.executable else _relative(program, tree)
    for argument in arguments:
        yield _relative(argument, tree)


def _relative(argument: str, tree: Tree) -> str:
    path = Path(argument)
    # os.path.exists, because Path.exists raises if the argument names no path that can be looked at
    if path.is_absolute() and os.path.exists(path) and tree.has(path.resolve()):
        return os.path.relpath(path.resolve(), Path.cwd().resolve())
    return argument

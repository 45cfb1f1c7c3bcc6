"""``meshgate mcp``: commands as tools of a Model Context Protocol server on stdin and stdout.

The server has no state: each call runs one command with ``--json`` in a process of its own, so that nothing that is
printed can get between the messages. The process of the next call is started before. Commands that change nothing run
at once, also while a call hangs; the others run one after the other, as their edits have an order.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, Literal, TextIO

import typer

from meshgate.cli.agents.run import Edit
from meshgate_processes.identity import last_output
from meshgate_wire.handshake import SOFTWARE_VERSION

PROTOCOL_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
TIMEOUT = 600.0  # seconds for what a tool runs, unless the call says otherwise, and for each other command
MOST_TIMEOUT = 1_000_000.0  # seconds
WAITS = 3  # how often `call` may wait for its timeout: for a reload, for new actors and for the values
END_TIMEOUT = 20.0  # seconds for a command to end what it runs on the hosts, or its program
MOST_ERROR = 4000  # characters
INVALID_REQUEST, UNKNOWN_METHOD, INVALID_ARGUMENTS, INTERNAL_ERROR = -32600, -32601, -32602, -32603

_COMMAND = "import {modules}; from meshgate.cli.agents.mcp import run_prepared; run_prepared()"
_MODULES = "meshgate.cli.agents.call"
_MODULES_IN_CLUSTER = "meshgate.jobs.kubernetes.job, meshgate_kubernetes.api.credentials"
_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "description": "seconds", "default": TIMEOUT, "exclusiveMinimum": 0}
_TYPES = {"args": list, "kwargs": dict, "init": dict}  # they are passed on item by item
_EDIT = Edit.model_json_schema()
_JOB = {
    "type": "string",
    "description": "id that ls lists or file of the job, or with namespace its name; default: the only one",
}
_NAMESPACE = {"type": "string", "description": "of a Kubernetes cluster, if the job runs there"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A command. ``options`` are arguments that become options of the same name, repeated for each item of a list.

    ``positional`` are arguments that the command takes in this order: of a list each item, of ``args`` in JSON, and of
    ``kwargs`` as ``NAME=JSON``. ``job``: whether it takes a job, and as its first argument or as an option. ``effect``:
    whether it changes nothing, something that a repetition does not change further, or anything.
    """

    description: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    job: Literal["", "first", "option"] = "first"
    in_cluster: bool = True
    positional: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    effect: Literal["none", "idempotent", "any"] = "none"

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Mapping[str, Any]] = {"job": _JOB} if self.job else {}
        properties |= {"namespace": _NAMESPACE} if self.in_cluster else {}
        properties |= {**self.options, **self.positional}
        required = list(self.required)
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def annotations(self) -> dict[str, bool]:
        reads = self.effect == "none"
        changes = {"destructiveHint": self.effect == "any", "idempotentHint": self.effect == "idempotent"}
        return {"readOnlyHint": reads, "openWorldHint": not reads, **({} if reads else changes)}


TOOLS: dict[str, Tool] = {
    "ls": Tool(
        "Running jobs of this machine, of a namespace of a Kubernetes cluster, or of a Slurm cluster.",
        {"login": {"type": "string", "description": "the login node of a Slurm cluster, as ssh takes it"}},
        job="",
    ),
    "status": Tool("Hosts, code versions, sessions, meshes and calls in flight of a job."),
    "why": Tool("What a job waits for: calls in flight, and the stacks of the ranks that have not answered."),
    "stacks": Tool("Python stacks of all processes of a job.", {"rank": _NUMBER}),
    "logs": Tool("The last lines that actors printed.", {"tail": _NUMBER, "rank": _NUMBER}),
    "sync": Tool(
        "Pushes the code of this directory to all hosts of a job; the next program or reload() runs it.",
        {"dir": {"type": "array", "items": _TEXT}},
        effect="idempotent",
    ),
    "exec": Tool(
        "Runs a command on hosts of a job and returns the output and exit code of each.",
        {"rank": {"type": "array", "items": _NUMBER}, "timeout": _SECONDS},
        positional={"command": {"type": "array", "items": _TEXT, "minItems": 1}},
        required=("job", "command"),
        effect="any",
    ),
    "call": Tool(
        "Edits files, brings the code to all hosts, reloads it there, and calls an endpoint on every rank: returns the "
        "values, what was printed, what was reloaded, and an error with the traceback of each group of ranks. "
        "Processes stay up between calls, in a detached session.",
        {
            "edit": {"type": "array", "items": _EDIT, "description": "made in this order before the sync; all or none"},
            "sync": {"type": "boolean", "description": "sync and reload without edits, such as after own edits"},
            "session": {"type": "string", "description": "default: the one with these actors; for a class, 'agent'"},
            "init": {"type": "object", "description": "arguments of the constructor, for MODULE:CLASS"},
            "procs": {"type": "string", "description": "the processes to spawn on, for MODULE:CLASS"},
            "timeout": _SECONDS,
        },
        job="option",
        positional={
            "target": {
                "type": "string",
                "description": "MESH.ENDPOINT of actors of the session, or MODULE:CLASS.ENDPOINT of new ones",
            },
            "args": {"type": "array", "description": "positional arguments"},
            "kwargs": {"type": "object", "description": "keyword arguments"},
        },
        required=("target",),
        effect="any",
    ),
    "run": Tool(
        "Runs a Python program on this machine, such as a driver: returns its exit code, output, and the exception "
        "that ended it, with the traceback of each group of ranks.",
        {
            "code": {"type": "string", "description": "the program, if it is not a file"},
            "edit": {"type": "array", "items": _EDIT, "description": "made first; all or none"},
            "timeout": _SECONDS,
        },
        job="",
        in_cluster=False,
        positional={
            "program": {"type": "string", "description": "a Python file"},
            "arguments": {"type": "array", "items": _TEXT},
        },
        effect="any",
    ),
    "doctor": Tool("Checks this machine, the cluster and the way to a job, with a remedy for each problem."),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[[Any, list[str], float], Outcome | None]
"""Runs a command for the request with an id, which may take so many seconds. None: the request was cancelled."""


def command_of(name: str, arguments: Any) -> list[str]:
    """The arguments of ``meshgate`` for a call of a tool. Raises ValueError if they do not fit its schema."""
    tool = TOOLS.get(name)
    if tool is None:
        raise ValueError(f"unknown tool {name!r}; the tools are {', '.join(TOOLS)}")
    _require(arguments, dict, "arguments")
    schema = tool.schema()
    if unknown := set(arguments) - set(schema["properties"]):
        raise ValueError(f"{name} has no argument {', '.join(sorted(unknown))}")
    if missing := set(schema["required"]) - set(arguments):
        raise ValueError(f"{name} needs {', '.join(sorted(missing))}")
    for argument, kind in _TYPES.items():
        if arguments.get(argument) is not None:
            _require(arguments[argument], kind, argument)
    given = {**arguments, "timeout": _timeout(arguments.get("timeout"))}
    options = [text for option in tool.options for text in _option(option, given.get(option))]
    options += [f"--namespace={arguments['namespace']}"] if "namespace" in arguments else []
    job = [str(arguments["job"])] if "job" in arguments else []
    if any(each.startswith("-") for each in job):
        raise ValueError(f"{job[0]!r} is not the name of a job")
    if tool.job == "option":
        options, job = [*options, *(f"--job={each}" for each in job)], []
    positional = [text for argument in tool.positional for text in _positional(argument, arguments.get(argument))]
    return [name, "--json", *options, *job, *(["--", *positional] if positional else [])]


def _require(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        expected = "an array" if kind is list else "an object"
        raise ValueError(f"{name} must be {expected}, not {json.dumps(value)}")  # noqa: TRY004 - as command_of says


def _timeout(value: Any) -> float:
    if value is None:
        return TIMEOUT
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_TIMEOUT:
        raise ValueError(f"timeout must be a number of seconds, at most {MOST_TIMEOUT:,.0f}, not {json.dumps(value)}")
    return value


def _limit(name: str, arguments: Mapping[str, Any]) -> float:
    """Seconds after which a command has failed. One with a limit of its own gets longer, to report what it has done."""
    if "timeout" not in TOOLS[name].options:
        return TIMEOUT
    return WAITS * _timeout(arguments.get("timeout")) + 3 * END_TIMEOUT


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, dict) and name == "init":
        value = [f"{key}={json.dumps(each)}" for key, each in value.items()]
    texts = () if value is None else value if isinstance(value, list) else (value,)
    return [f"--{name}={json.dumps(each) if isinstance(each, dict) else each}" for each in texts]


def _positional(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if name == "kwargs":
        return [f"{key}={json.dumps(each)}" for key, each in value.items()]
    if name == "args":
        return [json.dumps(each) for each in value]
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def respond(message: Any, run: Run) -> dict[str, Any] | None:
    """The response to a message; None for a notification and a cancelled request."""
    number = message.get("id") if isinstance(message, dict) else None
    if not _is_request(message):
        text = "expected a JSON-RPC request: a method, params that are an object, an id that is a string or a number"
        return _error(number if _is_id(number) else None, INVALID_REQUEST, text)
    if "id" not in message:
        return None
    method, parameters = message["method"], message.get("params") or {}
    if method == "tools/call":
        return _call(number, parameters, run)
    if method == "initialize":
        return _result(number, _greeting(parameters.get("protocolVersion")))
    if method in ("ping", "tools/list"):
        return _result(number, {"tools": _tools()} if method == "tools/list" else {})
    return _error(number, UNKNOWN_METHOD, f"unknown method {method}")


def _is_request(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("method"), str)
        and isinstance(message.get("params"), (dict, type(None)))
        and _is_id(message.get("id", ""))
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _tools() -> list[dict[str, Any]]:
    from meshgate.cli.schemas import SCHEMAS  # noqa: PLC0415 - imports the modules of all commands

    found = []
    for name, tool in TOOLS.items():
        output = SCHEMAS[name].model_json_schema(mode="serialization")
        if name == "logs":
            definitions = {"$defs": output.pop("$defs", {})}
            lines = {"type": "array", "items": output}
            output = {"type": "object", "properties": {"lines": lines}, "required": ["lines"], **definitions}
        found.append(
            {
                "name": name,
                "description": tool.description,
                "inputSchema": tool.schema(),
                "outputSchema": output,
                "annotations": tool.annotations(),
            }
        )
    return found


def _call(number: Any, parameters: Mapping[str, Any], run: Run) -> dict[str, Any] | None:
    name, arguments = str(parameters.get("name")), parameters.get("arguments") or {}
    try:
        command = command_of(name, arguments)
    except ValueError as error:
        return _error(number, INVALID_ARGUMENTS, str(error))
    outcome = run(number, command, _limit(name, arguments))
    return _result(number, _tool_result(outcome)) if outcome is not None else None


def _greeting(version: Any) -> dict[str, Any]:
    return {
        "protocolVersion": version if version in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "meshgate", "version": SOFTWARE_VERSION},
        "instructions": _skill(),
    }


def _tool_result(outcome: Outcome) -> dict[str, Any]:
    """What the command printed as data. A command that printed no JSON has failed."""
    found = _parse(outcome.stdout)
    if found is None:
        text = last_output(outcome.stderr.strip(), MOST_ERROR) or f"the command exited with {outcome.returncode}"
        return {"content": [{"type": "text", "text": text}], "isError": True}
    failed = found.get("error") is not None
    return {"content": [{"type": "text", "text": json.dumps(found)}], "structuredContent": found, "isError": failed}


def _parse(text: str) -> dict[str, Any] | None:
    """One object, or for ``logs`` one object on each line, as ``lines``."""
    try:
        found = json.loads(text)
    except ValueError:
        try:
            # Not splitlines(): JSON strings may contain other line separators, such as U+2028.
            return {"lines": [json.loads(line) for line in text.strip("\n").split("\n")]} if text.strip() else None
        except ValueError:
            return None
    return found if isinstance(found, dict) and "number" not in found else {"lines": [found]}


def _result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


def run_prepared() -> None:
    """The process of a command: runs the one whose arguments are on stdin, as JSON; none, if stdin ends.

    It ends without taking the interpreter down: with Monarch's libraries that took 0.1 s of the 0.25 s of a call, and
    half a second on a busy machine.
    """
    from meshgate.cli.app import app  # noqa: PLC0415 - which has this module

    text = sys.stdin.read()
    code: Any = 0
    try:
        if text:
            app(json.loads(text))
    except SystemExit as end:
        code = end.code
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


class Commands:
    """Runs each command in a process of its own, which is started before it is needed: its imports take a second.

    One process cannot fork for each: importing Monarch, where it is installed, starts threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: subprocess.Popen[str] | None = None
        self._expected: dict[Any, subprocess.Popen[str] | None] = {}  # by the id of the request, until it is cancelled
        self._modules = _MODULES

    def prepare(self) -> None:
        """Starts the process of the next command. It ends if it gets no command."""
        with self._lock:
            self._next = self._next or self._start()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _COMMAND.format(modules=self._modules)]
        return subprocess.Popen(command, errors="backslashreplace", stdin=pipe, stdout=pipe, stderr=pipe)

    def expect(self, number: Any) -> None:
        """From now on, the request with this id can be cancelled."""
        with self._lock:
            self._expected[number] = None

    def run(self, number: Any, arguments: list[str], limit: float) -> Outcome | None:
        """The outcome of the command, which is ended after ``limit`` seconds; None if its request was cancelled."""
        with self._lock:
            if number not in self._expected:
                return None
            process, self._next = self._next or self._start(), None
            self._expected[number] = process
            if any(each.startswith("--namespace=") for each in arguments):  # then the next one probably has it, too
                self._modules = f"{_MODULES}, {_MODULES_IN_CLUSTER}"
        with process:
            try:
                stdout, stderr = process.communicate(json.dumps(arguments), limit)
            except subprocess.TimeoutExpired:
                _end(process)
                process.communicate()
                return Outcome(1, "", f"{arguments[0]} did not finish within {limit:g} s")
            finally:
                cancelled = self._forget(number) is None
        if cancelled:
            return None
        # ``logs`` prints nothing where nothing was printed
        nothing = not stdout and arguments[0] == "logs" and not process.returncode
        return Outcome(process.returncode, '{"lines": []}' if nothing else stdout, stderr)

    def cancel(self, number: Any) -> None:
        """Ends the command of the request as Ctrl-C does: it first ends what it runs on the hosts."""
        process = self._forget(number)
        if process is not None:
            _end(process)

    def _forget(self, number: Any) -> subprocess.Popen[str] | None:
        with self._lock:
            return self._expected.pop(number, None)

    def close(self) -> None:
        """Cancels all commands."""
        for number in list(self._expected):
            self.cancel(number)
        if self._next is not None:
            self._next.communicate()  # the end of its input ends it
            self._next = None


def _end(process: subprocess.Popen[str]) -> None:
    """Sends SIGTERM, and SIGKILL if it has not ended in time. Does not wait."""
    process.terminate()
    kill = threading.Timer(END_TIMEOUT, process.kill)
    kill.daemon = True
    kill.start()


def serve(source: TextIO, target: TextIO, commands: Commands) -> None:
    """Answers each line of ``source`` on ``target``, until it ends and all have been answered."""
    writing = threading.Lock()

    def answer(message: Any) -> None:
        try:
            response = respond(message, commands.run)
        except Exception as error:  # noqa: BLE001 - reported to the host, which waits for an answer
            response = _error(message["id"], INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        if response is not None:
            with writing:
                target.write(json.dumps(response) + "\n")
                target.flush()
        with contextlib.suppress(OSError):  # the next command starts its process then, and reports what fails
            commands.prepare()

    reading, changing = pools = ThreadPoolExecutor(), ThreadPoolExecutor(1)
    try:
        for line in source:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            valid = _is_request(message)
            method, parameters = (message["method"], message.get("params") or {}) if valid else (None, {})
            if method == "notifications/cancelled":
                if _is_id(number := parameters.get("requestId")):
                    commands.cancel(number)
            elif method == "tools/call" and "id" in message:
                commands.expect(message["id"])
                tool = TOOLS.get(str(parameters.get("name")))
                pool = reading if tool is not None and tool.effect == "none" else changing
                pool.submit(answer, message).add_done_callback(Future.result)  # what it raises is printed
            else:
                answer(message)
        for pool in pools:
            pool.shutdown()
    finally:
        commands.close()
        for pool in pools:
            pool.shutdown()


def serve_tools(
    skill: Annotated[bool, typer.Option("--skill", help="Print what an agent should know, and exit.")] = False,
) -> None:
    """Serve tools for coding agents (Model Context Protocol).

    On stdin and stdout.
    """
    if skill:
        typer.echo(_skill())
    else:
        serve(sys.stdin, sys.stdout, Commands())


def _skill() -> str:
    return resources.files("meshgate.cli.agents").joinpath("SKILL.md").read_text(encoding="utf-8")

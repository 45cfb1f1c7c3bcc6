"""``meshgate mcp``: the commands that look into jobs, as tools of a Model Context Protocol server on stdin and stdout.

The server has no state: each call runs one command with ``--json`` in a process of its own, so that nothing that is
printed can get between the messages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, TextIO

import typer

from meshgate_wire.version import SOFTWARE_VERSION

__all__ = ["TOOLS", "Outcome", "Tool", "command_of", "respond", "serve", "serve_tools"]

PROTOCOL_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
TIMEOUT = 600.0  # seconds
MOST_ERROR = 4000  # characters
INVALID_REQUEST, UNKNOWN_METHOD, INVALID_ARGUMENTS = -32600, -32601, -32602

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
_JOB = {"type": "string", "description": "id or file of the job, or with namespace its name; default: the only one"}
_NAMESPACE = {"type": "string", "description": "of a Kubernetes cluster, if the job runs there"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A command. ``options`` are arguments that become options of the same name, repeated for each item of a list."""

    description: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    takes_job: bool = True
    takes_command: bool = False

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Mapping[str, Any]] = {"job": _JOB} if self.takes_job else {}
        properties |= {"namespace": _NAMESPACE, **self.options}
        if self.takes_command:
            properties["command"] = {"type": "array", "items": _TEXT, "minItems": 1}
        required = ["job", "command"] if self.takes_command else []
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TOOLS: dict[str, Tool] = {
    "ls": Tool("Running jobs of this machine, or of a namespace of a cluster.", takes_job=False),
    "status": Tool("Hosts, code versions, sessions, meshes and calls in flight of a job."),
    "why": Tool("What a job waits for: calls in flight, and the stacks of the ranks that have not answered."),
    "stacks": Tool("Python stacks of all processes of a job.", {"rank": _NUMBER}),
    "logs": Tool("The last lines that actors printed.", {"tail": _NUMBER, "rank": _NUMBER}),
    "sync": Tool(
        "Pushes the code of this directory to all hosts of a job; the next program or reload() runs it.",
        {"dir": {"type": "array", "items": _TEXT}},
    ),
    "exec": Tool(
        "Runs a command on hosts of a job and returns the output and exit code of each.",
        {"rank": {"type": "array", "items": _NUMBER}, "timeout": {"type": "number"}},
        takes_command=True,
    ),
    "doctor": Tool("Checks this machine, the cluster and the way to a job, with a remedy for each problem."),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[[list[str]], Outcome]


def command_of(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """The arguments of ``meshgate`` for a call of a tool. Raises ValueError if they do not fit its schema."""
    tool = TOOLS.get(name)
    if tool is None:
        raise ValueError(f"unknown tool {name!r}; the tools are {', '.join(TOOLS)}")
    schema = tool.schema()
    if unknown := set(arguments) - set(schema["properties"]):
        raise ValueError(f"{name} has no argument {', '.join(sorted(unknown))}")
    if missing := set(schema["required"]) - set(arguments):
        raise ValueError(f"{name} needs {', '.join(sorted(missing))}")
    options = [f"--{option}={each}" for option in tool.options for each in _items(arguments.get(option))]
    if (namespace := arguments.get("namespace")) is not None:
        options.append(f"--namespace={namespace}")
    job = [str(arguments["job"])] if "job" in arguments else []
    if any(each.startswith("-") for each in job):
        raise ValueError(f"{job[0]!r} is not the name of a job")
    command = ["--", *map(str, arguments["command"])] if tool.takes_command else []
    return [name, "--json", *options, *job, *command]


def _items(value: Any) -> Iterable[Any]:
    return () if value is None else value if isinstance(value, list) else (value,)


def respond(message: Any, run: Run) -> dict[str, Any] | None:
    """The response to a message; None for a notification."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _error(None, INVALID_REQUEST, "expected a JSON-RPC request")
    if "id" not in message:
        return None
    number, method, parameters = message["id"], message["method"], message.get("params") or {}
    if method == "tools/call":
        return _call(number, parameters, run)
    if method == "initialize":
        return _result(number, _greeting(parameters.get("protocolVersion")))
    if method in ("ping", "tools/list"):
        tools = [{"name": name, "description": t.description, "inputSchema": t.schema()} for name, t in TOOLS.items()]
        return _result(number, {"tools": tools} if method == "tools/list" else {})
    return _error(number, UNKNOWN_METHOD, f"unknown method {method}")


def _call(number: Any, parameters: Mapping[str, Any], run: Run) -> dict[str, Any]:
    try:
        command = command_of(str(parameters.get("name")), parameters.get("arguments") or {})
    except ValueError as error:
        return _error(number, INVALID_ARGUMENTS, str(error))
    return _result(number, _tool_result(run(command)))


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
        text = outcome.stderr.strip()[-MOST_ERROR:] or f"the command exited with {outcome.returncode}"
        return {"content": [{"type": "text", "text": text}], "isError": True}
    return {"content": [{"type": "text", "text": json.dumps(found)}], "structuredContent": found, "isError": False}


def _parse(text: str) -> dict[str, Any] | None:
    """One object, or for ``logs`` one object on each line, as ``lines``."""
    try:
        found = json.loads(text)
    except ValueError:
        try:
            return {"lines": [json.loads(line) for line in text.splitlines()]} if text.strip() else None
        except ValueError:
            return None
    return found if isinstance(found, dict) and "number" not in found else {"lines": [found]}


def _result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


def _run(arguments: list[str]) -> Outcome:
    command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Outcome(1, "", f"{arguments[0]} did not finish within {TIMEOUT:g} s")
    # ``logs`` prints nothing where nothing was printed
    stdout = done.stdout if done.stdout or arguments[0] != "logs" or done.returncode else '{"lines": []}'
    return Outcome(done.returncode, stdout, done.stderr)


def serve(source: TextIO, target: TextIO, run: Run) -> None:
    """Answers each line of ``source`` on ``target`` until it ends."""
    for line in source:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        response = respond(message, run)
        if response is not None:
            target.write(json.dumps(response) + "\n")
            target.flush()


def serve_tools(
    skill: Annotated[bool, typer.Option("--skill", help="Print what an agent should know, and exit.")] = False,
) -> None:
    """Serve tools for coding agents on stdin and stdout (Model Context Protocol)."""
    if skill:
        typer.echo(_skill())
    else:
        serve(sys.stdin, sys.stdout, _run)


def _skill() -> str:
    return resources.files("meshgate.cli").joinpath("SKILL.md").read_text(encoding="utf-8")

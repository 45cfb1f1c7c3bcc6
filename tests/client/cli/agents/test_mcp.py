from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli.agents import mcp
from meshgate.cli.agents.mcp import TOOLS, Commands, Outcome, command_of, respond, serve
from meshgate.cli.app import COMMANDS, app
from meshgate_wire.handshake import SOFTWARE_VERSION
from tests.waiting import DEADLINE, wait_for


def call(name: str, arguments: Any, outcome: Outcome = Outcome(0, "{}", "")) -> dict[str, Any]:  # noqa: B008
    parameters = {"name": name, "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": parameters}
    response = respond(message, lambda number, command, limit: outcome)
    assert response is not None
    return response


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("ls", {}, ["ls", "--json"]),
        ("status", {"job": "cafe"}, ["status", "--json", "cafe"]),
        ("logs", {"job": "a", "namespace": "b", "tail": 9}, ["logs", "--json", "--tail=9", "--namespace=b", "a"]),
        ("sync", {"dir": ["x", "y"]}, ["sync", "--json", "--dir=x", "--dir=y"]),
        (
            "exec",
            {"job": "a", "rank": [0, 1], "command": ["ls", "--json"]},
            ["exec", "--json", "--rank=0", "--rank=1", "--timeout=600.0", "a", "--", "ls", "--json"],
        ),
        (
            "call",
            {
                "job": "a",
                "namespace": "b",
                "target": "m.e",
                "args": ["x", 2],
                "kwargs": {"k": [1]},
                "edit": [{"file": "f", "new": ""}],
                "init": {"rate": "r"},
                "sync": True,
            },
            [
                *("call", "--json", '--edit={"file": "f", "new": ""}', "--sync", '--init=rate="r"'),
                *("--timeout=600.0", "--namespace=b", "--job=a", "--", "m.e", '"x"', "2", "k=[1]"),
            ],
        ),
        ("call", {"target": "m.e", "sync": False, "timeout": None}, ["call", "--json", "--timeout=600.0", "--", "m.e"]),
        (
            "run",
            {"program": "p.py", "arguments": ["--x", "1"], "timeout": 3, "edit": None},
            ["run", "--json", "--timeout=3", "--", "p.py", "--x", "1"],
        ),
        ("run", {"code": "print(1)"}, ["run", "--json", "--code=print(1)", "--timeout=600.0"]),
    ],
)
def test_a_tool_is_a_command(name: str, arguments: dict[str, Any], expected: list[str]) -> None:
    assert command_of(name, arguments) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("kill", {}, "unknown tool 'kill'"),
        ("ls", {"all": True}, "no argument all"),
        ("exec", {"job": "a"}, "needs command"),
        ("status", {"job": "--help"}, "is not the name of a job"),
        ("run", {"namespace": "a"}, "no argument namespace"),
        ("call", {"target": "m.e", "kwargs": "{}"}, 'kwargs must be an object, not "{}"'),
        ("call", {"target": "m:C.e", "init": [1]}, "init must be an object, not [1]"),
        ("call", {"target": "m.e", "args": "[1]"}, 'args must be an array, not "[1]"'),
        ("call", {"target": "m.e", "args": 5}, "args must be an array, not 5"),
        ("ls", ["a"], "arguments must be an object"),
        ("run", {"code": "", "timeout": 0}, "timeout must be a number of seconds, at most 1,000,000, not 0"),
        ("run", {"code": "", "timeout": "9"}, 'timeout must be a number of seconds, at most 1,000,000, not "9"'),
        ("run", {"code": "", "timeout": float("inf")}, "timeout must be a number of seconds"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, arguments: Any, message: str) -> None:
    error = call(name, arguments)["error"]
    assert error["code"] == -32602
    assert message in error["message"]


def test_every_tool_is_a_command_that_has_its_options(run: CliRunner) -> None:
    for name, tool in TOOLS.items():
        text = run.invoke(app, [name, "--help"]).output
        namespace = ["namespace"] if tool.in_cluster else []
        assert all(f"--{option}" in text for option in ("json", *namespace, *tool.options)), name


def test_tools_say_what_they_return_and_whether_they_change_anything() -> None:
    listed = respond({"id": 1, "method": "tools/list"}, lambda number, command, limit: Outcome(0, "", ""))
    assert listed is not None
    tools = {tool["name"]: tool for tool in listed["result"]["tools"]}
    assert all(tool["outputSchema"]["type"] == "object" for tool in tools.values())
    assert "values" in tools["call"]["outputSchema"]["properties"]
    assert "text" in tools["logs"]["outputSchema"]["properties"]["lines"]["items"]["properties"]
    reading = {name for name, tool in tools.items() if tool["annotations"]["readOnlyHint"]}
    assert reading == {"ls", "status", "why", "stacks", "logs", "doctor"}
    assert tools["sync"]["annotations"]["idempotentHint"] is True
    assert tools["call"]["annotations"]["destructiveHint"] is True


def test_results_are_data() -> None:
    result = call("status", {}, Outcome(0, '{"sessions": []}', ""))["result"]
    assert (result["structuredContent"], result["isError"]) == ({"sessions": []}, False)
    for lines in ('{"number": 1}', '{"number": 1}\n{"number": 2}\n'):
        found = call("logs", {}, Outcome(0, lines, ""))["result"]["structuredContent"]["lines"]
        assert [line["number"] for line in found] == [1, 2][: len(found)]
    failed = call("exec", {"job": "a", "command": ["false"]}, Outcome(1, '{"returncode": 1}', ""))["result"]
    assert failed["structuredContent"] == {"returncode": 1}


def test_lines_may_contain_other_line_separators() -> None:
    lines = [{"number": 1, "text": "a\u2028b\x85c\x0bd"}, {"number": 2, "text": "second"}]
    printed = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    assert call("logs", {}, Outcome(0, printed, ""))["result"]["structuredContent"]["lines"] == lines


def test_an_error_in_the_result_makes_it_one() -> None:
    for error, expected in (("null", False), ('{"type": "ValueError"}', True)):
        result = call("run", {"code": ""}, Outcome(1, f'{{"error": {error}}}', ""))["result"]
        assert result["isError"] is expected
        assert result["structuredContent"] == {"error": json.loads(error)}


def test_a_failure_has_the_commands_message() -> None:
    result = call("status", {}, Outcome(3, "", "meshgate: no job runs on this machine\n"))["result"]
    assert (result["isError"], result["content"][0]["text"]) == (True, "meshgate: no job runs on this machine")


def test_a_long_message_of_a_command_begins_with_a_whole_line() -> None:
    printed = "".join(f"line {number}\n" for number in range(1000, 2000))
    text = call("status", {}, Outcome(3, "", printed))["result"]["content"][0]["text"]
    assert text == printed[-400 * len("line 1000\n") :].rstrip("\n")


def served(*lines: str) -> list[Any]:
    target = io.StringIO()
    serve(io.StringIO("".join(f"{line}\n" for line in lines)), target, Commands())
    return [json.loads(line) for line in target.getvalue().splitlines()]


def test_messages_are_answered_in_order() -> None:
    messages: list[Any] = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-03-26"}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list"},
        {"id": 3, "method": "ping"},
        {"id": 4, "method": "resources/list"},
        ["no request"],
    ]
    greeting, tools, pong, unknown, *invalid = served(*map(json.dumps, messages), "not JSON")
    assert greeting["result"]["protocolVersion"] == "2025-03-26"
    assert "meshgate why" in greeting["result"]["instructions"]
    assert [tool["name"] for tool in tools["result"]["tools"]] == list(TOOLS)
    assert (pong["id"], pong["result"]) == (3, {})
    assert unknown["error"]["code"] == -32601
    assert [each["error"]["code"] for each in invalid] == [-32600, -32600]


def test_the_server_runs_commands() -> None:
    messages = '{"id": 1, "method": "tools/call", "params": {"name": "ls"}}\n'
    command = [sys.executable, "-c", "from meshgate.cli.app import COMMANDS, app; app()", "mcp"]
    done = subprocess.run(command, input=messages, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["result"]["structuredContent"]["jobs"] is not None


INVALID: list[tuple[str, int | None]] = [  # and the id in the answer
    ('{"id": 1, "method": "ping", "params": ["x"]}', 1),
    ('{"id": 1, "method": "tools/call", "params": "x"}', 1),
    ('{"method": "notifications/cancelled", "params": [1]}', None),
    ('{"id": [1], "method": "tools/call", "params": {"name": "ls"}}', None),
    ('{"id": {}, "method": "ping"}', None),
    ('{"id": null, "method": "ping"}', None),
    ('{"id": true, "method": "ping"}', None),
    ("[" * 100_000, None),
]


def test_invalid_requests_are_refused_and_the_next_one_served() -> None:
    *refused, pong = served(*(line for line, _ in INVALID), '{"id": "a", "method": "ping", "params": null}')
    assert [(each["id"], each["error"]["code"]) for each in refused] == [(number, -32600) for _, number in INVALID]
    assert pong == {"jsonrpc": "2.0", "id": "a", "result": {}}


def test_a_cancellation_of_no_request_is_ignored() -> None:
    lines = [f'{{"method": "notifications/cancelled", "params": {{"requestId": {value}}}}}' for value in ("[1]", "7")]
    target, commands = io.StringIO(), Commands()
    commands.expect(5)
    serve(io.StringIO("\n".join([*lines, '{"id": 2, "method": "ping"}'])), target, commands)
    assert json.loads(target.getvalue())["id"] == 2


def test_a_process_that_does_not_start_is_an_error_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    requests = (f'{{"id": {number}, "method": "tools/call", "params": {{"name": "sync"}}}}' for number in (1, 2))
    pong, *answers = served('{"id": 0, "method": "ping"}', *requests)
    assert pong["result"] == {}
    assert [(each["id"], each["error"]["code"]) for each in answers] == [(1, -32603), (2, -32603)]
    assert all("/nowhere/python" in each["error"]["message"] for each in answers)


def run_in(commands: Commands, *arguments: str, limit: float = DEADLINE) -> Outcome:
    commands.expect(1)
    outcome = commands.run(1, list(arguments), limit)
    assert outcome is not None
    return outcome


def test_output_that_cannot_be_decoded_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_COMMAND", r"import os; os.write(2, b'\xff')")
    assert run_in(Commands(), "ls").stderr == r"\xff"


@pytest.mark.parametrize(
    ("name", "arguments", "limit"),
    [
        ("ls", {}, 600.0),
        ("exec", {"job": "a", "command": ["pytest", "--timeout=1"]}, 1860.0),
        ("run", {"program": "p.py", "timeout": 10}, 90),
    ],
)
def test_a_command_has_more_time_than_what_it_runs(name: str, arguments: dict[str, Any], limit: float) -> None:
    limits: list[float] = []
    parameters = {"name": name, "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": parameters}
    respond(message, lambda number, command, limit: limits.append(limit))
    assert limits == [limit]


def test_a_command_that_does_not_finish_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_COMMAND", "import time; time.sleep(600)")
    assert run_in(Commands(), "ls", limit=0.1).stderr == "ls did not finish within 0.1 s"


@pytest.mark.parametrize("end", [lambda commands: commands.cancel(1), Commands.close], ids=["cancel", "close"])
def test_a_command_that_ignores_sigterm_is_killed(
    end: Callable[[Commands], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    program = "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    monkeypatch.setattr(mcp, "_COMMAND", f"{program}pathlib.Path({str(ready)!r}).touch(); time.sleep(600)")
    monkeypatch.setattr(mcp, "END_TIMEOUT", 0.1)
    commands = Commands()
    commands.expect(1)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(commands.run, 1, ["ls"], DEADLINE)
        wait_for(ready.exists, "the command to run")
        process = commands._expected[1]
        assert process is not None
        try:
            end(commands)
            assert outcome.result(DEADLINE) is None
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_the_process_of_the_next_command_is_ready_before_it_and_ends_without_one() -> None:
    commands = Commands()
    commands.prepare()
    waiting = commands._next
    assert waiting is not None
    outcome = run_in(commands, "version")
    assert (waiting.returncode, outcome.returncode, outcome.stdout.strip()) == (0, 0, SOFTWARE_VERSION)
    commands.prepare()
    waiting = commands._next
    assert waiting is not None
    commands.close()
    assert waiting.returncode == 0


def test_a_process_exits_as_its_command_does() -> None:
    commands = Commands()
    failed, invalid = run_in(commands, "status", "f" * 36), run_in(commands, "status", "--nothing")
    assert (failed.returncode, invalid.returncode) == (3, 2)
    assert failed.stderr.startswith("meshgate: no job ")


def test_after_a_command_in_a_cluster_the_next_process_has_what_it_needs() -> None:
    commands = Commands()
    for arguments, imported in ((["version"], False), (["version", "--namespace=a"], True), (["version"], True)):
        run_in(commands, *arguments)
        commands.prepare()
        assert commands._next is not None
        assert ("meshgate.jobs.kubernetes" in str(commands._next.args)) is imported
    commands.close()


class Server:
    """``meshgate mcp`` as an agent's host sees it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", "mcp"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def send(self, method: str, number: int | None = None, **parameters: Any) -> None:
        request = {"method": method, "params": parameters, **({} if number is None else {"id": number})}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def call(self, number: int, name: str, **arguments: Any) -> None:
        self.send("tools/call", number, name=name, arguments=arguments)

    def next_answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def sleeper(started: Path) -> dict[str, str]:
    write = f"pathlib.Path({str(started)!r}).write_text(str(os.getpid()))"
    return {"code": f"import os, pathlib, time; {write}; time.sleep(600)"}


def runs(pid: Path) -> bool:
    return Path("/proc", pid.read_text(), "cmdline").exists()


def test_a_host_reads_while_a_command_runs_and_cancels_it_and_those_that_wait(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with Server() as server:
        server.call(1, "run", **sleeper(started))
        wait_for(lambda: started.exists() and started.read_text(), "the program to run")
        server.call(2, "run", code=f"open({str(tmp_path / 'second')!r}, 'w')")  # waits for the first
        server.call(3, "ls")
        assert server.next_answer()["id"] == 3
        server.send("notifications/cancelled", requestId=2)
        server.send("notifications/cancelled", requestId=1)
        server.call(4, "run", code="")  # runs after those that were cancelled, which are not answered
        assert server.next_answer()["id"] == 4
    assert not runs(started)
    assert not (tmp_path / "second").exists()


def test_the_end_of_the_server_ends_what_it_runs(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with Server() as server:
        server.call(1, "run", **sleeper(started))
        wait_for(lambda: started.exists() and started.read_text(), "the program to run")
        server.process.terminate()
        server.process.communicate()
    assert not runs(started)


def test_the_skill_names_commands_that_exist(run: CliRunner) -> None:
    text = run.invoke(app, ["mcp", "--skill"]).output
    named = {
        line.partition("`meshgate ")[2].split()[0].strip("`") for line in text.splitlines() if "`meshgate " in line
    }
    assert named <= set(COMMANDS)
    assert {"why", "logs", "sync"} <= named

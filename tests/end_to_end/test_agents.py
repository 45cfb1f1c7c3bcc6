"""``meshgate call`` and ``meshgate mcp`` with a real job: edit, sync, reload and call in one command."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob
from meshgate.jobs.find import find_job
from tests.waiting import wait_for

pytestmark = pytest.mark.any_release

MODEL = """
from meshgate import Actor, endpoint
import knobs

class Model(Actor):
    def __init__(self, rate):
        self.rate, self.calls = rate, 0

    @endpoint
    def step(self, batch):
        self.calls += 1
        print("call", self.calls)
        return knobs.scale(self.rate * batch)
"""
WAITER = """
import asyncio
from meshgate import Actor, endpoint

class Waiter(Actor):
    @endpoint
    async def wait(self, seconds):
        await asyncio.sleep(seconds)
"""
DRIVER = """
import sys
from meshgate.jobs.find import find_job
from model import Model
from waiter import Waiter

job = find_job(sys.argv[1])
job._detached = "train"
hosts = job._state().workers
job.sync(quiet=True)
procs = hosts.spawn_procs(name="train")
procs.spawn("models", Model, 2.0).step.call(1).get()
procs.spawn("waiters", Waiter).wait.call(0).get()
"""

ORDINARY_DRIVER = """
from meshgate import ProcessJob
from model import Model

job = ProcessJob({"workers": 2}, detached="train")
job.state().workers.spawn_procs().spawn("models", Model, 2.0).step.call(1).get()
"""
MESHGATE = [sys.executable, "-c", "from meshgate.cli.app import app; app()"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, job_of_its_own: ProcessJob) -> Path:
    """A project whose driver has left a session with actors; the sessions here stay when the module is done."""
    directory = tmp_path_factory.mktemp("project")
    for name, text in {"model": MODEL, "knobs": "def scale(x): return x\n", "waiter": WAITER, "drive": DRIVER}.items():
        (directory / f"{name}.py").write_text(text)
    subprocess.run([sys.executable, "drive.py", str(job_of_its_own.apply_id)], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module")
def tool(job_of_its_own: ProcessJob, project: Path) -> Iterator[Any]:
    """Calls a tool of one MCP server in the project."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*MESHGATE, "mcp"], cwd=project, text=True, stdin=pipe, stdout=pipe) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def call(name: str, **arguments: Any) -> Any:
            assert server.stdin is not None
            assert server.stdout is not None
            request = {"id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())["result"]

        yield lambda **arguments: call("call", job=job_of_its_own.apply_id, **arguments)["structuredContent"]


def values(found: Any) -> list[Any]:
    assert found["error"] is None, found
    return [each["value"] for each in found["values"]]


def test_an_edit_runs_in_the_actors_that_a_driver_has_left(tool: Any, project: Path) -> None:
    edit = {"file": "knobs.py", "old": "return x", "new": "return x * 10"}
    found = tool(target="models.step", args=[3], edit=[edit])
    assert values(found) == [60.0, 60.0]
    assert (found["session"], found["reload"]["old_classes"]) == ("train", ["model.Model"])
    assert set(found["reload"]["modules"]) == {"knobs", "model"}
    assert (project / "knobs.py").read_text() == "def scale(x): return x * 10\n"
    (project / "knobs.py").write_text("def scale(x): return x\n")
    assert values(tool(target="models.step", kwargs={"batch": 3})) == [60.0, 60.0]
    assert values(tool(target="models.step", kwargs={"batch": 3}, sync=True)) == [6.0, 6.0]


def test_what_actors_print_comes_with_this_result_or_a_later_one(tool: Any) -> None:
    printed: list[str] = []

    def call() -> bool:
        printed.append(tool(target="models.step", args=[3])["output"])
        return any(int(number) > 1 for number in re.findall(r"call (\d+)", "".join(printed)))

    wait_for(call, "a line of a call after the driver's, which was the first")


def test_new_actors_of_a_class_run_its_newest_code_in_processes_that_stay(tool: Any) -> None:
    first = tool(target="model:Model.step", args=[3], init={"rate": 1.0})
    assert (values(first), first["session"]) == ([3.0, 3.0], "agent")
    edit = {"file": "model.py", "old": "def step(self, batch):", "new": "def step(self, batch, more=7):"}
    again = tool(target="model:Model.step", kwargs={"batch": 3, "more": 1}, init={"rate": 2.0}, edit=[edit])
    assert values(again) == [6.0, 6.0]
    assert again["reload"]["modules"] == ["model"]  # the processes are those of the first call
    nowhere = tool(target="others.step")["error"]["message"]
    assert nowhere.startswith("no session has actors 'others'. Actors of each session: ")
    assert "train: models, waiters" in nowhere


def test_errors_are_data_and_the_next_call_works(tool: Any) -> None:
    broken = {"file": "knobs.py", "old": "return x", "new": "return 1 / 0"}
    mended = {"file": "knobs.py", "old": "return 1 / 0", "new": "return x"}
    failed = tool(target="models.step", args=[3], edit=[broken])["error"]
    assert (failed["type"], failed["endpoint"]) == ("ZeroDivisionError", "models.step")

    def together() -> bool:
        """An error is reported 0.25 s after the first rank has failed, with those that have failed by then."""
        (group,) = tool(target="models.step", args=[3])["error"]["groups"]
        assert "knobs.py" in group["traceback"]
        return (group["ranks"], group["count"]) == ([0, 1], 2)

    wait_for(together, "two ranks that fail together", timeout=60)
    assert values(tool(target="models.step", args=[3], edit=[mended])) == [6.0, 6.0]
    assert tool(target="models.missing")["error"]["type"] == "AttributeError"


def test_a_call_that_takes_too_long_is_cancelled_and_its_ranks_are_free(tool: Any) -> None:
    error = tool(target="waiters.wait", args=[1e6], timeout=0.5)["error"]
    assert error["type"] == "TimeoutError"
    assert re.match(r"no result within 0\.5 s; .*the call was cancelled: an async endpoint ends", error["message"])
    assert values(tool(target="waiters.wait", args=[0])) == [None, None]
    assert "has no actors 'others'" in tool(target="others.step", session="train")["error"]["message"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_call_is_cancelled_and_its_ranks_are_free(
    tool: Any, project: Path, job_of_its_own: ProcessJob, number: signal.Signals, code: int
) -> None:
    job = str(job_of_its_own.apply_id)

    def waits() -> bool:
        calls = [call for each in job_of_its_own.status().sessions for call in each.calls]
        return any(call.endpoint.endswith("wait") and not call.cancelled for call in calls)

    command = subprocess.Popen([*MESHGATE, "call", "--job", job, "waiters.wait", "1e6"], cwd=project)
    try:
        wait_for(waits, "the call to be in flight")
        command.send_signal(number)
        assert command.wait() == code
    finally:
        command.kill()
        command.wait()
    assert values(tool(target="waiters.wait", args=[0], timeout=60)) == [None, None]


def test_a_session_is_not_taken_from_a_program_that_holds_it(tool: Any, job_of_its_own: ProcessJob) -> None:
    other = find_job(str(job_of_its_own.apply_id))
    attached = other.attach("train", cached_path=None)
    refused = tool(target="models.step", args=[1])
    assert "is held by" in refused["error"]["message"]
    assert attached.actors["models"].step.call(1).get().values() == [2.0, 2.0]
    other._leave()


def test_an_edit_runs_in_the_actors_of_a_driver_that_never_synced(tmp_path: Path) -> None:
    for name, text in {"model": MODEL, "knobs": "def scale(x): return x\n", "drive": ORDINARY_DRIVER}.items():
        (tmp_path / f"{name}.py").write_text(text)
    subprocess.run([sys.executable, "drive.py"], cwd=tmp_path, check=True)
    try:
        for factor in (10, 100):
            edit = json.dumps({"file": "knobs.py", "new": f"def scale(x): return x * {factor}\n"})
            command = [*MESHGATE, "call", "--json", "models.step", "3", "--edit", edit]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            assert values(found) == [6.0 * factor] * 2
            assert set(found["reload"]["modules"]) == {"knobs", "model"}
    finally:
        subprocess.run([*MESHGATE, "kill", ".monarch/job_state.pkl"], cwd=tmp_path, check=True)

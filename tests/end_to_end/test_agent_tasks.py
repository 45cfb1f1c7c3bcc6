"""Tasks of a coding agent, each with several tools of one ``meshgate mcp``, as the agent's host calls them."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob
from tests.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.any_release

TRAINER = """
import asyncio
from meshgate import Actor, current_rank, endpoint
import loss

class Trainer(Actor):
    def __init__(self, shift=0):
        self.shift = shift

    @endpoint
    async def barrier(self, missing=None):
        if current_rank().rank == missing:
            await asyncio.sleep(1e6)

    @endpoint
    async def step(self, batch):
        print("batch", batch + self.shift * current_rank().rank)
        return loss.of(batch)
"""
LOSS = "def of(batch):\n    return 12 / batch\n"
DRIVER = """
import sys
from meshgate.jobs.find import find_job
from trainer import Trainer

job = find_job(sys.argv[1])
workers = job._state().workers
job.sync(quiet=True)
trainers = workers.spawn_procs().spawn("driven", Trainer)
print(f"losses {trainers.step.call(int(sys.argv[2])).get().values()}")  # one piece, beside the ranks' lines
job._leave()
"""


class Agent:
    """The host of an agent, which has started ``meshgate mcp`` in the agent's project."""

    def __init__(self, job: str, project: Path) -> None:
        self.job, self.project = job, project
        command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", "mcp"]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, cwd=project, text=True, stdin=pipe, stdout=pipe)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, tool: str, **arguments: Any) -> int:
        """Calls a tool; returns the number of the request."""
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        arguments = arguments if tool == "run" else {"job": self.job, **arguments}
        self._send({"id": number, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
        return number

    def answer(self, number: int) -> Any:
        return self._answers[number].get(timeout=DEADLINE)["result"]

    def use(self, tool: str, **arguments: Any) -> Any:
        """What the tool returns as data; None if there is none, such as no line of output."""
        return self.answer(self.start(tool, **arguments)).get("structuredContent")

    def cancel(self, number: int) -> None:
        self._send({"method": "notifications/cancelled", "params": {"requestId": number}})

    def close(self) -> None:
        self._server.terminate()
        self._server.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._server.stdin.flush()

    def _read(self) -> None:
        for line in self._server.stdout or ():
            answer = json.loads(line)
            self._answers[answer["id"]].put(answer)


@pytest.fixture(scope="module")
def host(job_of_its_own: ProcessJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(str(job_of_its_own.apply_id), tmp_path_factory.mktemp("project"))
    yield agent
    agent.close()


@pytest.fixture
def agent(host: Agent) -> Agent:
    """In a project that is as it was before the first task."""
    for name, text in {"trainer": TRAINER, "loss": LOSS, "drive": DRIVER}.items():
        (host.project / f"{name}.py").write_text(text)
    return host


def values(found: Any) -> list[Any]:
    assert found["error"] is None, found
    return [each["value"] for each in found["values"]]


def edit(old: str, new: str, file: str = "loss.py") -> list[dict[str, str]]:
    return [{"file": file, "old": old, "new": new}]


def test_a_call_hangs_why_names_the_rank_and_a_cancellation_frees_it(agent: Agent) -> None:
    hanging = agent.start("call", target="trainer:Trainer.barrier", args=[1])

    def waiting() -> Any:
        return [each for each in agent.use("why")["calls"] if each["call"]["answered"] == 1 and each["processes"]]

    (report,) = wait_for(waiting, "the call to wait for rank 1 alone")
    assert (report["call"]["endpoint"], list(report["call"]["waiting"])) == ("barrier", ["1"])
    (process,) = report["processes"]
    assert (process["rank"], process["problem"]) == (1, "")
    (session,) = [each for each in agent.use("status")["sessions"] if each["name"] == "agent"]
    assert session["calls_in_flight"] == 1
    agent.cancel(hanging)
    assert values(agent.use("call", target="trainer:Trainer.barrier")) == [None, None]
    wait_for(lambda: agent.use("why")["calls"] == [], "the end of the call on rank 1")


def test_a_call_raises_the_log_says_on_what_and_an_edit_mends_it(agent: Agent) -> None:
    failed = agent.use("call", target="trainer:Trainer.step", args=[0])["error"]
    assert (failed["type"], failed["endpoint"]) == ("ZeroDivisionError", "trainer.step")
    assert "loss.py" in failed["groups"][0]["traceback"]
    assert wait_for(lambda: texts(agent, "batch 0"), "what was printed before the error")
    mended = agent.use("call", target="trainer:Trainer.step", args=[0], edit=edit("/ batch", "/ max(batch, 1)"))
    assert (values(mended), mended["reload"]["modules"]) == ([12.0, 12.0], ["loss", "trainer"])


def texts(agent: Agent, beginning: str, **arguments: Any) -> list[str]:
    """The lines that actors have printed that begin so."""
    lines = (agent.use("logs", tail=1000, **arguments) or {"lines": []})["lines"]
    return [each["text"] for each in lines if each["text"].startswith(beginning)]


def test_an_edit_that_breaks_the_syntax_is_reported_and_put_right(agent: Agent) -> None:
    assert values(agent.use("call", target="trainer:Trainer.step", args=[3])) == [4.0, 4.0]
    broken = agent.use("call", target="trainer:Trainer.step", args=[3], edit=edit("12 / batch", "(12 / batch"))
    assert "SyntaxError" in str(broken["error"])
    assert "loss.py" in str(broken["error"])
    right = agent.use("call", target="trainer:Trainer.step", args=[3], edit=edit("(12 / batch", "24 / batch"))
    assert values(right) == [8.0, 8.0]


def test_actors_are_spawned_with_arguments_and_the_output_of_ranks_is_compared(agent: Agent) -> None:
    found = agent.use("call", target="trainer:Trainer.step", args=[70], init={"shift": 1})
    assert values(found) == [12 / 70] * 2
    for rank, text in enumerate(("batch 70", "batch 71")):
        wait_for(lambda rank=rank, text=text: texts(agent, text, rank=rank), f"what rank {rank} has printed")  # type: ignore[misc]
    assert texts(agent, "batch 71", rank=0) == []
    found = agent.use("stacks")
    assert {each["rank"] for each in found["processes"] if each["mesh"] == "agent"} == {0, 1}


def test_a_program_fails_its_error_names_the_line_and_it_runs_after_an_edit(agent: Agent) -> None:
    failed = agent.use("run", program="drive.py", arguments=[agent.job, "0"])
    assert (failed["returncode"], failed["error"]["type"]) == (1, "ZeroDivisionError")
    assert "return 12 / batch" in failed["error"]["groups"][0]["traceback"]
    done = agent.use("run", program="drive.py", arguments=[agent.job, "0"], edit=edit("/ batch", "/ (batch + 3)"))
    assert (done["returncode"], done["error"]) == (0, None), done
    assert "losses [4.0, 4.0]" in done["stdout"]

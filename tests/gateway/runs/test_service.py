"""Runs of a real gateway, over HTTP, with stub engines."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.runs.run_process import DEADLINE, record_version
from tests.gateway.server_process import TOKEN, HttpResponse, ServerProcess, request, wait_gone

WAITS = "import signal, sys\nprint('ready')\nwhile True: signal.pause()\n"


class Gateway:
    """A gateway with a store of its own."""

    def __init__(self, server: ServerProcess, home: Path) -> None:
        self.server, self.home = server, home

    def post(self, path: str, body: object, token: str | None = TOKEN) -> HttpResponse:
        data = json.dumps(body).encode()
        with self.server.connect() as connection:
            head = request(path, method="POST", token=token, Content_Length=str(len(data)))
            connection.send(head)
            connection.send(data)
            return connection.http()

    def submit(self, name: str, program: str, **options: Any) -> HttpResponse:
        version = record_version(self.home, {"main.py": program})
        command = ["python", "main.py"]
        job = {"kind": "ProcessJob"}
        return self.post("/v1/runs", {"name": name, "command": command, "version": version, "job": job, **options})

    def get(self, path: str) -> Any:
        answer = self.server.ask(path, token=TOKEN)
        assert answer.status == 200, answer.body
        return answer.body

    def wait(self, name: str) -> Any:
        """Its status once it has ended."""
        deadline = time.monotonic() + DEADLINE
        while (status := self.get(f"/v1/runs/{name}?wait=10"))["state"] in ("starting", "running", "stopping"):
            assert time.monotonic() < deadline, status
        return status

    def output(self, name: str, after: int = 0) -> str:
        return base64.b64decode(self.get(f"/v1/runs/{name}/output?after={after}")["data"]).decode()

    def wait_printed(self, name: str, text: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while text not in self.output(name):
            assert time.monotonic() < deadline, self.output(name)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    home = tmp_path_factory.mktemp("home")
    environment = {"MESHGATE_HOME": str(home), "TMPDIR": str(home)}
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a", environment=environment) as server:
        yield Gateway(server, home)


def test_a_submitted_program_runs_and_is_described(gateway: Gateway) -> None:
    answer = gateway.submit("described", "print('hello')\nraise SystemExit(4)\n", restarts=0)
    assert answer.status == 200
    assert (answer.body["name"], answer.body["owner"], answer.body["news"]) == ("described", "job", False)
    status = gateway.wait("described")
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 4, "exited with code 4")
    assert gateway.output("described") == "hello\n"
    assert gateway.output("described", after=4) == "o\n"
    gateway.server.wait_logged("audit", action="submit run", outcome="allowed", run="described", caller="job")
    gateway.server.wait_logged("run ended", run="described", state="failed", exit_code=4)


def test_a_program_learns_what_it_needs_to_reach_its_job(gateway: Gateway) -> None:
    program = "import json, os\nprint(json.dumps({k: v for k, v in os.environ.items() if 'MESHGATE_' in k}))\n"
    gateway.submit("surroundings", program, job={"kind": "KubernetesJob", "name": "trainer", "namespace": "ml"})
    gateway.wait("surroundings")
    variables = json.loads(gateway.output("surroundings"))
    assert variables["MESHGATE_RUN_URL"] == gateway.server.url
    assert variables["MESHGATE_RUN_TOKEN"] == TOKEN
    assert json.loads(variables["MESHGATE_RUN_JOB"]) == {
        "kind": "KubernetesJob",
        "name": "trainer",
        "namespace": "ml",
        "meshes": {"workers": 1},
    }
    assert "MESHGATE_TOKEN" not in variables


def test_an_end_is_news_until_it_was_listed(gateway: Gateway) -> None:
    gateway.submit("news", "pass\n")
    gateway.server.wait_logged("run ended", run="news")
    news = [[run["news"] for run in gateway.get("/v1/runs")["runs"] if run["name"] == "news"] for _ in range(2)]
    assert news == [[True], [False]]


def test_a_name_is_free_again_once_its_run_has_ended(gateway: Gateway) -> None:
    assert gateway.submit("twice", WAITS).status == 200
    refused = gateway.submit("twice", WAITS)
    assert refused.status == 409
    assert "a run called twice has not ended yet" in refused.error
    gateway.server.wait_logged("audit", action="submit run", outcome="refused", run="twice")
    gateway.post("/v1/runs/twice/stop", {"grace": 600})
    assert gateway.wait("twice")["state"] == "stopped"
    assert gateway.submit("twice", "print('second')\n").status == 200
    assert gateway.wait("twice")["state"] == "succeeded"
    assert gateway.output("twice") == "second\n"


def test_a_run_is_stopped_with_the_grace_of_the_request(gateway: Gateway) -> None:
    gateway.submit("stubborn", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS)
    gateway.wait_printed("stubborn", "ready")
    assert gateway.post("/v1/runs/stubborn/stop", {"grace": 0.1}).status == 200
    assert gateway.wait("stubborn")["exit_code"] == -signal.SIGKILL
    assert gateway.post("/v1/runs/stubborn/stop", {}).body["state"] == "stopped"


def test_output_is_waited_for(gateway: Gateway) -> None:
    gateway.submit("slow", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('now')\n")
    project = next(gateway.home.glob("meshgate-runs-*/slow"))
    deadline = time.monotonic() + DEADLINE
    while not (project / "project/main.py").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with gateway.server.connect() as waiting:
        waiting.send(request("/v1/runs/slow/output?after=0&wait=15", token=TOKEN))
        (project / "project/go").touch()
        page = waiting.http().body
    assert base64.b64decode(page["data"]) == b"now\n"


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/runs", {"name": "x"}, 400, "command"),
        ("/v1/runs", {"name": "../x", "command": ["a"], "version": "0" * 64, "job": {"kind": "K"}}, 400, "name"),
        ("/v1/runs", {"name": "x", "command": [], "version": "0" * 64, "job": {"kind": "K"}}, 400, "command"),
        ("/v1/runs", [], 400, "submission"),
        ("/v1/runs/nothing/stop", {}, 404, "no run 'nothing'"),
        ("/v1/runs/described/stop", {"grace": "soon"}, 400, "grace"),
        ("/v1/runs/described/stop", {"grace": -1}, 400, "grace"),
        ("/v1/runs/described", {}, 405, "POST is for"),
    ],
)
def test_invalid_requests_are_rejected(gateway: Gateway, path: str, body: object, status: int, error: str) -> None:
    gateway.submit("described", "pass\n")
    answer = gateway.post(path, body)
    assert answer.status == status
    assert error in answer.error
    gateway.wait("described")
    gateway.server.wait_logged("run ended", run="described")


def test_a_run_needs_the_token(gateway: Gateway) -> None:
    for answer in (
        gateway.post("/v1/runs", {"name": "x"}, token="wrong"),
        gateway.server.ask("/v1/runs"),
        gateway.server.ask("/v1/runs/described/output", token="wrong"),
    ):
        assert answer.status == 401
    gateway.server.wait_logged("audit", action="submit run", outcome="refused", caller=None)


def test_a_run_whose_runner_is_killed_has_failed(gateway: Gateway) -> None:
    gateway.submit("orphan", "import os\nprint(os.getpid())\n" + WAITS)
    gateway.wait_printed("orphan", "ready")
    program = int(gateway.output("orphan").split()[0])
    runner = gateway.server.wait_logged("run started", run="orphan")["pid"]
    os.kill(runner, signal.SIGKILL)
    status = gateway.wait("orphan")
    assert (status["state"], status["reason"]) == ("failed", "its runner was killed by SIGKILL")
    wait_gone(program)


def test_a_run_goes_on_when_the_server_dies(gateway: Gateway) -> None:
    gateway.submit("survivor", WAITS)
    gateway.wait_printed("survivor", "ready")
    servers = gateway.server.wait_logged_times("serving", 1)
    os.kill(servers[-1]["pid"], signal.SIGKILL)
    gateway.server.wait_logged("the server was replaced")
    assert gateway.get("/v1/runs/survivor")["state"] == "running"
    assert gateway.output("survivor") == "ready\n"
    gateway.post("/v1/runs/survivor/stop", {"grace": 600})
    assert gateway.wait("survivor")["exit_code"] == -signal.SIGTERM


def test_a_gateway_with_a_run_is_not_idle(tmp_path: Path) -> None:
    environment = {"MESHGATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    program = "import os, time\nprint('ready')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    options = ("--mesh", "workers=ipc:///nowhere/a", "--idle-timeout", "1", "--first-session", "60", "--lease", "0.1")
    with ServerProcess(*options, environment=environment) as server:
        gateway = Gateway(server, tmp_path)
        session = server.join()
        gateway.submit("night", program)
        gateway.wait_printed("night", "ready")
        session.close()
        server.wait_logged("session ended")
        started = time.monotonic()
        while time.monotonic() - started < 3:  # longer than the idle timeout
            assert gateway.get("/v1/runs/night")["state"] == "running"
            time.sleep(0.2)
        (next(tmp_path.glob("meshgate-runs-*/night/project")) / "go").touch()
        server.wait_logged("run ended", run="night")


def test_runs_end_with_their_gateway_and_leave_no_files(tmp_path: Path) -> None:
    environment = {"MESHGATE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    (tmp_path / "home").mkdir()
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a", environment=environment) as server:
        gateway = Gateway(server, tmp_path / "home")
        gateway.submit("night", "import os\nprint(os.getpid())\n" + WAITS)
        gateway.wait_printed("night", "ready")
        program = int(gateway.output("night").split()[0])
    wait_gone(program)
    assert list(tmp_path.glob("meshgate-runs-*")) == []

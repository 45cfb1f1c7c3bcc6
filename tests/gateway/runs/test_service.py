"""Runs of a real gateway, over HTTP, with stub engines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.runs import service
from meshgate_gateway.runs.records import RunDirectory, RunRecord, Submitted
from meshgate_wire.status import Submission
from tests.gateway.runs.run_process import record_version
from tests.gateway.server_process import TOKEN, HttpResponse, ServerProcess, handshake, request, wait_gone
from tests.gateway.unsupervised import Unsupervised
from tests.small_disk import fill, small_disk
from tests.waiting import wait_for

VALID = {"name": "x", "command": ["a"], "version": "0" * 64, "job": {"kind": "K"}}
WAITS = "import signal, sys\nprint('ready')\nwhile True: signal.pause()\n"


class Gateway:
    """A gateway with a store of its own."""

    def __init__(self, server: ServerProcess, home: Path) -> None:
        self.server, self.home = server, home

    def post(self, path: str, body: object, token: str | None = TOKEN) -> HttpResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
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

    def directory(self, name: str) -> Path:
        """Of a run, once it is there."""
        return next(self.home.glob("meshgate-runs-*")) / name

    def get(self, path: str) -> Any:
        answer = self.server.ask(path, token=TOKEN)
        assert answer.status == 200, answer.body
        return answer.body

    def wait(self, name: str) -> Any:
        """Its status once it has ended."""
        unended = ("starting", "running", "stopping")
        wait_for(lambda: self.get(f"/v1/runs/{name}?wait=10")["state"] not in unended, f"the end of {name}")
        return self.get(f"/v1/runs/{name}")

    def output(self, name: str, after: int = 0) -> str:
        return base64.b64decode(self.get(f"/v1/runs/{name}/output?after={after}")["data"]).decode()

    def wait_printed(self, name: str, text: str) -> None:
        """Waits for a whole line, because ``print`` may write the text and the end of the line separately."""
        wait_for(lambda: text in self.output(name).rpartition("\n")[0], text)


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
    assert status["printed"] == len("hello\n")
    assert gateway.output("described", after=4) == "o\n"
    gateway.server.wait_logged("audit", action="submit run", outcome="allowed", run="described", caller="job")
    gateway.server.wait_logged("run ended", run="described", state="failed", exit_code=4)


def test_a_program_learns_what_it_needs_to_reach_its_job(gateway: Gateway) -> None:
    program = "import json, os\nprint(json.dumps({k: v for k, v in os.environ.items() if 'MESHGATE_' in k}))\n"
    gateway.submit("surroundings", program, job={"kind": "KubernetesJob", "name": "trainer", "namespace": "ml"})
    gateway.wait("surroundings")
    variables = json.loads(gateway.output("surroundings"))
    assert variables["MESHGATE_RUN_URL"] == gateway.server.url
    assert len(variables["MESHGATE_RUN_TOKEN"]) >= 32
    assert TOKEN not in variables.values()
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
    for _ in range(2):  # which changes nothing
        shown = [run for run in gateway.get("/v1/status")["runs"] if run["name"] == "news"]
        assert [(run["news"], run["command"], run["printed"]) for run in shown] == [(True, [], 0)]
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


def test_a_run_is_not_stopped_in_place_of_an_earlier_one_with_its_name(gateway: Gateway) -> None:
    first, second = "1" * 32, "2" * 32
    assert gateway.submit("reused", "pass\n", id=first).body["id"] == first
    gateway.wait("reused")
    assert gateway.submit("reused", WAITS, id=second).body["id"] == second
    refused = gateway.post("/v1/runs/reused/stop", {"id": first})
    assert refused.status == 409
    assert "the run reused has ended; another run has this name now" in refused.error
    gateway.server.wait_logged("audit", action="stop run", outcome="refused", run="reused")
    assert not (gateway.directory("reused") / "stop").exists()
    assert gateway.post("/v1/runs/reused/stop", {"id": second}).status == 200
    assert gateway.wait("reused")["state"] == "stopped"


def test_output_is_waited_for(gateway: Gateway) -> None:
    gateway.submit(
        "slow", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nos.write(1, b'now\\n')\n"
    )
    project = next(gateway.home.glob("meshgate-runs-*/slow"))
    wait_for((project / "project/main.py").exists, "the copy of the project")
    with gateway.server.connect() as waiting:
        waiting.send(request("/v1/runs/slow/output?after=0&wait=15", token=TOKEN))
        (project / "project/go").touch()
        page = waiting.http().body
    assert base64.b64decode(page["data"]) == b"now\n"


@pytest.fixture(scope="module")
def ended(gateway: Gateway) -> None:
    gateway.submit("ended", "pass\n")
    gateway.wait("ended")


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/runs", {"name": "x"}, 400, "command"),
        ("/v1/runs", {"name": "../x", "command": ["a"], "version": "0" * 64, "job": {"kind": "K"}}, 400, "name"),
        ("/v1/runs", {"name": "x", "command": [], "version": "0" * 64, "job": {"kind": "K"}}, 400, "command"),
        ("/v1/runs", [], 400, "submission"),
        ("/v1/runs/nothing/stop", {}, 404, "no run 'nothing'"),
        ("/v1/runs/ended/stop", {"grace": "soon"}, 400, "grace"),
        ("/v1/runs/ended/stop", {"grace": -1}, 400, "grace"),
        ("/v1/runs/ended/stop", {"id": "ended"}, 400, "id"),
        ("/v1/runs/ended/stop", {"grace": "30"}, 400, "grace"),
        ("/v1/runs/ended/stop", {"grace": True}, 400, "grace"),
        ("/v1/runs/ended/stop", {"grace": 10**400}, 400, "grace"),
        ("/v1/runs/ended/stop", {"grace": float("nan")}, 400, "grace"),
        ("/v1/runs/ended/stop", b'{"grace": 1e400}', 400, "grace"),
        ("/v1/runs/ended/stop", b"[" * 40_000, 400, "grace"),
        ("/v1/runs", VALID | {"environment": {"A=B": "c"}}, 400, "environment"),
        ("/v1/runs", VALID | {"environment": {"": "c"}}, 400, "environment"),
        ("/v1/runs", VALID | {"environment": {"A": "\0"}}, 400, "environment"),
        ("/v1/runs", VALID | {"command": ["python", "\0"]}, 400, "command"),
        ("/v1/runs", VALID | {"directory": "\0"}, 400, "directory"),
        ("/v1/runs/ended", {}, 405, "POST is for"),
    ],
)
@pytest.mark.usefixtures("ended")
def test_invalid_requests_are_rejected(gateway: Gateway, path: str, body: object, status: int, error: str) -> None:
    answer = gateway.post(path, body)
    assert answer.status == status
    assert error in answer.error


@pytest.mark.usefixtures("ended")
def test_a_run_needs_the_token(gateway: Gateway) -> None:
    for answer in (
        gateway.post("/v1/runs", {"name": "x"}, token="wrong"),
        gateway.server.ask("/v1/runs"),
        gateway.server.ask("/v1/runs/ended/output", token="wrong"),
    ):
        assert answer.status == 401
    gateway.server.wait_logged("audit", action="submit run", outcome="refused", caller=None)


def test_the_secret_of_a_run_opens_its_job_until_the_run_ends(gateway: Gateway) -> None:
    program = "import os\nprint('secret', os.environ['MESHGATE_RUN_TOKEN'])\n" + WAITS
    gateway.submit("limited", program)
    gateway.wait_printed("limited", "ready")
    secret = gateway.output("limited").split()[1]
    assert secret not in (gateway.directory("limited") / "submission").read_text()
    for path in ("/v1/job", "/v1/hosts?mesh=workers", "/v1/sessions", "/v1/status"):
        assert gateway.server.ask(path, token=secret).status == 200
    gateway.server.wait_logged("audit", action="describe job", caller="job (run limited)")
    refused = [
        gateway.server.ask("/metrics", token=secret),
        gateway.server.ask("/v1/runs", token=secret),
        gateway.post("/v1/runs", VALID, token=secret),
        gateway.post("/v1/runs/limited/stop", {}, token=secret),
        gateway.post(f"/v1/sessions/{'0' * 32}/end", {}, token=secret),
    ]
    assert [answer.status for answer in refused] == [403] * 5
    assert "the secret of a run opens the job and its sessions, no other request (submit run)" in refused[2].error
    gateway.server.wait_logged("audit", action="submit run", outcome="refused", caller="job (run limited)")
    gateway.post("/v1/runs/limited/stop", {})
    gateway.wait("limited")
    assert gateway.server.ask("/v1/job", token=secret).status == 401


def test_a_session_of_a_run_belongs_to_its_submitter(gateway: Gateway) -> None:
    gateway.submit("driver", "import os\nprint('secret', os.environ['MESHGATE_RUN_TOKEN'])\n" + WAITS)
    gateway.wait_printed("driver", "ready")
    secret = gateway.output("driver").split()[1]
    with gateway.server.connect() as driver:
        driver.send(handshake("0" * 32, token=secret))
        assert driver.head()[0] == 101
        assert "0" * 32 in [session["id"] for session in gateway.get("/v1/sessions")["sessions"]]
        gateway.server.wait_logged("audit", action="session", outcome="allowed", caller="job (run driver)")
    gateway.post("/v1/runs/driver/stop", {})
    gateway.wait("driver")


def test_the_end_of_a_run_closes_the_connections_that_its_secret_has_opened(gateway: Gateway) -> None:
    program = "import os\nprint('secret', os.environ['MESHGATE_RUN_TOKEN'])\n" + WAITS
    secrets = {}
    for name in ("left", "going"):
        gateway.submit(name, program)
        gateway.wait_printed(name, "ready")
        secrets[name] = gateway.output(name).split()[1]
    left, other, mine = gateway.server.connect(), gateway.server.connect(), gateway.server.join("3" * 32)
    with left, other, mine:
        for connection, name, session in ((left, "left", "1" * 32), (other, "going", "2" * 32)):
            connection.send(handshake(session, token=secrets[name]))
            assert connection.head()[0] == 101
        gateway.post("/v1/runs/left/stop", {})
        gateway.wait("left")
        assert left.closed_by_peer()
        assert other.command("describe")["session"] == "2" * 32
        assert mine.command("describe")["session"] == "3" * 32
        with gateway.server.connect() as again:
            again.send(handshake("1" * 32, resume=True, token=secrets["left"]))
            assert again.head()[0] == 401
        replaced = len([line for line in gateway.server.log.splitlines() if "the server was replaced" in line])
        os.kill(gateway.server.wait_logged_times("serving", 1)[-1]["pid"], signal.SIGKILL)
        gateway.server.wait_logged_times("the server was replaced", replaced + 1)
        gateway.post("/v1/runs/going/stop", {})
        assert other.closed_by_peer()
        assert mine.command("describe")["session"] == "3" * 32
    gateway.wait("going")


def test_the_sessions_that_a_program_held_end_before_it_is_started_again_unless_they_are_detached(
    gateway: Gateway,
) -> None:
    program = "import os, time\nprint('secret', os.environ['MESHGATE_RUN_TOKEN'])\n"
    program += "if os.path.exists('fail'):\n    print('started again')\n    time.sleep(600)\n"
    program += "while not os.path.exists('fail'): time.sleep(0.02)\nraise SystemExit(1)\n"
    gateway.submit("again", program, restarts=1)
    gateway.wait_printed("again", "secret")
    secret = gateway.output("again").split()[1]
    held, kept = "4" * 32, "5" * 32
    with gateway.server.connect() as first, gateway.server.connect() as second, gateway.server.join("6" * 32) as mine:
        for connection, session in ((first, held), (second, kept)):
            connection.send(handshake(session, token=secret))
            assert connection.head()[0] == 101
        second.command("detach night")
        (gateway.directory("again") / "project" / "fail").touch()
        gateway.wait_printed("again", "started again")
        ended = [line for line in gateway.server.log.splitlines() if "session ended" in line and held in line]
        assert "its run has ended" in ended[0]
        assert mine.command("describe")["session"] == "6" * 32
    with gateway.server.join(kept, resume=True) as again:
        assert again.command("describe")["session"] == kept
        again.send(b"goodbye\n")
    gateway.post("/v1/runs/again/stop", {"grace": 0})
    gateway.wait("again")


@pytest.mark.parametrize("removed", [False, True])
def test_the_status_is_put_together_beside_other_requests(gateway: Gateway, removed: bool) -> None:
    name = f"read-slowly-{removed}".lower()
    gateway.submit(name, "print('hello')\n")
    gateway.wait(name)
    file = gateway.directory(name) / "submission"
    submission = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    with gateway.server.connect() as asking:
        asking.send(request("/v1/status", token=TOKEN))
        pipe: list[int] = []

        def is_read() -> bool:
            with contextlib.suppress(OSError):  # nothing reads it yet
                pipe.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
            return bool(pipe)

        wait_for(is_read, "the server reads the submission")
        with os.fdopen(pipe[0], "wb") as writer:
            assert gateway.server.ask("/healthz").status == 200
            file.unlink()
            file.write_bytes(submission)
            if removed:
                file.parent.rename(file.parent.with_name(".gone"))
            writer.write(submission)
        runs = {run["name"]: run for run in asking.http().body["runs"]}
    if removed:
        assert name not in runs
    else:
        assert (runs[name]["state"], runs[name]["command"]) == ("succeeded", [])


async def test_a_run_that_begins_while_the_status_is_put_together_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = service.Place({}, {}, dict)
    runs = service.Service(place, Unsupervised(), asyncio.Event(), ended=lambda name: ())
    monkeypatch.setattr(runs, "_directory", tmp_path)
    submission = Submission.model_validate({**VALID, "name": "again"})
    RunDirectory(tmp_path / "again").create(Submitted(submission=submission, owner="job", time=0, variables={}))

    async def read_before_it_begins(function: Callable[[], object]) -> object:
        found = function()
        monkeypatch.setitem(runs._runners, "again", None)
        return found

    monkeypatch.setattr(service.asyncio, "to_thread", read_before_it_begins)
    assert [run.state for run in await runs.statuses()] == ["starting"]


def test_a_repeated_submission_starts_nothing_again(gateway: Gateway) -> None:
    program = "print('once')\n"
    for _ in range(2):
        assert gateway.submit("repeated", program, id="ab" * 16).status == 200
    gateway.server.wait_logged("audit", action="submit run", run="repeated", repeated=True)
    gateway.wait("repeated")
    assert gateway.submit("repeated", program, id="ab" * 16).body["state"] == "succeeded"
    assert gateway.output("repeated") == "once\n"
    gateway.submit("repeated", "print('twice')\n", id="cd" * 16)
    gateway.wait("repeated")
    assert gateway.output("repeated") == "twice\n"


def test_a_damaged_run_is_reported_and_hides_no_others(gateway: Gateway) -> None:
    for name, file in (("halved", "record"), ("emptied", "submission")):
        gateway.submit(name, "pass\n")
        gateway.server.wait_logged("run ended", run=name)
        path = gateway.directory(name) / file
        path.write_text(path.read_text()[:9])
    (gateway.directory("bare")).mkdir()
    found = {run["name"]: run for run in gateway.get("/v1/runs")["runs"]}
    for name in ("halved", "emptied", "bare"):
        assert found[name]["state"] == "lost"
        assert "its files on the gateway's machine cannot be read" in found[name]["reason"]
        assert gateway.server.ask(f"/v1/runs/{name}", token=TOKEN).status == 200
        assert gateway.server.ask(f"/v1/runs/{name}/output", token=TOKEN).status in (200, 409)
        assert gateway.submit(name, "print('again')\n").status == 200
        assert gateway.wait(name)["state"] == "succeeded"


def test_a_run_that_a_server_left_before_it_had_a_runner_is_started_when_it_is_submitted_again(
    gateway: Gateway,
) -> None:
    gateway.submit("interrupted", "pass\n", id="ef" * 16)
    gateway.wait("interrupted")
    gateway.server.wait_logged("run ended", run="interrupted")
    (gateway.directory("interrupted") / "record").write_text(RunRecord().model_dump_json())
    status = gateway.get("/v1/runs/interrupted?wait=15")
    assert (status["state"], status["reason"]) == ("lost", "its runner is gone, and nothing notes any more how it ends")
    assert gateway.submit("interrupted", "print('now')\n", id="ef" * 16).status == 200
    assert gateway.wait("interrupted")["state"] == "succeeded"
    assert gateway.output("interrupted") == "now\n"


def test_a_run_without_room_for_its_files_leaves_its_name_free(gateway: Gateway) -> None:
    gateway.submit("kept", "print('kept')\n")
    gateway.wait("kept")
    home = gateway.directory("kept").parent
    away = home.rename(home.with_name("away"))
    home.touch()  # no directory can be made in it
    try:
        refused = gateway.submit("full", "pass\n")
    finally:
        home.unlink()
        away.rename(home)
    assert refused.status == 507
    assert "the run full cannot be started on the gateway's machine" in refused.error
    assert gateway.submit("full", "pass\n").status == 200
    gateway.wait("full")
    assert [path.name for path in home.iterdir() if path.name.startswith(".new")] == []


def test_a_stop_that_cannot_be_noted_is_reported(gateway: Gateway) -> None:
    gateway.submit("unstoppable", WAITS)
    gateway.wait_printed("unstoppable", "ready")
    (gateway.directory("unstoppable") / ".stop").mkdir()
    refused = gateway.post("/v1/runs/unstoppable/stop", {})
    assert refused.status == 507
    assert "the run unstoppable cannot be stopped" in refused.error
    gateway.server.wait_logged("audit", action="stop run", outcome="refused", run="unstoppable")
    (gateway.directory("unstoppable") / ".stop").rmdir()
    gateway.post("/v1/runs/unstoppable/stop", {})
    gateway.wait("unstoppable")


def test_a_run_whose_runner_is_killed_is_lost(gateway: Gateway) -> None:
    gateway.submit("orphan", "import os\nprint(os.getpid())\n" + WAITS)
    gateway.wait_printed("orphan", "ready")
    program = int(gateway.output("orphan").split()[0])
    runner = gateway.server.wait_logged("run started", run="orphan")["pid"]
    os.kill(runner, signal.SIGKILL)
    status = gateway.wait("orphan")
    assert (status["state"], status["reason"]) == ("lost", "its runner was killed by SIGKILL")
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


def test_a_full_disk_is_reported_and_leaves_names_free(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(tmp_path / "small") as disk:
        environment = {"MESHGATE_HOME": str(home), "TMPDIR": str(disk)}
        with ServerProcess("--mesh", "workers=ipc:///nowhere/a", environment=environment) as server:
            gateway = Gateway(server, home)
            gateway.submit("first", "print('ready')\nimport signal\nsignal.pause()\n")
            gateway.wait_printed("first", "ready")
            runner = server.wait_logged("run started", run="first")["pid"]
            os.kill(runner, signal.SIGSTOP)  # it would end its run to make room
            try:
                fill(disk)
                for file in disk.glob("empty-*"):  # directories can be made, and files have no room
                    file.unlink()
                refused = [gateway.submit("second", "pass\n"), gateway.post("/v1/runs/first/stop", {})]
            finally:
                os.kill(runner, signal.SIGCONT)
            assert [answer.status for answer in refused] == [507, 507]
            assert "the run second cannot be started on the gateway's machine: " in refused[0].error
            assert "No space left on device" in refused[1].error
            server.wait_logged("run not started", run="second")
            assert list(disk.glob("meshgate-runs-*/.new-*")) == []
            (disk / "filling").unlink()
            assert gateway.post("/v1/runs/first/stop", {}).status == 200
            assert gateway.wait("first")["state"] in ("stopped", "failed")  # or ended to make room
            assert gateway.submit("second", "print('second')\n").status == 200
            assert gateway.wait("second")["state"] == "succeeded"
            assert gateway.output("second") == "second\n"
            first = gateway.submit("first", "pass\n")
            assert first.status == 200
            gateway.wait("first")
            wait_for(lambda: not list(disk.glob("meshgate-runs-*/.removed-*")), "the removal of the first run")


def test_a_gateway_with_a_run_is_not_idle(tmp_path: Path) -> None:
    environment = {"MESHGATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    program = "import os, time\nprint('ready')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    options = ("--mesh", "workers=ipc:///nowhere/a", "--idle-timeout", "1", "--first-session", "60", "--lease", "0.1")
    with ServerProcess(*options, environment=environment) as server:
        gateway = Gateway(server, tmp_path)
        gateway.submit("night", program)
        gateway.wait_printed("night", "ready")
        server.join().close()
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

"""The ``meshgate`` command with a real job."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from meshgate import ProcessJob
from tests.end_to_end.actors import Worker
from tests.end_to_end.conftest import FaultsOf
from tests.programs import child_process
from tests.waiting import wait_for

pytestmark = pytest.mark.any_release


@pytest.fixture
def meshgate(job: ProcessJob) -> Callable[..., Any]:
    """Runs a command on the job, in a process of its own, and returns the JSON that it prints."""

    def run(command: str, *arguments: str) -> Any:
        target = ["--job", str(job.apply_id)] if command == "pull" else [str(job.apply_id)]
        arguments = (command, *target, *arguments, "--json")
        found = subprocess.run(
            [sys.executable, "-c", "from meshgate.cli.app import app; app()", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_status_shows_sessions_meshes_and_calls_in_flight(meshgate: Any, hosts: Any) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="waiting")
    pending = procs.spawn("waiters", Worker).hang.call()
    calls = wait_for(
        lambda: [call for s in json.loads(meshgate("status"))["sessions"] for call in s["calls"]], "a call"
    )
    procs.stop().get()
    assert pending.exception() is not None
    assert [(call["mesh"], call["endpoint"], call["total"]) for call in calls] == [("waiters", "hang", 4)]
    assert set(calls[0]["waiting"].values()) == {"workers-0", "workers-1"}


def test_why_names_the_rank_that_others_have_waited_for(
    job: ProcessJob, meshgate: Any, hosts: Any, tmp_path: Path
) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="compared")
    workers = procs.spawn("compared_workers", Worker)

    def answered() -> list[int]:
        calls = [call for session in job.status().sessions for call in session.calls]
        return [call.answered for call in calls if call.mesh == "compared_workers"]

    for number in range(4):
        started = time.monotonic()
        call = workers.wait_on.call([2], str(tmp_path / str(number)))
        wait_for(lambda: answered() == [3], "the other ranks")
        time.sleep(time.monotonic() - started)  # so that it is late, however slow this machine is
        (tmp_path / str(number)).touch()
        call.get(timeout=60)
    shown = json.loads(meshgate("why", "--timelines"))
    late = [each for each in shown["stragglers"] if each["mesh"] == "compared_workers"]
    assert [(each["endpoint"], each["rank"], each["host"]) for each in late] == [("wait_on", 2, "workers-1")]
    assert (late[0]["calls"], late[0]["compared"]) == (4, 4)
    recent = [each["timeline"] for each in shown["recent"] if each["timeline"]["mesh"] == "compared_workers"]
    assert [(each["answered"], each["straggler"], each["missing"]) for each in recent] == [(4, 2, {})] * 4
    for each in recent:
        last, *others = each["replies"]
        assert (last["rank"], last["host"], {reply["rank"] for reply in others}) == (2, "workers-1", {0, 1, 3})
        assert each["half"] < last["seconds"] <= each["seconds"] <= each["age"] + 0.001  # which is rounded
    procs.stop().get()


@pytest.mark.timeout(900)  # commands take half a minute each on a busy machine
def test_lost_ranks_are_shown_with_their_reason(
    job: ProcessJob, meshgate: Any, hosts: Any, faults_of: FaultsOf
) -> None:
    faults_of("short_lived")
    workers = hosts.spawn_procs(per_host={"gpus": 2}, name="short_lived_procs").spawn("short_lived", Worker)
    pids = list(workers.pid.call().get(timeout=60).values())

    def lost() -> list[dict[str, Any]]:
        found = json.loads(meshgate("top", "--once"))["lost"]
        return [each for each in found if each["mesh"] == "short_lived_procs"]

    os.kill(pids[2], signal.SIGKILL)
    (killed,) = wait_for(lost, "the kill")
    assert killed["ranks"] == [2]
    assert killed["exit_code"] in (-9, None)  # Monarch does not always report how it ended
    assert 0 <= killed["last_age"] == killed["age"]
    for rank in (0, 1, 3):
        os.kill(pids[rank], signal.SIGKILL)
    wait_for(
        lambda: sorted(rank for each in lost() for rank in each["ranks"]) == [0, 1, 2, 3], "all to be lost", timeout=300
    )
    found = subprocess.run(
        [sys.executable, "-c", "from meshgate.cli.app import app; app()", "status", str(job.apply_id)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.strip() for line in found.stdout.splitlines()]
    assert any(line.startswith("lost: short_lived_procs rank") for line in lines)
    assert any(line.startswith("short_lived_procs ") and line.endswith("4 lost") for line in lines)


def test_logs_has_what_actors_printed(meshgate: Any, workers: Any) -> None:
    workers.say.call("printed for the log").get()

    def found() -> bool:
        lines = map(json.loads, meshgate("logs").splitlines())
        return sum(line["count"] for line in lines if line["text"] == "printed for the log") == 4

    wait_for(found, "the line")


def test_sync_and_pull_reach_the_hosts(meshgate: Any, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "module.py").write_text("x = 1\n")
    report = json.loads(meshgate("sync", "--dir", str(project)))
    assert (report["files"], report["ready"], report["hosts"]) == (1, 2, 2)
    local = tmp_path / "pulled"
    assert json.loads(meshgate("pull", str(project), str(local), "--rank", "1"))["files"] == 1
    assert (local / "module.py").read_text() == "x = 1\n"


def test_exec_exits_with_the_code_of_the_command(job: ProcessJob) -> None:
    main = "from meshgate.cli.app import app; app()"
    command = [sys.executable, "-c", main, "exec", str(job.apply_id), "--rank", "1"]
    found = subprocess.run([*command, "--", "sh", "-c", "cat -; exit 3"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (3, "")
    shown = subprocess.run(
        [*command, "-i", "--", "cat", "-"], input="hello", capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stdout) == (0, "hello")


def test_exec_passes_input_on_as_it_comes_and_ends_with_the_command(job: ProcessJob) -> None:
    main = "from meshgate.cli.app import app; app()"
    command = [sys.executable, "-c", main, "exec", str(job.apply_id), "--rank", "1", "-i"]
    script = "read a; echo got $a; read b; exit $b"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process([*command, "--", "sh", "-c", script], **pipes) as child:
        for text, printed in (b"hello\n", b"got hello\n"), (b"3\n", b""):
            child.stdin.write(text)
            child.stdin.flush()
            assert child.stdout.readline() == printed
        assert (child.wait(60), child.stderr.read()) == (3, b"")  # although its input has not ended


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGTERM, []), (signal.SIGHUP, []), (signal.SIGINT, []), (signal.SIGINT, ["-i"])]
)
def test_a_signal_that_ends_exec_ends_its_command_and_session(
    job: ProcessJob, tmp_path: Path, number: signal.Signals, options: list[str]
) -> None:
    before = {session.session for session in job.status().sessions}
    main = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    main += "from meshgate.cli.app import app; app()"
    command = [sys.executable, "-c", main, "exec", str(job.apply_id), "--rank", "1"]
    script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 300"
    command += [*options, "--", "sh", "-c", script]
    with child_process(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        wait_for((tmp_path / "pid").exists, "the command to start", timeout=60)
        child.send_signal(number)
        assert child.wait(60) == 128 + number
    running = Path("/proc", (tmp_path / "pid").read_text().strip())
    wait_for(lambda: not running.exists(), "the command to end", timeout=60)
    wait_for(lambda: {session.session for session in job.status().sessions} <= before, "its session to end", timeout=60)


def test_ui_serves_a_page_with_the_ranks_and_their_hosts(job: ProcessJob, hosts: Any) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="shown")
    actors = procs.spawn("actors", Worker)
    actors.rank.call().get()
    hanging = actors.hang.call()
    main = "from meshgate.cli.app import app; app()"
    command = [sys.executable, "-c", main, "ui", str(job.apply_id), "--no-browser"]
    with child_process(command, stdout=subprocess.PIPE, text=True) as served:
        link = urlsplit(served.stdout.readline().strip())
        url, origin = f"ws://{link.netloc}/live", f"http://{link.netloc}"
        protocols = [Subprotocol("meshgate-ui"), Subprotocol(link.fragment)]
        with connect(url, origin=Origin(origin), subprotocols=protocols) as socket:
            assert "secret" in json.loads(socket.recv(timeout=60))
            found: list[str] = []
            while not found:  # an engine that takes long to answer is shown without its meshes
                message = json.loads(socket.recv(timeout=60))
                found = [
                    each["session"]
                    for each in (message["status"] or {"sessions": []})["sessions"]
                    if any(mesh["name"] == "shown" for mesh in each["meshes"])
                ]
            (session,) = found
            for rank in (1, 3):  # each is asked in a session of its own
                place = {"host": f"workers-{rank // 2}", "mesh": "shown", "rank": rank}
                socket.send(json.dumps({"session": session, **place}))
                while "stack" not in (answer := json.loads(socket.recv(timeout=60))):
                    continue
                assert "in Worker.hang" in answer["stack"]
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 130
    procs.stop().get()
    assert hanging.exception() is not None
    meshes = {mesh["name"]: mesh for session in message["status"]["sessions"] for mesh in session["meshes"]}
    assert meshes["shown"]["hosts"] == ["workers-0", "workers-1"]
    assert meshes["actors"]["procs"] == meshes["shown"]["number"]


def test_mcp_answers_with_what_a_job_does(job: ProcessJob, workers: Any) -> None:
    workers.say.call("printed for the agent").get()
    calls = [("status", {}), ("exec", {"rank": [1], "command": ["echo", "hello"]}), ("status", {"job": "f" * 36})]
    messages = [
        {
            "id": number,
            "method": "tools/call",
            "params": {"name": name, "arguments": {"job": job.apply_id, **arguments}},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", "mcp"]
    lines = "".join(json.dumps(message) + "\n" for message in messages)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    answers = sorted(map(json.loads, done.stdout.splitlines()), key=lambda answer: answer["id"])
    status, executed, unknown = (answer["result"] for answer in answers)
    assert status["structuredContent"]["meshes"] == {"workers": 2}
    assert executed["structuredContent"]["results"][0]["stdout"] == "hello\n"
    assert unknown["isError"]
    assert "no job id begins with" in unknown["content"][0]["text"]


def test_top_shows_calls_and_what_the_ranks_use(meshgate: Any, hosts: Any) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="busy")
    burners = procs.spawn("burners", Worker)
    burners.rank.call().get()
    pending = burners.hang.call()

    def found() -> Any:
        top = json.loads(meshgate("top", "--once"))
        ranks = [rank for rank in top["ranks"] if rank["mesh"] == "busy"]
        complete = [rank["cpu"] is not None for rank in ranks] == [True] * 4 and not top["problems"]
        return top if complete and any(each["mesh"] == "burners" for each in top["calls"]) else None

    top = wait_for(found, "the ranks")
    procs.stop().get()
    assert pending.exception() is not None
    (calls,) = [each for each in top["calls"] if each["mesh"] == "burners"]
    assert (calls["ranks"], calls["in_flight"], calls["ended"]) == (4, 1, 0)
    assert calls["oldest"] > 0
    ranks = [rank for rank in top["ranks"] if rank["mesh"] == "busy"]
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [(n, f"workers-{n // 2}") for n in range(4)]
    assert all(rank["memory"] > 2**20 for rank in ranks)


def test_top_is_live_on_a_narrow_terminal_until_interrupted(job: ProcessJob, workers: Any) -> None:
    workers.rank.call().get()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment.update(TERM="xterm-256color", NO_COLOR="1")
    command = [sys.executable, "-c", "from meshgate.cli.app import app; app()", "top", str(job.apply_id)]
    command += ["--interval", "0.5"]
    with child_process(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        shown = b""
        while len(re.findall(rb"\nworkers +\d[\d.]* ", shown)) < 2:  # two looks
            shown += os.read(ours, 65536)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
        assert child.wait() == 130
    assert shown.startswith(b"\x1b[?1049h")
    assert b"\x1b[?1049l" in shown  # the screen from before is back
    assert not re.search(rb"\x1b\[[0-9;]*3\dm", shown)  # no colour
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-GI-Za-z]", b"", shown.replace(b"\x1b[H", b"\n")).decode().splitlines()
    assert max(map(len, lines)) <= 60

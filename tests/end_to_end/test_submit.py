"""Programs that run beside the gateway of a real job, from Python and from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshgate import AuthenticationError, Channel, Client, ProcessJob, UrlDialer, job_loads
from meshgate.errors import InvalidRequestError
from meshgate.session.gateway_client import request_json
from tests.end_to_end.test_server_restart import kill_server, server_of
from tests.waiting import wait_for

ACTORS = """
from meshgate import Actor, endpoint

class Adder(Actor):
    @endpoint
    def add(self, number: int) -> int:
        print("adding", number)
        return number + 1

    @endpoint
    def fail(self) -> None:
        raise ValueError("no such sample")
"""
TRAIN = """
import os, sys
from meshgate import ProcessJob
from actors import Adder

with ProcessJob({"workers": 2}) as job:
    adders = job.state().workers.spawn_procs(per_host={"gpus": 1}).spawn("adders", Adder)
    print("sum", sum(adders.add.call(20).get().values()))
    if "fail" in sys.argv:
        adders.fail.call().get()
print("done in", os.path.basename(os.getcwd()))
"""
NATIVE = """
import os, sys
import meshgate
from monarch.actor import Actor, current_rank, endpoint

class Ranks(Actor):
    @endpoint
    def rank(self) -> int:
        return current_rank().rank

hosts = meshgate.native_hosts("workers")
procs = hosts.spawn_procs(per_host={"gpus": 2})
ranks = procs.spawn("ranks", Ranks)
print(type(hosts).__module__, [rank for _, rank in ranks.rank.call().get().items()])
procs.stop().get()
sys.stdout.flush()
os._exit(0)  # see docs/submit.md
"""
LEFT = "running: it belongs to the user who submitted this program\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a project with programs, in a subdirectory as well."""
    top = tmp_path / "project"
    (top / "recipes").mkdir(parents=True)
    (top / "actors.py").write_text(ACTORS)
    (top / "train.py").write_text(TRAIN)
    (top / "native.py").write_text(NATIVE)
    monkeypatch.chdir(top)
    return top


@pytest.fixture(scope="module")
def other(shared_job: ProcessJob) -> Iterator[Any]:
    """The shared job, as another program finds it."""
    job = job_loads(shared_job.dumps())
    yield job
    if job._client is not None:  # type: ignore[attr-defined]
        job._client.close()  # type: ignore[attr-defined]


@pytest.fixture
def meshgate(other: Any, project: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command on the job, in a process of its own in the project."""

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from meshgate.cli.app import app; app()"
        given = [sys.executable, "-c", code, command, other.apply_id, *arguments]
        return subprocess.run(given, capture_output=True, text=True, check=False, env=os.environ, cwd=project)

    return run


def test_a_program_attaches_to_the_job_it_runs_in_and_leaves_it(other: Any, project: Path) -> None:
    run = other.submit(["python", "train.py"], name="attached", sync_dirs=[str(project)])
    lines = list(run.logs(follow=True))
    assert run.wait() == 0, lines
    assert run.status().state == "succeeded"
    assert "sum 42\n" in lines
    assert any(line.endswith("adding 20\n") for line in lines)
    assert [line for line in lines if line.endswith(LEFT)] != []
    assert lines[-1] == "done in project\n"
    assert len(other.state(cached_path=None).workers) == 2  # the job goes on


def test_what_a_program_has_left_behind_loses_its_session_with_the_run(other: Any, project: Path) -> None:
    (project / "wait.py").write_text(
        "import os, signal\nprint(os.environ['MESHGATE_RUN_TOKEN'], flush=True)\nwhile True: signal.pause()\n"
    )
    run = other.submit(["python", "wait.py"], name="left", sync_dirs=[str(project)])
    secret = next(iter(run.logs(follow=True))).strip()
    with Client(UrlDialer(other.gateway_url, secret)) as left:
        port, receiver = Channel.open(client=left)
        port.send("while it runs")
        assert receiver.recv().get(60.0) == "while it runs"
        run.stop(grace=0)
        run.wait()
        with pytest.raises(AuthenticationError):
            receiver.recv().get(60.0)


def test_what_a_program_that_crashed_has_spawned_ends_before_it_is_started_again(other: Any, project: Path) -> None:
    (project / "crash.py").write_text(
        "import os, signal\nfrom meshgate import ProcessJob\nfrom meshgate_processes.identity import identify_process\n"
        "from actors import Adder\n"
        "job = ProcessJob({'workers': 2})\n"
        "alive = [pid for pid in map(int, open('pids').read().split()) if identify_process(pid)] if "
        "os.path.exists('pids') else []\n"
        "adders = job.state().workers.spawn_procs().spawn('adders', Adder)\n"
        "print('left', alive, flush=True)\n"
        "open('pids', 'w').write(' '.join(map(str, adders.pid.call().get().values())))\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    with (project / "actors.py").open("a") as file:
        file.write("\n    @endpoint\n    def pid(self) -> int:\n        import os\n        return os.getpid()\n")
    before = {each.id for each in other.sessions(None)}
    run = other.submit(["python", "crash.py"], name="crash", restarts=1, sync_dirs=[str(project)])
    assert run.wait() == -11
    assert [line for line in run.logs() if line.startswith("left")] == ["left []\n"] * 2
    wait_for(lambda: {each.id for each in other.sessions(None)} <= before, "the end of the last session")


def test_a_program_runs_in_the_version_of_its_submission(other: Any, project: Path) -> None:
    (project / "wait.py").write_text(
        "import os, time\nfrom pathlib import Path\nprint('waiting')\n"
        "while not Path('go').exists(): time.sleep(0.02)\nfrom actors import Adder\nprint(open('actors.py').read())\n"
    )
    run = other.submit(["python", "wait.py"], name="version", sync_dirs=[str(project)])
    wait_for(lambda: "waiting\n" in list(run.logs()), "the program")
    (project / "actors.py").write_text("raise SystemExit('the code after the submission')\n")
    other.sync(sync_dirs=[str(project)], quiet=True)
    gateway = other._gateway.record.directory
    next(Path(gateway).glob("meshgate-runs-*/version/project")).joinpath("go").touch()
    assert run.wait() == 0
    assert "class Adder(Actor):" in "".join(run.logs())


def test_an_exception_has_its_traceback_and_exit_code(other: Any, project: Path) -> None:
    run = other.submit([sys.executable, str(project / "train.py"), "fail"], sync_dirs=[str(project)])
    assert run.name.startswith("train-")
    assert run.wait() == run.exit_code == 1
    output = "".join(run.logs())
    assert "ActorError" in output
    assert "ValueError: no such sample" in output
    assert "adders.fail.call().get()" in output
    assert [each.name for each in other.runs()][-1] == run.name


def test_a_run_does_not_become_a_later_one_with_its_name(other: Any, project: Path) -> None:
    (project / "exit.py").write_text("print('first')\nraise SystemExit(7)\n")
    (project / "wait.py").write_text("import signal\nwhile True: signal.pause()\n")
    first = other.submit(["python", "exit.py"], name="reused", sync_dirs=[str(project)])
    assert other.run("reused").wait() == 7
    second = other.submit(["python", "wait.py"], name="reused", sync_dirs=[str(project)])
    for ask in (first.status, first.stop, lambda: list(first.logs())):
        with pytest.raises(InvalidRequestError, match="the run reused has ended; another run has this name now"):
            ask()
    assert second.status().live
    second.stop(grace=0)
    second.wait()


def test_the_command_line_submits_shows_and_stops(meshgate: Any, project: Path) -> None:
    (project / "forever.py").write_text(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(5)))\n"
        "print('started', sys.argv[1:])\nwhile True: signal.pause()\n"
    )
    submitted = meshgate("submit", "--name", "night", "--dir", ".", "--", "python", "forever.py", "--lr", "1e-3")
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.startswith("submitted night; `meshgate logs ")
    wait_for(lambda: meshgate("logs", "--run", "night").stdout.endswith("\n"), "a line of output")
    assert meshgate("logs", "--run", "night").stdout == "started ['--lr', '1e-3']\n"
    runs = json.loads(meshgate("runs", "--json").stdout)["runs"]
    assert [(run["name"], run["state"]) for run in runs if run["name"] == "night"] == [("night", "running")]
    stopped = meshgate("stop", "--run", "night")
    assert (stopped.returncode, stopped.stdout) == (0, "night stopped: exited with code 5\n"), stopped.stderr
    assert meshgate("logs", "--run", "night", "-f", "--tail", "1").stdout == "saved\n"
    table = next(line.split() for line in meshgate("runs").stdout.splitlines() if line.startswith("night"))
    assert table[:3] == ["night", "stopped", "5"]
    missing = meshgate("logs", "--run", "nothing")
    assert missing.returncode == 1
    assert "there is no run 'nothing'" in missing.stderr


def test_following_a_submission_exits_as_the_program_does(meshgate: Any, project: Path) -> None:
    (project / "exit.py").write_text("print('out')\nraise SystemExit(9)\n")
    followed = meshgate("submit", "-f", "--dir", ".", "--", "python", "exit.py")
    assert followed.returncode == 9, followed.stderr
    assert followed.stdout.endswith("\nout\n")


def test_a_run_and_its_session_go_on_when_the_server_dies(job_of_its_own: Any, project: Path) -> None:
    (project / "loop.py").write_text(
        TRAIN.replace(
            'print("sum"',
            'print("ready")\n    while not os.path.exists("go"): adders.add.call(1).get()\n    print("sum"',
        )
    )
    run = job_of_its_own.submit(["python", "loop.py"], name="loop", sync_dirs=[str(project)])
    wait_for(lambda: "ready\n" in list(run.logs()), "the program")
    kill_server(job_of_its_own)
    assert run.status().state == "running"
    gateway = Path(job_of_its_own._gateway.record.directory)
    next(gateway.glob("meshgate-runs-*/loop/project")).joinpath("go").touch()
    assert run.wait() == 0
    assert "sum 42\n" in list(run.logs())


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])  # seconds; the server writes a submission for some 10 ms
def test_a_program_starts_once_if_the_server_dies_as_it_is_submitted(
    job_of_its_own: Any, project: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    starts = project.parent / "starts"
    (project / "once.py").write_text(f"with open({str(starts)!r}, 'a') as file: file.write('x')\n")
    killing: list[Future[None]] = []
    job_of_its_own.apply()
    server = server_of(job_of_its_own._gateway.record.pid)

    def kill_server_after(delay: float) -> None:
        time.sleep(delay)
        kill_server(job_of_its_own, server)

    def request_as_the_server_dies(*arguments: Any, **options: Any) -> object:
        if not killing:
            killing.append(killer.submit(kill_server_after, delay))
        return request_json(*arguments, **options)

    with ThreadPoolExecutor(1) as killer:
        monkeypatch.setattr("meshgate.jobs.runs.request_json", request_as_the_server_dies)
        run = job_of_its_own.submit(["python", "once.py"], sync_dirs=[str(project)])
        killing[0].result()
    assert run.wait() == 0, run.status().reason
    assert starts.read_text() == "x"


def test_a_program_has_monarchs_own_hosts(other: Any, project: Path) -> None:
    run = other.submit(["python", "native.py"], name="native", sync_dirs=[str(project)])
    code = run.wait()
    output = "".join(run.logs())
    assert code == 0, output
    assert "monarch._src.actor.host_mesh [0, 1, 2, 3]\n" in output
    assert len(other.state(cached_path=None).workers.spawn_procs()) == 2  # the hosts live


def test_a_script_that_is_not_there_is_refused_at_once(other: Any, project: Path) -> None:
    with pytest.raises(ValueError, match=r"the script missing.py does not exist in .*project"):
        other.submit(["python", "missing.py"], sync_dirs=[str(project)])
    with pytest.raises(TypeError, match=r"pass the program and its arguments, such as \['python', 'train.py'\]"):
        other.submit("python train.py", sync_dirs=[str(project)])

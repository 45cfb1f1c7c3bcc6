"""From an edit to the result of the edited code, as a coding agent works: meshgate's ways beside fresh processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kubernetes.cluster import kubectl
from benchmarks.peers.ray_client import cluster
from benchmarks.results import Case, Value
from benchmarks.run import Run

TIMEOUT = 120.0
POD = "meshgate-bench-exec"
_SETTINGS = "LINE = {line}\n"
_MAIN = "import saved_settings\nprint('line', saved_settings.LINE)\n"
_DRIVER = """
import sys
from meshgate import Actor, ProcessJob, endpoint
import saved_settings

class Model(Actor):
    @endpoint
    def line(self) -> int:
        return saved_settings.LINE

if __name__ == "__main__":
    from edited import Model
    with ProcessJob({"workers": 2}) as job:
        hosts = job.state(cached_path=None).workers
        job.detach("edited", cached_path=None)
        job.sync(quiet=True)
        hosts.spawn_procs(name="edited").spawn("edited", Model).line.call().get()
        job._client.leave()
        print(job.apply_id, flush=True)
        sys.stdin.read()
        job.kill()
"""
PAUSE = 5.0  # seconds between a result and the next edit, in which an agent thinks
Step = Callable[[int], int]
Way = Callable[[Run, Path], contextlib.AbstractContextManager[Step]]


def from_edit_to_result(run: Run) -> Iterator[Case]:
    ways = {
        "a driver that stays: save, sync, reload, call": _driver,
        "`call` tool of `meshgate mcp`": _tool,
        "`ray job submit`": _ray_job,
        "`kubectl exec python`": _kubectl_exec,
    }
    seconds = {name: _rounds(run, name, way) for name, way in ways.items()}
    driver, tool = (Value("time", seconds[name]).number for name in list(ways)[:2])
    for name, rounds in seconds.items():
        if rounds:
            relative = {"driver": driver, "tool": tool}
            times = {peer: Value("times", tuple(each / of for each in rounds)) for peer, of in relative.items()}
            yield Case(name, {"seconds": Value("time", rounds), **times}, table="edits")


def _rounds(
    run: Run, name: str, way: Callable[[Run, Path], contextlib.AbstractContextManager[Step]]
) -> tuple[float, ...]:
    """Seconds of each round after a warm-up. Empty, with a problem reported, if the way cannot be measured."""
    rounds = []
    try:
        with tempfile.TemporaryDirectory(prefix="meshgate-bench-") as directory, way(run, Path(directory)) as step:
            for line in range(run.rounds + 1):
                time.sleep(PAUSE)
                started = time.perf_counter()
                found = run.measure(lambda line=line: step(line))  # type: ignore[misc]
                rounds.append(time.perf_counter() - started)
                if found != line:
                    raise AssertionError(f"line {found} ran, but line {line} was saved")
    except (OSError, RuntimeError, LookupError, subprocess.SubprocessError) as error:
        run.report_problem(f"{name}: {error}")
        return ()
    return tuple(rounds[1:])


@contextlib.contextmanager
def _driver(run: Run, directory: Path) -> Iterator[Step]:
    """The peer measures from the save, without the request to it."""
    with run.peers(saving={}) as peers:
        lines = iter(range(1_000_000))

        def step(line: int) -> int:
            peers.running["saving"].ask("saves", how="reload", times=1)
            return next(lines)

        yield step


@contextlib.contextmanager
def _tool(run: Run, directory: Path) -> Iterator[Step]:
    """During the pause the server prepares the process of the next call."""
    _write(directory, edited=_DRIVER)
    meshgate = [sys.executable, "-c", "from meshgate.cli.app import app; app()"]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "edited.py"], cwd=directory, text=True, stdin=pipe, stdout=pipe) as driver:
        assert driver.stdout is not None
        job = driver.stdout.readline().strip()
        with subprocess.Popen([*meshgate, "mcp"], cwd=directory, text=True, stdin=pipe, stdout=pipe) as server:

            def step(line: int) -> int:
                edit = {"file": "saved_settings.py", "new": _SETTINGS.format(line=line)}
                found = _request(server, {"job": job, "target": "edited.line", "edit": [edit]})
                return int(found["values"][1]["value"])

            yield step
            server.communicate()
        driver.communicate()


def _request(server: subprocess.Popen[str], arguments: dict[str, Any]) -> Any:
    assert server.stdin is not None
    assert server.stdout is not None
    request = {"id": 1, "method": "tools/call", "params": {"name": "call", "arguments": arguments}}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    result = json.loads(server.stdout.readline())["result"]
    if result["isError"]:
        raise RuntimeError(result["content"][0]["text"])
    return result["structuredContent"]


@contextlib.contextmanager
def _ray_job(run: Run, directory: Path) -> Iterator[Step]:
    if run.ray_python is None:
        raise LookupError("Ray is not installed")
    _write(directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    submit = [str(Path(run.ray_python).parent / "ray"), "job", "submit", f"--address=http://127.0.0.1:{port}"]
    command = [*submit, f"--working-dir={directory}", "--", run.ray_python, "main.py"]
    with cluster(run.ray_python, run.logs / "ray-jobs.log", dashboard_port=port):

        def step(line: int) -> int:
            _write(directory, line)
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:] or done.stdout[-2000:])
            return _line_in(done.stdout)

        yield step


@contextlib.contextmanager
def _kubectl_exec(run: Run, directory: Path) -> Iterator[Step]:
    """The program is sent on the standard input of ``python``, which costs one request of the API server."""
    if "KUBECONFIG" not in os.environ:
        raise LookupError("KUBECONFIG is not set")
    image = os.environ.get("MESHGATE_WORKER_IMAGE", "localhost/meshgate-worker:test")
    spec = ("run", POD, f"--image={image}", "--restart=Never", "--image-pull-policy=IfNotPresent", "--command", "--")
    kubectl(*spec, "sleep", "3600")
    try:
        kubectl("wait", "--for=condition=Ready", f"pod/{POD}", f"--timeout={TIMEOUT:.0f}s")

        def step(line: int) -> int:
            return _line_in(kubectl("exec", "-i", POD, "--", "python", "-", stdin=f"print('line', {line})\n"))

        yield step
    finally:
        kubectl("delete", "pod", POD, "--now", "--wait=false")


def _write(directory: Path, line: int = 0, **modules: str) -> None:
    for name, text in {"saved_settings": _SETTINGS.format(line=line), "main": _MAIN, **modules}.items():
        (directory / f"{name}.py").write_text(text)


def _line_in(output: str) -> int:
    return int(next(line for line in output.splitlines() if line.startswith("line ")).split()[1])


GROUPS: dict[str, Callable[[Run], Iterator[Case]]] = {"edits": from_edit_to_result}

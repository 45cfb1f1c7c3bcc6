"""Programs that run in the gateway's pod, submitted by a process that is gone when they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate import Compute, KubernetesJob
from meshgate_kubernetes.manifests.names import Names
from tests.kubernetes.cluster import Kubectl
from tests.waiting import wait_for

ACTORS = """
from meshgate import Actor, endpoint

class Adder(Actor):
    @endpoint
    def add(self, number: int) -> int:
        return number + 1
"""
TRAIN = """
import sys
import meshgate as kt
from actors import Adder

with kt.KubernetesJob(compute=kt.Compute(replicas=2), name="night", namespace=sys.argv[1]) as job:
    adders = job.state().workers.spawn_procs(per_host={"gpus": 1}).spawn("adders", Adder)
    print("sum", sum(adders.add.call(20).get().values()))
raise SystemExit(3)
"""
NATIVE = """
import os, sys
import meshgate
from monarch.actor import Actor, current_rank, endpoint

class Ranks(Actor):
    @endpoint
    def rank(self) -> int:
        return current_rank().rank

procs = meshgate.native_hosts("workers").spawn_procs(per_host={"gpus": 2})
print([rank for _, rank in procs.spawn("ranks", Ranks).rank.call().get().items()])
procs.stop().get()
sys.stdout.flush()
os._exit(0)  # see docs/submit.md
"""
HUNGRY = """
import os, signal
for _ in range(8):
    if not os.fork():
        data = bytearray(os.urandom(1)) * 100_000_000
        signal.pause()
while True: signal.pause()
"""


@pytest.fixture(scope="module")
def job(namespace: str) -> Iterator[KubernetesJob]:
    job = KubernetesJob(compute=Compute(replicas=2), name="night", namespace=namespace)
    job.apply()
    yield job
    job.kill()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (("actors", ACTORS), ("train", TRAIN), ("native", NATIVE), ("hungry", HUNGRY)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def meshgate(project: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from meshgate.cli.app import app; app()"
    given = [sys.executable, "-c", code, command, *arguments]
    return subprocess.run(given, capture_output=True, text=True, check=False, env=os.environ, cwd=project)


def submit(project: Path, namespace: str, *arguments: str) -> str:
    """The name of the run."""
    done = meshgate(project, "submit", "night", "-n", namespace, "--dir", ".", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["name"])


def test_a_program_runs_in_the_cluster_without_its_laptop(
    job: KubernetesJob, kubectl: Kubectl, namespace: str, project: Path
) -> None:
    name = submit(project, namespace, "--", "python", "train.py", namespace)
    followed = meshgate(project, "logs", "night", "-n", namespace, "--run", name, "-f")
    assert "sum 42\n" in followed.stdout, followed.stdout + followed.stderr
    assert f"meshgate: left KubernetesJob({namespace}/night), the job of the run {name}, running" in followed.stdout
    runs = json.loads(meshgate(project, "runs", "night", "-n", namespace, "--json").stdout)["runs"]
    assert [(run["name"], run["state"], run["exit_code"]) for run in runs] == [(name, "failed", 3)]
    assert len(job.state(cached_path=None).workers) == 2  # the job goes on
    audited = [line for line in kubectl("logs", f"deployment/{Names('night').gateway}").splitlines() if name in line]
    assert any("audit" in line and "submit run" in line for line in audited)


def test_a_program_has_monarchs_own_hosts(job: KubernetesJob, namespace: str, project: Path) -> None:
    name = submit(project, namespace, "--", "python", "native.py")
    followed = meshgate(project, "logs", "night", "-n", namespace, "--run", name, "-f")
    assert followed.stdout.endswith("[0, 1, 2, 3]\n"), followed.stdout + followed.stderr


def test_a_program_that_needs_too_much_memory_harms_its_run_only(
    job: KubernetesJob, kubectl: Kubectl, namespace: str, project: Path
) -> None:
    name = submit(project, namespace, "--memory", "400Mi", "--", "python", "hungry.py")
    job.state(cached_path=None)
    run = job.run(name)
    run.wait()
    assert run.status().reason.startswith("it used ")
    restarts = kubectl("get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}")
    assert set(restarts.split()) == {"0"}


def test_a_program_is_stopped(job: KubernetesJob, namespace: str, project: Path) -> None:
    (project / "wait.py").write_text("import signal\nprint('ready')\nwhile True: signal.pause()\n")
    name = submit(project, namespace, "--", "python", "wait.py")
    shown = ("logs", "night", "-n", namespace, "--run", name)
    wait_for(lambda: meshgate(project, *shown).stdout == "ready\n", "the program")
    stopped = meshgate(project, "stop", "night", "-n", namespace, "--run", name)
    assert stopped.stdout == f"{name} stopped: was killed by SIGTERM\n", stopped.stderr

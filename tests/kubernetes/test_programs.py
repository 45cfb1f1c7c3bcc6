"""Whole programs against the cluster: the examples, and those that the product was conceived from, imports apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshgate import Compute, KubernetesJob
from tests.kubernetes.cluster import Kubectl

ROOT = Path(__file__).parents[2]

KUBETORCH = """
import meshgate as kt
from meshgate import Actor, KubernetesJob, endpoint, current_rank

class Trainer(Actor):
    def __init__(self):
        self.rank = current_rank().rank

    @endpoint
    def train_step(self, batch_size: int) -> str:
        return f"Training step with batch_size={batch_size}"

    @endpoint
    def get_rank(self) -> dict:
        return {"rank": self.rank}

job = KubernetesJob(
    compute=kt.Compute(
        gpu=0,
        replicas=2,
        image=kt.Image(name="monarch-worker").pip_install(["torchmonarch"]),
    )
)
state = job.state()
host_mesh = state.workers
proc_mesh = host_mesh.spawn_procs(per_host={"gpus": 1})
trainers = proc_mesh.spawn("trainers", Trainer)
results = trainers.train_step.call(batch_size=32).get()
print(results)
ranks = trainers.get_rank.call().get()
print(ranks)
job.kill()
"""

MODEL = """
from meshgate import Actor, endpoint
from step_of_cluster import STEP

class Model(Actor):
    @endpoint
    def step(self):
        return STEP
"""

DRIVER = """
import pathlib, sys
from meshgate import Compute, KubernetesJob
from model_of_cluster import Model

with KubernetesJob(compute=Compute(replicas=8), name="live", namespace=sys.argv[1]) as job:
    hosts = job.state().workers
    procs = hosts.spawn_procs()
    print(set(procs.spawn("first", Model).step.call().get().values()))
    pathlib.Path("step_of_cluster.py").write_text("STEP = 22\\n")
    print(job.sync(quiet=True).ready, "hosts")
    print(set(hosts.spawn_procs().spawn("second", Model).step.call().get().values()))
    print(sorted(procs.reload().get().item(hosts=7)["modules"]))
    print(set(procs.spawn("third", Model).step.call().get().values()))
"""


def run(program: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *program],
        cwd=cwd,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_as_it_stands(namespace: str, tmp_path: Path) -> None:
    printed = run([str(ROOT / "examples" / "kubernetes.py"), "--namespace", namespace], tmp_path)
    assert "'rank 1 is done'" in printed


def test_kubetorchs_first_example_runs(namespace: str, tmp_path: Path) -> None:
    program = tmp_path / "basic.py"
    program.write_text(KUBETORCH.replace("    )\n)\nstate", f"    ),\n    namespace={namespace!r},\n)\nstate"))
    printed = run([str(program)], tmp_path)
    assert printed.count("Training step with batch_size=32") == 2
    assert "{'rank': 1}" in printed


def test_a_save_is_what_the_next_processes_of_eight_pods_run(namespace: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "step_of_cluster.py").write_text("STEP = 1\n")
    (tmp_path / "model_of_cluster.py").write_text(MODEL)
    (tmp_path / "driver.py").write_text(DRIVER)
    printed = run(["driver.py", namespace], tmp_path)
    assert printed.splitlines() == [
        "{1}", "8 hosts", "{22}", "['model_of_cluster', 'step_of_cluster']", "{22}",
    ]  # fmt: skip


def test_a_second_program_uses_the_job_by_its_name(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="shared", namespace=namespace) as job:
        job.apply()
        other = KubernetesJob(name="shared", namespace=namespace)
        assert other.state(cached_path=None).workers.sizes == {"hosts": 1}
        other._client.close()

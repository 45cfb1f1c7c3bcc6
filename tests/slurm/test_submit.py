"""Programs that run beside the gateway of a Slurm job, on the login node or the first node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.actors import Trainer
from tests.slurm.cluster import NOTICED, small_job

ACTORS = """
from meshgate import Actor, endpoint

class Adder(Actor):
    @endpoint
    def add(self, number: int) -> int:
        return number + 1
"""
TRAIN = """
import os, sys
import meshgate
from meshgate import SlurmJob
from actors import Adder
from monarch.actor import Actor, current_rank, endpoint

class Ranks(Actor):
    @endpoint
    def rank(self) -> int:
        return current_rank().rank

with SlurmJob({"workers": 2}, job_name="another") as job:
    adders = job.state().workers.spawn_procs(per_host={"gpus": 1}).spawn("adders", Adder)
    print("sum", sum(adders.add.call(20).get().values()))
procs = meshgate.native_hosts("workers").spawn_procs(per_host={"gpus": 1})
print("ranks", [rank for _, rank in procs.spawn("ranks", Ranks).rank.call().get().items()])
procs.stop().get()
sys.stdout.flush()
os._exit(3)  # see docs/submit.md
"""


SAVES = """
import signal, threading
from meshgate import SlurmJob
from actors import Adder

stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
with SlurmJob({"workers": 1}) as job:
    adders = job.state().workers.spawn_procs().spawn("adders", Adder)
    print("step", adders.add.call_one(1).get(), flush=True)
    stopping.wait()
    print("saved", adders.add.call_one(2).get(), flush=True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the test runs in."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "actors.py").write_text(ACTORS)
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_program_runs_beside_the_gateway_and_attaches_to_its_job(
    name: str, tmp_path: Path, project: Path, gateway_on: str
) -> None:
    (project / "train.py").write_text(TRAIN)
    with small_job({"workers": 2}, name, tmp_path, gateway_on=gateway_on, mem="3G") as job:
        run = job.submit(["python", "train.py"], name="night", sync_dirs=[str(project)])
        code = run.wait(timeout=120)
        output = "".join(run.logs())
        assert code == 3, output
        assert "sum 42\n" in output
        assert "unencrypted" not in output  # its connection does not leave the machine
        assert "ranks [0, 1]\n" in output
        assert "left SlurmJob({'workers': 2}), the job of the run night, running" in output
        assert len(job.state().workers) == 2  # the job goes on


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_program_that_is_stopped_can_save_and_leaves_the_job_running(
    name: str, tmp_path: Path, project: Path, gateway_on: str
) -> None:
    (project / "train.py").write_text(SAVES)
    with small_job({"workers": 1}, name, tmp_path, gateway_on=gateway_on, mem="3G") as job:
        run = job.submit(["python", "train.py"], name="night", sync_dirs=[str(project)])
        assert "step 2\n" in run.logs(follow=True)
        run.stop(grace=600)
        assert run.wait(timeout=120) == 0, "".join(run.logs())
        assert run.status().state == "stopped"
        assert "saved 3\n" in run.logs()
        assert job.state().workers.spawn_procs().spawn("again", Trainer).node.call_one().get(timeout=NOTICED)

"""Programs written for Monarch's job interface run on meshgate, their import lines apart."""

from __future__ import annotations

import os
from pathlib import Path

from tests.programs import run_program

FIRST_JOB = """
from meshgate import LocalJob
from meshgate import Actor, endpoint

class HelloActor(Actor):
    @endpoint
    def hello(self):
        print("Hello from Monarch")

# Define a local job with two worker processes
job = LocalJob(meshes={"workers": 2})

# Apply the job and retrieve allocated resources
state = job.state()

# Access the allocated host mesh
workers = state.workers

# Spawn actors on the workers and invoke the endpoint
actors = workers.spawn("hello", HelloActor)
actors.hello.call()
"""

PROCESS_JOB = """
from meshgate import ProcessJob

job = ProcessJob({"trainers": 2, "dataloaders": 1})
state = job.state(cached_path=None)
state.trainers    # HostMesh with 2 hosts
state.dataloaders # HostMesh with 1 host
"""


COMPUTE = """
import meshgate as kt
from meshgate import KubernetesJob

# Convenient but fully customizable compute specification
compute = kt.Compute(
    gpu=8,
    cpu="32",
    memory="256Gi",
    replicas=4,
    image=kt.Image(name="my-training").pip_install(["torch", "transformers"]),
)

job = KubernetesJob(compute=compute)
"""


def test_kubetorchs_example_of_compute_asks_for_what_it_says(tmp_path: Path) -> None:
    printed = run_program(COMPUTE + "print(job, compute)\n", tmp_path)
    for told in ("{'workers': 4}", "cpu='32'", "memory='256Gi'", "gpus=8", "replicas=4"):
        assert told in printed


def test_the_first_job_of_the_overview_runs_as_it_stands(tmp_path: Path) -> None:
    run_program(FIRST_JOB, tmp_path)
    assert os.listdir(tmp_path) == ["program.py"]


def test_the_first_job_of_the_overview_greets_from_both_workers(tmp_path: Path) -> None:
    # As it stands it ends without waiting for its call, which then may or may not have run.
    printed = run_program(FIRST_JOB.rstrip() + ".get()\n", tmp_path)
    assert "Hello from Monarch" in printed


def test_the_example_of_processjob_has_both_meshes(tmp_path: Path) -> None:
    program = PROCESS_JOB + "print(len(state.trainers), len(state.dataloaders))\n"
    assert run_program(program, tmp_path) == "2 1\n"

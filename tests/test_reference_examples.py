"""Programs written for Monarch's and Kubetorch's job interfaces run on meshgate; only their imports change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_kubetorchs_compute_example_creates_the_same_request(tmp_path: Path) -> None:
    printed = run_program(COMPUTE + "print(job, compute)\n", tmp_path)
    for text in ("{'workers': 4}", "cpu='32'", "memory='256Gi'", "gpus=8", "replicas=4"):
        assert text in printed


def test_monarchs_first_job_example_runs_unchanged(tmp_path: Path) -> None:
    run_program(FIRST_JOB, tmp_path)
    assert os.listdir(tmp_path) == ["program.py"]


def test_monarchs_first_job_example_prints_from_the_workers(tmp_path: Path) -> None:
    # Unchanged, the example ends without waiting for its call, so its output may be missing.
    printed = run_program(FIRST_JOB.rstrip() + ".get()\n", tmp_path)
    assert "Hello from Monarch" in printed


def test_monarchs_processjob_example_has_both_meshes(tmp_path: Path) -> None:
    program = PROCESS_JOB + "print(len(state.trainers), len(state.dataloaders))\n"
    assert run_program(program, tmp_path) == "2 1\n"


SPMD_COMMAND = """
from meshgate.spmd import serve

job = serve(
    ["torchrun", "--nproc-per-node=4", "--standalone", "train.py"],
    scheduler="local_cwd",
)
job.run_spmd()
"""

# As in Monarch's documentation, but for the scheduler, which only Meta has, and the number of processes.
SPMD_APPDEF = """
from meshgate.spmd import serve
from torchx import specs

app = specs.AppDef(
    name="my-training",
    roles=[
        specs.Role(
            name="trainer",
            image="my_workspace:latest",
            entrypoint="workspace/entrypoint.sh",
            args=["torchrun", "--nnodes=2", "--nproc-per-node=2",
                  "-m", "train"],
            num_replicas=2,
            resource=specs.resource(cpu=1, memMB=1024),
        ),
    ],
)
job = serve(
    app,
    scheduler="local_cwd",
    scheduler_cfg={"prepend_cwd": False},
)
job.run_spmd()
"""
TRAIN = """
import os
with open(f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}", "w") as file:
    file.write(os.environ.get("FROM_ENTRYPOINT", ""))
"""


@pytest.mark.timeout(900)
def test_monarchs_spmd_example_of_a_command_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run_program(SPMD_COMMAND, tmp_path, timeout=300)
    assert {f"rank-{rank}-of-4" for rank in range(4)} <= set(os.listdir(tmp_path))


@pytest.mark.timeout(900)
def test_monarchs_spmd_example_of_an_appdef_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "workspace").mkdir()
    entrypoint = tmp_path / "workspace" / "entrypoint.sh"
    entrypoint.write_text('#!/bin/sh\nexport FROM_ENTRYPOINT=yes\nexec "$@"\n')
    entrypoint.chmod(0o755)
    run_program(SPMD_APPDEF, tmp_path, timeout=300)
    written = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert written == {f"rank-{rank}-of-4": "yes" for rank in range(4)}

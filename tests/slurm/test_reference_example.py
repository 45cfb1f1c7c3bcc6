"""The example of Monarch's job documentation runs on nodes; only its import changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program
from tests.slurm.cluster import DISTURBED

# As in the document, but for the numbers of nodes, and for arguments that leave this cluster to others.
EXAMPLE = """
from meshgate import SlurmJob

# Create a job specification
job = SlurmJob(
    meshes={{"trainers": 2, "dataloaders": 1}},
    partition="gpu",
    time_limit="01:00:00",
    job_name="{name}", exclusive=False, slurm_args=["--exclude={excluded}"], log_dir="logs",
)

# Get the state (applies the job if needed)
state = job.state()

# Access host meshes by name
trainer_hosts = state.trainers
dataloader_hosts = state.dataloaders
print(len(trainer_hosts), len(dataloader_hosts), job.active)
job.kill()
"""


@pytest.mark.timeout(400)
def test_monarchs_slurmjob_example_has_both_meshes(name: str, tmp_path: Path) -> None:
    program = EXAMPLE.format(name=name, excluded=DISTURBED)
    assert run_program(program, tmp_path, strict=False, timeout=300).splitlines()[-1] == "2 1 True"

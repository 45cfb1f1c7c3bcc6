"""What a batch job leaves on its first node when Slurm ends it. ``tests/slurm/test_batch.py`` has the rest."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from meshgate_slurm.script import DIRECTORY, SPEC
from meshgate_slurm.spec import SlurmSpec

TIMEOUT = 60.0  # seconds; it takes a fraction of that on an idle machine
BATCH = """
from meshgate_slurm import batch
from meshgate_slurm.messages import RunningSlurmJob

def start_gateway(directory, apply_id, spec):
    directory.mkdir()
    (directory / "token").write_text("secret")
    return RunningSlurmJob(
        apply_id=apply_id, job_id=7, host="node1", directory=str(directory), socket="/s", pid=1, started="1",
        token="secret", meshes=spec.meshes, log_dir="",
    )

batch.start_gateway = start_gateway
batch.end_gateway = lambda job: print("the gateway has ended", flush=True)
batch.main()
"""
CLIENT = "print('the client runs', flush=True); input()"


def batch_job(client: str, home: Path) -> subprocess.Popen[str]:
    """A batch job that runs ``client``, with its home and its temporary files in ``home``."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a", "HOME": str(home), "TMPDIR": str(home)}
    spec = SlurmSpec(meshes={"workers": 1}).model_dump_json()
    command = [sys.executable, "-c", BATCH, client]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, env={**os.environ, SPEC: spec, **variables}, stdin=pipe, stdout=pipe)


def test_the_command_may_name_files_below_the_home(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(*sys.argv)")
    with batch_job("python ~/train.py a~/b ~root", tmp_path) as batch:
        output, _ = batch.communicate(timeout=TIMEOUT)
    assert (batch.returncode, output) == (0, f"{tmp_path}/train.py a~/b ~root\nthe gateway has ended\n")


def test_a_job_that_slurm_ends_leaves_neither_gateway_nor_files(tmp_path: Path) -> None:
    with batch_job(shlex.join([sys.executable, "-c", CLIENT]), tmp_path) as batch:
        assert batch.stdout is not None
        assert batch.stdout.readline() == "the client runs\n"
        description, token = sorted(tmp_path.glob("meshgate-*/job/*"))
        assert (description.name, token.name) == ("job.json", "token")
        assert json.loads(description.read_bytes())["cluster"] == "a"
        batch.send_signal(signal.SIGTERM)
        output, _ = batch.communicate(timeout=TIMEOUT)
    assert (batch.returncode, output) == (128 + signal.SIGTERM, "the gateway has ended\n")
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_the_directory_of_the_login_node_says_that_they_must_share_it(tmp_path: Path) -> None:
    spec = SlurmSpec(meshes={"workers": 1}).model_dump_json()
    environment = {**os.environ, SPEC: spec, "SLURM_JOB_ID": "7", DIRECTORY: str(tmp_path / "private")}
    command = [sys.executable, "-m", "meshgate_slurm.batch"]
    ran = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=TIMEOUT, check=False)
    assert ran.returncode == 1
    assert f"has no {tmp_path / 'private'}: the login node and the nodes must share it" in ran.stderr

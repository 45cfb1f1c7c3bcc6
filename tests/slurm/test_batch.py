"""A job with a client of its own, which runs on the first node: nothing outside of the cluster has to stay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshgate import job_loads
from meshgate.errors import JobError
from tests.slurm.cluster import DEADLINE, DISTURBED, laptop, queue, run, small_job
from tests.waiting import wait_for

MEMORY = "1G"  # the first node has client, gateway and engine as well, some 500 MB together
CLIENT = """
import os, sys
from meshgate import Actor, SlurmJob, endpoint

class Trainer(Actor):
    @endpoint
    def node(self):
        return os.uname().nodename

if __name__ == "__main__":
    with SlurmJob({"trainers": 2}) as job:
        nodes = job.state().trainers.spawn("trainers", Trainer).node.call().get().values()
        print("nodes", *nodes, "client", os.uname().nodename, flush=True)
    sys.exit(int(sys.argv[1]))
"""


SUBMIT = """
import sys
from meshgate import SlurmJob

name, python, directory, memory, exclude = sys.argv[1:]
job = SlurmJob(
    {"trainers": 2}, login="login", job_name=name, python_exe=python, log_dir=directory, exclusive=False,
    time_limit="10", mem=memory, slurm_args=[exclude],
)
job.apply(f"python {directory}/client.py 3")
job.dump("batch.job")
print(job.job_id)
"""


def last_state(job_id: int) -> str:
    """The job's last state and exit code."""
    shown: dict[str, str] = {}

    def has_ended() -> bool:
        details = json.loads(run("scontrol", "show", "job", str(job_id), "--json"))["jobs"][0]
        shown.update(state=details["job_state"][0], code=str(details["exit_code"]["return_code"]["number"]))
        return shown["state"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    wait_for(has_ended, "the batch job to end")
    return f"{shown['state']} {shown['code']}"


def nodes_of(log: Path) -> list[str]:
    """The nodes of the trainers; the client ran on the first."""
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("nodes ")]
    _, *nodes, _, client = line.split()
    assert client == nodes[0]
    return nodes


def test_the_client_runs_on_the_first_node(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    monkeypatch.chdir(tmp_path)
    job = small_job({"trainers": 2}, name, tmp_path, mem=MEMORY)
    job.apply("python client.py 0")
    assert job.job_id is not None
    assert last_state(job.job_id) == "COMPLETED 0"
    assert len(set(nodes_of(tmp_path / f"slurm_{job.job_id}_{name}.log"))) == 2
    with pytest.raises(JobError, match="is a batch job, which only its own client uses; its output is in"):
        job.state(cached_path=None)
    job.kill()


def test_a_laptop_can_leave_once_it_has_submitted(name: str, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "submit.py").write_text(SUBMIT)
    with laptop(
        tmp_path / "submit.py", name, sys.executable, str(tmp_path), MEMORY, f"--exclude={DISTURBED}"
    ) as submit:
        out, err = submit.communicate(timeout=DEADLINE)
    assert submit.returncode == 0, err
    assert last_state(int(out)) == "FAILED 3"
    nodes_of(tmp_path / f"slurm_{int(out)}_{name}.log")


def test_a_batch_job_is_cancelled_by_any_program_that_loads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = small_job({"trainers": 1}, name, tmp_path)
    job.apply("sleep 600")
    job_loads(job.dumps()).kill()
    assert not queue(name)

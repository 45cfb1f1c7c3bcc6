"""Another laptop of the same user, which has no file of the job, finds it by the login node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import DEADLINE, DISTURBED, laptop, queue
from tests.waiting import wait_for

SUBMIT = """
import os, sys
from meshgate import Actor, SlurmJob, endpoint

class Trainer(Actor):
    @endpoint
    def node(self):
        return os.uname().nodename

if __name__ == "__main__":
    name, python, directory, exclude, gateway_on = sys.argv[1:]
    job = SlurmJob(
        {"trainers": 1}, login="login", job_name=name, python_exe=python, log_dir=directory, exclusive=False,
        time_limit="10", slurm_args=[exclude], gateway_on=gateway_on, detached="train", account="physics",
        sync_dirs=[os.path.dirname(os.path.abspath(__file__))],
    )
    trainers = job.state(None).trainers.spawn_procs().spawn("trainers", Trainer)
    print(job.job_id, trainers.node.call_one().get())
"""
ATTACH = """
import sys
from meshgate import SlurmJob

session = SlurmJob.find(int(sys.argv[1]), login="login").attach()
print(session.actors["trainers"].node.call_one().get())
"""
COMMAND = "from meshgate.cli.app import app\napp()\n"


def output(directory: Path, text: str, *arguments: str) -> str:
    """What a program on the laptop prints, in a directory of its own."""
    directory.mkdir(exist_ok=True)
    file = directory / "program.py"
    file.write_text(text)
    with laptop(file, *arguments) as process:
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_job_of_another_laptop_is_listed_used_and_ended(name: str, tmp_path: Path, gateway_on: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    given = [name, sys.executable, str(tmp_path), f"--exclude={DISTURBED}", gateway_on]
    number, node = output(first, SUBMIT, *given).split()[-2:]
    rows = json.loads(output(second, COMMAND, "ls", "--login", "login", "--json"))["jobs"]
    (row,) = [row for row in rows if row["name"] == name]  # other tests have jobs, too
    assert (row["id"], row["kind"], row["state"]) == (f"login:{number}", "SlurmJob", "RUNNING")
    assert row["meshes"] == {"trainers": 1}
    assert (row["partition"], row["account"], row["time_limit"]) == ("cpu", "physics", 600)
    assert 0 < row["seconds_left"] <= 600
    status = json.loads(output(second, COMMAND, "status", row["id"], "--json"))
    assert [host["name"] for session in status["sessions"] for host in session["hosts"]] == [node]
    allocated = {"job_id": int(number), "state": "RUNNING", "partition": "cpu", "account": "physics"}
    assert {name: status["slurm"][name] for name in allocated} == allocated
    assert 0 < status["slurm"]["seconds_left"] <= status["slurm"]["time_limit"] == 600
    assert output(second, ATTACH, number).strip() == node
    assert f"job {number})" in output(second, COMMAND, "kill", row["id"])
    wait_for(lambda: not queue(name), "the job to end")
    assert not Path(f"~/.meshgate/slurm/jobs/local/{number}.json").expanduser().exists()

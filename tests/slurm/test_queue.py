"""Jobs that Slurm refuses, and jobs that wait in the queue."""

from __future__ import annotations

import _thread
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from meshgate import JobStartFailed, SlurmJob
from tests.programs import ROOT
from tests.slurm.actors import Trainer
from tests.slurm.cluster import DEADLINE, queue, run, small_job
from tests.waiting import Printed, wait_for

LATER = ["--begin=now+1hour"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nonexistent"}, r"sbatch: error: .*[Ii]nvalid partition"),
        ({"partition": "short", "gateway_on": "node"}, "sbatch: error: .*Requested time limit is invalid"),
    ],
)
def test_what_slurm_refuses_is_reported_in_its_words(
    name: str, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobStartFailed, match=f"Slurm refused the job: {words}") as failed:
        small_job({"workers": 1}, name, tmp_path, **options).apply()
    assert "The partitions and their limits: cpu infinite, gpu infinite, short 2:00, spot infinite" in str(failed.value)


def test_slurm_has_the_account_and_the_qos_of_the_job_on_a_cluster_without_slurmdbd(name: str, tmp_path: Path) -> None:
    job = small_job({"workers": 1}, name, tmp_path, slurm_args=LATER, account="physics", qos="high")
    job.apply()
    try:
        (found,) = json.loads(run("scontrol", "show", "job", str(job.job_id), "--json"))["jobs"]
        assert (found["account"], found["qos"]) == ("physics", "high")
    finally:
        job.kill()


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_a_queue_that_does_not_move_is_described_and_left_after_the_start_timeout(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], gateway_on: str
) -> None:
    options = {"slurm_args": LATER, "job_start_timeout": 1, "gateway_on": gateway_on}
    job = small_job({"workers": 1}, name, tmp_path, **options)
    with pytest.raises(JobStartFailed, match=r"PENDING \(BeginTime: its begin time has not come\).*after 1 s"):
        job.state(cached_path=None)
    assert "; expected to start at " in capsys.readouterr().err
    wait_for(lambda: not queue(name), "the job to be cancelled")


def test_an_interrupt_ends_the_wait_and_a_second_one_the_job(name: str, tmp_path: Path, printed: Printed) -> None:
    job = small_job({"workers": 1}, name, tmp_path, slurm_args=LATER)
    job.apply()
    try:
        interrupt_when_shown(printed, "expected to start")
        with pytest.raises(KeyboardInterrupt):
            job.state(cached_path=None)
        assert queue(name) == ["PENDING"]
        assert job.active

        printed.take()
        threading.Thread(target=interrupt_twice, args=(printed,)).start()
        with pytest.raises(KeyboardInterrupt):
            job.state(cached_path=None)
        wait_for(lambda: not queue(name), "the job to be cancelled")
        assert not job.active
    finally:
        job.kill()


def interrupt_when_shown(printed: Printed, text: str) -> None:
    def interrupt() -> None:
        wait_for(lambda: text in printed.take()[1], text)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()


def interrupt_twice(printed: Printed) -> None:
    for text in ("expected to start", "stays in the queue"):
        wait_for(lambda text=text: text in printed.take()[1], text)  # type: ignore[misc]
        _thread.interrupt_main()


@pytest.mark.parametrize(
    ("python", "problem"),
    [("/nonexistent/python", "has no Python at python_exe='/nonexistent/python'"), ("/usr/bin/python3", "meshgate")],
)
def test_a_wrong_python_is_named_before_anything_is_submitted(python: str, problem: str) -> None:
    with pytest.raises(JobStartFailed, match=problem):
        SlurmJob({"workers": 1}, python_exe=python).apply()


def test_two_jobs_share_a_node(name: str, tmp_path: Path) -> None:
    same_node = ["--nodelist=n1"]
    first = small_job({"workers": 1}, name, tmp_path, slurm_args=same_node)
    second = small_job({"workers": 1}, name, tmp_path, slurm_args=same_node)
    with first, second:
        first.apply()
        second.apply()
        for job in (first, second):
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.node.call_one().get(timeout=DEADLINE) == "n1"


SUBMIT = """\
import sys
from pathlib import Path
from tests.slurm.cluster import small_job

with small_job({"workers": 1}, sys.argv[1], Path(sys.argv[2]), gateway_on=sys.argv[3]) as job:
    job.state()
"""
SBATCH = """\
#!/bin/sh
echo $$ > {directory}/pid
mv {directory}/pid {directory}/submitting
while [ ! -e {directory}/go ]; do sleep 0.05; done
exec {sbatch} "$@"
"""


@pytest.mark.parametrize("gateway_on", ["login", "node"])
def test_ctrl_c_during_the_submission_leaves_no_job(name: str, tmp_path: Path, gateway_on: str) -> None:
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(SBATCH.format(directory=tmp_path, sbatch=shutil.which("sbatch")))
    slow.chmod(0o755)
    driver = subprocess.Popen(
        [sys.executable, "-c", SUBMIT, name, str(tmp_path), gateway_on],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{slow.parent}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
    )
    try:
        wait_for((tmp_path / "submitting").exists, "sbatch")
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=DEADLINE)
        assert driver.returncode == -signal.SIGINT
    finally:
        driver.kill()
        (tmp_path / "go").touch()
    sbatch = Path("/proc", (tmp_path / "submitting").read_text().strip())
    wait_for(lambda: not sbatch.exists(), "the end of sbatch")  # by itself or, on a slow machine, at its time limit
    wait_for(lambda: not queue(name), "the end of the job")

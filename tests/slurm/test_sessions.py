"""Sessions that outlive their driver."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate import JobError, SlurmJob, job_load
from tests.programs import ROOT
from tests.slurm.cluster import small_job
from tests.slurm.sessions_driver import CALLS, READY
from tests.waiting import DEADLINE, wait_for


def test_the_session_of_a_killed_driver_is_taken_over(name: str, tmp_path: Path) -> None:
    saved, errors = tmp_path / "job.pkl", tmp_path / "errors"
    with errors.open("w") as file:
        command = [sys.executable, "-m", "tests.slurm.sessions_driver", name, str(tmp_path), str(saved)]
        driver = subprocess.Popen(command, cwd=ROOT, stderr=file)
    try:
        wait_for(lambda: READY in errors.read_text() or driver.poll() is not None, "the driver to call")
        assert driver.poll() is None, errors.read_text()
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        job = job_load(str(saved))
        (info,) = job.sessions()
        assert (info.name, info.detached) == ("train", True)
        session = job.attach()
        assert {call.tag: call.state for call in session.calls if call.tag}.keys() == {str(n) for n in range(CALLS)}
        nodes = {session.tagged(str(number))[0].future.get(DEADLINE) for number in range(CALLS)}
        assert nodes == {session.actors["trainers"].node.call_one().get(DEADLINE)}
    finally:
        driver.kill()
        driver.wait()
        if saved.exists():
            job_load(str(saved)).kill()


def test_a_batch_job_cannot_be_detached(name: str, tmp_path: Path) -> None:
    job: SlurmJob = small_job({"workers": 1}, name, tmp_path, detached="train")
    with pytest.raises(JobError, match=r"detached=.* cannot be used with a batch job"):
        job.apply("python program.py")

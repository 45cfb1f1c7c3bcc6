"""A job on a cluster ends with its ``with`` block, whatever happens while it ends, and once its driver is gone.

The latter with real gateways as jobs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs import cluster_job, registry
from meshgate.jobs.cluster_job import ATTEMPTS, ClusterJob, Reaper, end_job
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.saved import SavedJob
from meshgate.jobs.trait import JobTrait, kind_of
from meshgate_processes.identity import identify_process

TIMEOUT = 60.0  # seconds; a wait takes a fraction of it on an idle machine
DRIVER = """
import os, signal, sys
from pathlib import Path
from meshgate.jobs.cluster_job import Reaper

saved, how, apply_id = Path(sys.argv[1]).read_bytes(), sys.argv[2], sys.argv[3]
reaper = Reaper(apply_id)
reaper.bind(b"replaced by the next")
reaper.bind(saved)
print(reaper._child.pid, flush=True)
if how == "kill":
    if os.fork() == 0:  # a child of the driver that outlives it
        os.closerange(0, 3)
        os.read(int(sys.argv[4]), 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "crash":
    os._exit(1)
else:
    reaper.release()
    reaper.release()
"""


class Allocation:
    meshes: Mapping[str, int] = {"workers": 2}

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return {"id": 12}


class Job(ClusterJob[Allocation]):
    def __init__(self) -> None:
        super().__init__(None, watch=False)
        self.ended: list[Allocation] = []

    def __repr__(self) -> str:
        return "Job()"

    def _create(self, client_script: str | None) -> None:
        self._job = Allocation()
        self._bind_if_scoped(self._job)

    def _end(self, job: Allocation) -> None:
        self.ended.append(job)

    def _spec_for_reaper(self) -> tuple[type[JobTrait], dict[str, Any]]:
        return Job, {"nodes": 2}

    def can_run(self, spec: JobTrait) -> bool:
        return self._job is not None


class RecordedReaper:
    def __init__(self, apply_id: str) -> None:
        self.bound: list[bytes] = []
        self.released = False

    def bind(self, saved: bytes) -> None:
        self.bound.append(saved)

    def release(self) -> None:
        self.released = True


@pytest.fixture
def reapers(monkeypatch: pytest.MonkeyPatch) -> list[RecordedReaper]:
    started: list[RecordedReaper] = []

    def start(apply_id: str) -> RecordedReaper:
        started.append(RecordedReaper(apply_id))
        return started[-1]

    monkeypatch.setattr(cluster_job, "Reaper", start)
    return started


def test_a_reaper_can_end_the_job_of_a_block_until_the_block_has(reapers: list[RecordedReaper]) -> None:
    job = Job()
    with job:
        job.apply()
        (reaper,) = reapers
        saved = SavedJob.from_bytes(reaper.bound[-1], "the reaper's line")
        assert (saved.kind, saved.spec, saved.allocation) == (kind_of(Job), {"nodes": 2}, {"id": 12})
        assert not reaper.released
    assert reaper.released
    assert len(job.ended) == 1


def test_a_job_that_was_applied_before_its_block_is_bound_by_it(reapers: list[RecordedReaper]) -> None:
    job = Job()
    job.apply()
    assert not reapers
    with job:
        assert reapers[0].bound


def test_a_detached_job_has_no_reaper(reapers: list[RecordedReaper]) -> None:
    job = Job()
    job._detached = True
    with job:
        job.apply()
    assert not reapers
    assert not job.ended


def test_a_job_of_whose_session_its_block_takes_hold_has_no_reaper(
    reapers: list[RecordedReaper], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    monkeypatch.setattr(job, "_find_running", lambda cached_path: job)
    monkeypatch.setattr(job, "_take_over", lambda name, replay: SimpleNamespace(name=name))
    with job:
        job.apply()
        assert reapers[0].bound
        job.attach("night", cached_path=None)
        assert reapers[0].released
    assert not job.ended


def test_an_interrupt_while_the_session_closes_still_ends_the_job() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    job = Job()
    job.apply()
    job._client = SimpleNamespace(close=interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        job.kill()
    assert len(job.ended) == 1


def test_the_state_of_a_job_that_was_not_applied_is_refused() -> None:
    with pytest.raises(JobNotRunning, match=r"Job\(\) is not running"):
        Job()._state()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "job"


def drive(request: pytest.FixtureRequest, saved: Path, how: str, apply_id: str) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", DRIVER, str(saved), how, f"{apply_id}-reaper", str(reading)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, pass_fds=[reading])
    finally:
        os.close(reading)
        request.addfinalizer(lambda: os.close(writing))  # ends the forked child


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_the_job_of_a_killed_driver_is_ended(request: pytest.FixtureRequest, saved: Path, how: str) -> None:
    job = ProcessJob({"workers": 1})
    job.apply()
    try:
        job.dump(str(saved))
        assert drive(request, saved, how, str(job.apply_id)).returncode == (-9 if how == "kill" else 1)
        process = job._gateway._process  # type: ignore[union-attr]
        assert process.wait_ended(TIMEOUT)
    finally:
        job.kill()


def test_a_released_job_survives_its_driver(request: pytest.FixtureRequest, saved: Path) -> None:
    job = ProcessJob({"workers": 1})
    job.apply()
    try:
        job.dump(str(saved))
        done = drive(request, saved, "release", str(job.apply_id))
        assert (done.returncode, done.stderr) == (0, "")
        assert not Path(f"/proc/{done.stdout.strip()}").exists()
        assert job._is_running()
    finally:
        job.kill()


def test_what_prevents_the_end_is_in_the_log(request: pytest.FixtureRequest, saved: Path) -> None:
    saved.write_bytes(b"no job")
    done = drive(request, saved, "kill", "aaaa")
    child = identify_process(int(done.stdout))
    assert child is None or child.wait_ended(TIMEOUT)
    (log,) = (saved.parent / "state" / "meshgate" / "jobs").glob("aaaa-reaper.log")
    assert "JobFileError: this data is not a saved meshgate job" in log.read_text()


def test_a_bound_job_has_a_limit(saved: Path) -> None:
    reaper = Reaper("aaaa")
    try:
        with pytest.raises(ValueError, match="more than the 32768"):
            reaper.bind(b"x" * 40_000)
    finally:
        reaper.release()
    assert not (registry._directory() / "aaaa.log").exists()


class UnreachableJob:
    """A job whose first ``failures`` calls of ``kill`` fail."""

    apply_id = "the-job"

    def __init__(self, failures: int) -> None:
        self.failures, self.attempts = failures, 0

    def kill(self) -> None:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise JobError("no route to the cluster")


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(cluster_job.registry, "unregister", names.append)
    monkeypatch.setattr(cluster_job.time, "sleep", lambda seconds: None)
    return names


def load(monkeypatch: pytest.MonkeyPatch, job: UnreachableJob) -> None:
    monkeypatch.setattr(cluster_job, "job_loads", lambda data: job if data == b"saved" else None)


def test_a_job_is_ended_at_the_attempt_that_reaches_it(
    monkeypatch: pytest.MonkeyPatch, unregistered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = UnreachableJob(failures=2)
    load(monkeypatch, job)
    end_job(b"saved")
    assert (job.attempts, unregistered) == (3, ["the-job"])
    assert capsys.readouterr().err.splitlines() == [
        f"attempt {number} of {ATTEMPTS}: no route to the cluster" for number in (1, 2)
    ]


def test_a_job_that_stays_unreachable_is_an_error_and_stays_registered(
    monkeypatch: pytest.MonkeyPatch, unregistered: list[str]
) -> None:
    job = UnreachableJob(failures=ATTEMPTS)
    load(monkeypatch, job)
    with pytest.raises(JobError, match="no route to the cluster"):
        end_job(b"saved")
    assert (job.attempts, unregistered) == (ATTEMPTS, [])

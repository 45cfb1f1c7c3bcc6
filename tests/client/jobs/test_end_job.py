"""The program that ends a saved job tries again while the job cannot be reached, and reports each attempt."""

from __future__ import annotations

import pytest

from meshgate.errors import JobError
from meshgate.jobs import end_job as module
from meshgate.jobs.end_job import ATTEMPTS, end_job


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
    monkeypatch.setattr(module.registry, "unregister", names.append)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return names


def load(monkeypatch: pytest.MonkeyPatch, job: UnreachableJob) -> None:
    monkeypatch.setattr(module, "job_loads", lambda data: job if data == b"saved" else None)


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

"""What the methods of a job check before they ask its gateway; the rest is in ``test_runs.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshgate.errors import JobNotRunning
from tests.client.jobs.fake_job import FakeJob


@pytest.mark.parametrize(
    "ask", [lambda job: job.runs(), lambda job: job.run("night"), lambda job: job._run_output("night", 0)]
)
def test_a_job_that_does_not_run_has_no_runs(ask: Callable[[FakeJob], Any]) -> None:
    with pytest.raises(JobNotRunning, match=r"call state\(\) first"):
        ask(FakeJob(1))


@pytest.mark.parametrize("command", ["python train.py", []])
def test_a_command_is_a_program_and_its_arguments(command: Any) -> None:
    job = FakeJob(1)
    with pytest.raises(TypeError, match="pass the program and its arguments"):
        job.submit(command)
    assert not job.active


def test_a_submitted_program_finds_the_job_by_its_type() -> None:
    assert FakeJob(1)._joinable().kind == "FakeJob"

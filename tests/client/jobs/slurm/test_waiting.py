"""What the user sees while a job waits, and when the wait ends."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from meshgate.errors import ConnectionFailedError, JobStartFailed
from meshgate.jobs.slurm import waiting
from meshgate.jobs.slurm.waiting import Plain, choose_progress, describe, second_interrupt, wait_for_workers
from meshgate_slurm.messages import JobReport


def report(**facts: Any) -> JobReport:
    return JobReport.model_validate({"job_id": 7, "state": "RUNNING", "nodes": 2, **facts})


def answers(*reports: JobReport | Exception) -> Callable[[], JobReport]:
    remaining = iter(reports)

    def ask() -> JobReport:
        answer = next(remaining)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


PENDING = {"state": "PENDING", "pending": True, "why": "Resources: waits for nodes to become free"}


def test_the_wait_ends_when_all_workers_are_connected_and_each_step_is_shown_once() -> None:
    stream = io.StringIO()
    steps = [report(**PENDING), report(**PENDING), report(registered=1), report(registered=2)]
    assert wait_for_workers(answers(*steps), Plain(stream), None).registered == 2
    assert stream.getvalue().splitlines() == [
        "Slurm job 7 is PENDING (Resources: waits for nodes to become free)",
        "Slurm job 7 is RUNNING, 1 of 2 workers are connected",
        "Slurm job 7 is RUNNING, 2 of 2 workers are connected",
    ]


def test_nothing_is_shown_if_there_is_nothing_to_wait_for() -> None:
    stream = io.StringIO()
    wait_for_workers(answers(report(registered=2)), Plain(stream), None)
    assert stream.getvalue() == ""


def test_the_expected_start_is_shown_until_it_has_passed() -> None:
    assert "; expected to start at " in describe(report(**PENDING, expected_start=time.time() + 100))
    assert "expected" not in describe(report(**PENDING, expected_start=time.time() - 100))


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"state": "FAILED", "ended": True, "why": "FAILED: it broke"}, "Slurm job 7 has ended: FAILED: it broke"),
        ({"failed": "the worker on n1 ended"}, "the worker on n1 ended"),
    ],
)
def test_a_job_that_ends_while_it_is_awaited_is_an_error(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobStartFailed, match=problem):
        wait_for_workers(answers(report(**facts)), waiting.Silent(), None)


def test_the_wait_has_a_limit() -> None:
    with pytest.raises(JobStartFailed, match=r"PENDING.*after 0\.01 s \(job_start_timeout\)"):
        wait_for_workers(lambda: report(**PENDING), waiting.Silent(), 0.01)


def test_a_cut_connection_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ConnectionFailedError("cut")
    assert wait_for_workers(answers(cut, cut, report(registered=2)), waiting.Silent(), None)
    monkeypatch.setattr(waiting, "GATEWAY_TIMEOUT", 0.05)
    with pytest.raises(ConnectionFailedError, match="cut"):
        wait_for_workers(answers(*[cut] * 100), waiting.Silent(), None)


def test_progress_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")
    assert isinstance(choose_progress(), waiting.Silent)
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="expected auto, plain or off"):
        choose_progress()


class InterruptedStream(io.StringIO):
    """Stands for a person who presses Ctrl-C as soon as the text appears."""

    def flush(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_counts_from_the_moment_the_text_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", InterruptedStream())
    assert second_interrupt(12)


def test_without_a_second_interrupt_the_job_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert not second_interrupt(12, seconds=0.01)
    assert "Slurm job 12 stays in the queue" in capsys.readouterr().err

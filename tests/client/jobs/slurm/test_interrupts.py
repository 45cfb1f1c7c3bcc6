"""Two interrupts end a job that waits in the queue; one does not."""

from __future__ import annotations

import io
import sys

import pytest

from meshgate.jobs.slurm.interrupts import second_interrupt


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

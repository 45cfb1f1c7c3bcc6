from __future__ import annotations

import signal
import sys

import monarch.actor
import pytest

import meshgate
from meshgate import caller
from meshgate.errors import MeshFailure
from meshgate.session.errors import faults
from meshgate.session.errors.faults import REPEAT_WINDOW, FaultReporter, fault_hook


def died(rank: int, reason: str = "rank {} was killed by signal 9", mesh: str = "trainers") -> MeshFailure:
    return MeshFailure(mesh, reason.format(rank), (rank,), {rank: f"workers-{rank}"})


def test_the_first_failure_of_a_kind_is_reported_in_full_with_a_hint() -> None:
    text = FaultReporter().text(died(3), 0)
    assert text.startswith("meshgate: rank 3 of mesh 'trainers' on workers-3 failed: rank 3 was killed by signal 9\n")
    assert "unhandled_fault_hook" in text


def test_a_similar_failure_of_another_rank_is_one_line() -> None:
    reporter = FaultReporter()
    reporter.text(died(0), 0)
    assert reporter.text(died(1), 1) == "meshgate: rank 1 of mesh 'trainers' on workers-1 failed in the same way\n"


def test_failures_on_hosts_with_different_logs_are_similar() -> None:
    reporter = FaultReporter()
    reason = "process {0} ended (n{0}: Slurm ended job 7: CANCELLED\nThe last lines of the worker on n{0}:\n  {1})"
    assert "step 3" in reporter.text(died(0, reason.format(0, "step 3\n  step 4")), 0)
    assert reporter.text(died(1, reason.format(1, "loading")), 1).endswith(" failed in the same way\n")
    assert "TIMEOUT" in reporter.text(died(1, reason.format(1, "loading").replace("CANCELLED", "TIMEOUT")), 1)


def test_another_reason_mesh_or_time_is_reported_in_full() -> None:
    reporter = FaultReporter()
    reporter.text(died(0), 0)
    assert "out of memory" in reporter.text(died(1, "out of memory"), 1)
    assert "killed" in reporter.text(died(1, mesh="loaders"), 1)
    assert "killed" in reporter.text(died(1), REPEAT_WINDOW + 2)


def test_a_failure_without_ranks_is_reported() -> None:
    reporter = FaultReporter()
    no_ranks = MeshFailure("trainers", "gone")
    assert reporter.text(no_ranks, 0).startswith("meshgate: part of mesh 'trainers' failed: gone\n")
    assert reporter.text(no_ranks, 0) == "meshgate: another part of mesh 'trainers' failed in the same way\n"


def test_the_default_hook_is_meshgates_even_where_monarch_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", meshgate._own_fault_hook)
    assert fault_hook() is meshgate.unhandled_fault_hook


def test_a_hook_that_the_program_assigned_in_monarch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[MeshFailure] = []
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", meshgate._own_fault_hook)
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", failures.append)
    fault_hook()(died(3))
    assert failures == [died(3)]


def test_meshgates_hook_precedes_monarchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(failure: MeshFailure) -> None:
        raise AssertionError(failure)

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", ours)
    assert fault_hook() is ours


class Interrupted:
    """Counts the signals that would interrupt the main thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals: list[int] = []
        monkeypatch.setattr(faults, "LEAVE_TIMEOUT", 0.01)
        monkeypatch.setattr(faults, "_program", faults._Program())
        monkeypatch.setattr(caller, "_notes_waits", True)  # restored afterwards
        monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: self.signals.append(number))
        monkeypatch.delattr(sys, "ps1", raising=False)


def test_the_default_hook_and_one_that_raises_interrupt_the_main_thread_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = Interrupted(monkeypatch)
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", meshgate._own_fault_hook)
    faults.handle_fault(died(3))
    assert "rank 3" in capsys.readouterr().err
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", lambda failure: 1 / 0)
    faults.handle_fault(died(4))
    assert interrupted.signals == [signal.SIGINT]
    assert not caller._notes_waits  # a fault is not Ctrl-C


def test_a_program_that_ends_or_is_interactive_or_has_a_hook_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = Interrupted(monkeypatch)
    faults.handle_fault(died(1))
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", meshgate._own_fault_hook)
    with faults.uninterrupted():
        faults.handle_fault(died(2))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    faults.handle_fault(died(3))
    assert interrupted.signals == []


def test_the_report_at_a_prompt_does_not_say_that_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert "The program ends" in faults.FaultReporter().text(died(1), 0.0)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    text = faults.FaultReporter().text(died(1), 0.0)
    assert "The program ends" not in text
    assert "you can spawn again" in text


@pytest.mark.parametrize("interactive", [True, False])
def test_the_report_of_a_job_without_hosts_says_how_to_start_it_again(
    monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    if not interactive:
        monkeypatch.delattr(sys, "ps1")
    lost = MeshFailure("trainers", "Slurm ended job 7", (1,), {1: "n1"}, job_lost=True)
    text = faults.FaultReporter().text(lost, 0.0)
    assert "The job has no host any more, and kill() and apply() start it again" in text
    assert "remaining hosts" not in text
    assert ("The program ends" in text) != interactive


def test_a_background_program_that_ignores_sigint_gets_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = Interrupted(monkeypatch)
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", meshgate._own_fault_hook)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    faults.handle_fault(died(1))
    assert interrupted.signals == [signal.SIGTERM]

from __future__ import annotations

from meshgate.errors import MeshFailure
from meshgate.faults import ALIKE_FOR, FaultReporter


def died(rank: int, reason: str = "rank {} was killed by signal 9", mesh: str = "trainers") -> MeshFailure:
    return MeshFailure(mesh, reason.format(rank), (rank,), {rank: f"workers-{rank}"})


def test_the_first_of_a_kind_is_told_in_full_with_what_can_be_done() -> None:
    text = FaultReporter().text(died(3), 0)
    assert text.startswith("meshgate: rank 3 of mesh 'trainers' on workers-3 failed: rank 3 was killed by signal 9\n")
    assert "unhandled_fault_hook" in text


def test_the_same_of_another_rank_is_one_line() -> None:
    reporter = FaultReporter()
    reporter.text(died(0), 0)
    assert reporter.text(died(1), 1) == "meshgate: rank 1 of mesh 'trainers' on workers-1 failed in the same way\n"


def test_another_reason_mesh_or_time_is_told_in_full() -> None:
    reporter = FaultReporter()
    reporter.text(died(0), 0)
    assert "out of memory" in reporter.text(died(1, "out of memory"), 1)
    assert "killed" in reporter.text(died(1, mesh="loaders"), 1)
    assert "killed" in reporter.text(died(1), ALIKE_FOR + 2)


def test_a_failure_without_ranks_is_told_too() -> None:
    reporter = FaultReporter()
    nobody = MeshFailure("trainers", "gone")
    assert reporter.text(nobody, 0).startswith("meshgate: part of mesh 'trainers' failed: gone\n")
    assert reporter.text(nobody, 0) == "meshgate: another part of mesh 'trainers' failed in the same way\n"

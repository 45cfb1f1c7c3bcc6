"""What a run counts as lost, doubled and out of order."""

from __future__ import annotations

import pytest

from tests.chaos.driver import compare

NONE = {"lost": 0, "doubled": 0, "disordered": 0}


@pytest.mark.parametrize(
    ("recorded", "answered", "differs"),
    [
        ([0, 1, 2], 3, {}),
        ([0, 1, 2, 3], 3, {}),  # ran, and its answer had not arrived when the workload ended
        ([0, 2], 3, {"lost": 1}),
        ([0, 1, 1, 2], 3, {"doubled": 1}),
        ([0, 2, 1], 3, {"disordered": 1}),
        ([], 2, {"lost": 2}),
    ],
)
def test_recorded_calls_are_compared_with_answered_ones(
    recorded: list[int], answered: int, differs: dict[str, int]
) -> None:
    assert compare(NONE, recorded, answered) == {**NONE, **differs}
    assert compare({"lost": 1, "doubled": 1, "disordered": 1}, [0], 1) == {"lost": 1, "doubled": 1, "disordered": 1}

"""Files that are saved all the time are told from those that someone edits."""

from __future__ import annotations

from meshgate.busy import OFTEN, WITHIN, BusyFiles


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_is_found_busy_once_when_it_was_saved_often_in_a_short_time() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    found = []
    for _ in range(3 * OFTEN):
        clock.now += WITHIN / (2 * OFTEN)
        found += files.saved(["train.log"])
    assert found == ["train.log"]
    assert files.hold_all(["train.log"])
    assert not files.hold_all(["train.log", "model.py"])
    assert not files.hold_all([])


def test_a_file_that_someone_edits_for_hours_is_not_busy() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    for _ in range(10 * OFTEN):
        clock.now += 1.0
        assert files.saved(["model.py"]) == []

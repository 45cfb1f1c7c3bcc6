"""Files that are saved continuously are distinguished from files that a user edits."""

from __future__ import annotations

from meshgate.code_sync.busy_files import SAVES, WINDOW, BusyFiles


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(files: BusyFiles, clock: Clock, path: str, *, saves: int, interval: float) -> list[str]:
    found = []
    for _ in range(saves):
        clock.now += interval
        found += files.record_saves([path])
    return found


def test_a_file_becomes_busy_once_after_many_saves_within_the_window() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    interval = WINDOW / (2 * SAVES)
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=interval) == []
    assert record(files, clock, "train.log", saves=1, interval=interval) == ["train.log"]
    assert record(files, clock, "train.log", saves=2 * SAVES, interval=interval) == []
    assert files.contains_all(["train.log"])
    assert not files.contains_all(["train.log", "model.py"])
    assert not files.contains_all([])


def test_the_window_slides() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    interval = WINDOW / (SAVES - 1)  # the first of SAVES saves is just outside the window of the last
    assert record(files, clock, "train.log", saves=10 * SAVES, interval=interval) == []
    assert record(files, clock, "other.log", saves=SAVES, interval=interval * 0.99) == ["other.log"]


def test_a_pause_starts_the_count_again() -> None:
    clock = Clock()
    files = BusyFiles(clock)
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=0.1) == []
    clock.now += WINDOW
    assert record(files, clock, "train.log", saves=SAVES - 1, interval=0.1) == []
    assert record(files, clock, "train.log", saves=1, interval=0.1) == ["train.log"]


def test_a_file_that_is_edited_for_hours_is_not_busy() -> None:
    clock = Clock()
    assert record(BusyFiles(clock), clock, "model.py", saves=10 * SAVES, interval=1.0) == []

"""The ends of log files in messages."""

from __future__ import annotations

from pathlib import Path

from meshgate_slurm.logs import last_lines, read_end


def test_the_last_lines_of_a_long_file_are_shown_below_a_title(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(5000)))
    title, *lines = last_lines(read_end(log), "the worker on n1").strip().splitlines()
    assert title == "The last lines of the worker on n1:"
    assert lines == [f"  line {number}" for number in range(4988, 5000)]


def test_a_file_that_is_missing_or_empty_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert last_lines(read_end(tmp_path / "missing") + read_end(tmp_path / "empty"), "the gateway") == ""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.output import OutputPrinter, Screen, fold, label
from meshgate_wire.messages import OutputLine


def line(text: str, *ranks: int, **given: Any) -> OutputLine:
    given = {"stream": "stdout", "mesh": "trainers", "count": max(len(ranks), 1), **given}
    return OutputLine(text=text, ranks=ranks, **given)


def shown(lines: list[OutputLine]) -> list[tuple[str, int]]:
    return [(line.text, line.count) for line in lines]


def test_identical_lines_of_several_ranks_become_one() -> None:
    assert shown(fold([line("a", 0), line("a", 1), line("a", 2)])) == [("a", 3)]


def test_the_same_rank_printing_the_same_twice_stays_two_lines() -> None:
    assert shown(fold([line("a", 0), line("a", 0)])) == [("a", 1), ("a", 1)]


def test_each_rank_keeps_its_order() -> None:
    lines = [line("a", 0), line("b", 0), line("b", 1), line("a", 1)]
    assert shown(fold(lines)) == [("a", 1), ("b", 2), ("a", 1)]


def test_lines_of_different_meshes_or_streams_are_not_merged() -> None:
    lines = [line("a", 0), line("a", 0, mesh="other"), line("a", 1, stream="stderr")]
    assert shown(fold(lines)) == [("a", 1), ("a", 1), ("a", 1)]


def test_lines_that_the_gateway_folded_are_folded_further() -> None:
    assert shown(fold([line("a", 0, 1, count=2), line("a", 2, 3, count=2)])) == [("a", 4)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=30))
def test_folding_loses_nothing_and_reorders_no_rank(printed: list[tuple[str, int]]) -> None:
    folded = fold([line(text, rank) for text, rank in printed])
    for rank in range(4):
        before = [text for text, printer in printed if printer == rank]
        assert [each.text for each in folded if rank in each.ranks] == before


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (line("x", 3, host="workers-0"), "[workers-0 trainers rank 3]"),
        (line("x", *range(8)), "[trainers 8 ranks]"),
        (line("x", 0, 1, host="workers-0"), "[workers-0 trainers 2 ranks]"),
        (line("x", host="workers-0", mesh=""), "[workers-0]"),
    ],
)
def test_the_label_says_who_printed_it(printed: OutputLine, expected: str) -> None:
    assert label(printed) == expected


def test_lines_end_in_a_newline_whatever_their_end_was() -> None:
    screen = Screen(terminal=False)
    assert screen.show(line("done", 0)) == "[trainers rank 0] done\n"
    assert screen.show(line("part", 0, end="")) == "[trainers rank 0] part\n"


def test_progress_is_rewritten_in_place_on_a_terminal() -> None:
    screen = Screen(terminal=True, columns=80)
    assert screen.show(line("10%", 0, end="\r")) == "\r[trainers rank 0] 10%\x1b[K"
    assert screen.show(line("20%", 0, end="\r")) == "\r[trainers rank 0] 20%\x1b[K"
    assert screen.show(line("100%", 0)) == "\r[trainers rank 0] 100%\x1b[K\n"
    assert screen.show(line("next", 0)) == "[trainers rank 0] next\n"
    assert screen.finish() == ""


def test_progress_never_wraps_on_a_terminal() -> None:
    screen = Screen(terminal=True, columns=20)
    assert screen.show(line("x" * 100, 0, end="\r")) == "\r[trainers rank 0] x\x1b[K"


def test_a_file_keeps_every_progress_line() -> None:
    screen = Screen(terminal=False)
    written = "".join(
        screen.show(each) for each in (line("10%", 0, end="\r"), line("20%", 0, end="\r"), line("end", 0))
    )
    assert written == "\r[trainers rank 0] 10%\r[trainers rank 0] 20%\n[trainers rank 0] end\n"


def test_the_cursor_is_left_at_the_start_of_a_line() -> None:
    screen = Screen(terminal=True)
    screen.show(line("10%", 0, end="\r"))
    assert screen.finish() == "\n"
    assert screen.finish() == ""


def test_each_stream_goes_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    printer = OutputPrinter()
    printed = threading.Event()
    printer.put([line("a", 0), line("a", 1), line("oops", 0, stream="stderr")], printed.set)
    printer.close(timeout=10)
    assert printed.is_set()
    assert out.getvalue() == "[trainers 2 ranks] a\n"
    assert err.getvalue() == "[trainers rank 0] oops\n"


def test_the_streams_of_the_moment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [io.StringIO(), io.StringIO()]
    printer = OutputPrinter()
    for cell in cells:
        monkeypatch.setattr(sys, "stdout", cell)
        printed = threading.Event()
        printer.put([line("a", 0)], printed.set)
        assert printed.wait(10)
    printer.close(timeout=10)
    assert [cell.getvalue() for cell in cells] == ["[trainers rank 0] a\n"] * 2


def test_a_closed_terminal_ends_the_printing_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    printer = OutputPrinter()
    credited = [threading.Event(), threading.Event()]
    for event in credited:
        printer.put([line("a", 0)], event.set)
    printer.close(timeout=10)
    assert all(event.is_set() for event in credited)

"""What is shown of printed lines, on a terminal as a small emulator displays it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.session.output.screen import MAX_RANKS_KEPT, Screen, fold, fold_bars, label
from meshgate_wire.messages import OutputLine


def line(text: str, *ranks: int, **fields: Any) -> OutputLine:
    fields = {"stream": "stdout", "mesh": "trainers", "count": max(len(ranks), 1), **fields}
    return OutputLine(text=text, ranks=ranks, **fields)


def bar(text: str, *ranks: int) -> OutputLine:
    return line(text, *ranks, end="\r")


class Emulator:
    """A terminal of unlimited length."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for count, command, character in re.findall(r"\x1b\[(\d*)([ABJ])|(.|\n|\r)", text):
            if command == "A":
                self.row = max(self.row - int(count), 0)
            elif command == "B":
                self.row = min(self.row + int(count), len(self.rows) - 1)
            elif command == "J":
                self.rows = [*self.rows[: self.row], self.rows[self.row][: self.column]]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            else:
                kept = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = kept[: self.column] + character + kept[self.column + 1 :]
                self.column += 1


def displayed(*batches: list[OutputLine], **size: int) -> list[str]:
    screen, terminal = Screen("terminal", **size), Emulator()
    for batch in batches:
        terminal.write(screen.show(batch))
    return terminal.rows


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
def test_the_label_names_the_source(printed: OutputLine, expected: str) -> None:
    assert label(printed) == expected


def test_ordinary_lines_end_in_a_newline() -> None:
    screen = Screen("file")
    assert screen.show([line("done", 0)]) == "[trainers rank 0] done\n"
    assert screen.show([line("part", 0, end="")]) == "[trainers rank 0] part\n"


def test_each_rank_has_one_updating_row() -> None:
    assert displayed([bar("10%", 0), bar("30%", 1)], [bar("20%", 0)]) == [
        "",
        "[trainers rank 0] 20%",
        "[trainers rank 1] 30%",
    ]


def test_ranks_with_equal_rows_share_one() -> None:
    assert displayed([bar("10%", 0, 1, 2)], [bar("20%", 1)]) == ["", "[trainers 2 ranks] 10%", "[trainers rank 1] 20%"]


def test_an_empty_refresh_keeps_the_row() -> None:
    assert displayed([bar("10%", 0)], [bar("", 0)])[1] == "[trainers rank 0] 10%"


def test_ordinary_lines_are_above_the_rows() -> None:
    rows = displayed([bar("10%", 0)], [line("a", 1)], [bar("20%", 0), line("b", 1)])
    assert rows == ["[trainers rank 1] a", "[trainers rank 1] b", "", "[trainers rank 0] 20%"]


def test_the_last_refresh_ends_the_row() -> None:
    assert displayed([bar("10%", 0), bar("", 0)], [line("100%", 0)]) == ["[trainers rank 0] 100%", ""]


def test_what_the_program_prints_meanwhile_is_not_erased() -> None:
    screen, terminal = Screen("terminal"), Emulator()
    terminal.write(screen.show([bar("10%", 0), bar("10%", 1), bar("30%", 2)]))
    terminal.write("mine\n")
    terminal.write(screen.show([bar("20%", 0)]))
    assert "mine" in terminal.rows
    terminal.write(screen.show([line("a", 3)]))
    assert "mine" in terminal.rows


def test_rows_never_wrap() -> None:
    assert displayed([bar("x" * 100, 0)], columns=20)[1] == "[trainers rank 0] x"
    assert displayed([bar("進" * 100, 0)], columns=22)[1] == "[trainers rank 0] 進"


def test_rows_leave_room_on_the_terminal() -> None:
    rows = displayed([bar(f"step of {'x' * rank}", rank) for rank in range(64)], rows=6)
    assert [row[:25].rstrip("x ") for row in rows[1:]] == [
        *(f"[trainers rank {rank}] step of" for rank in range(3)),
        "… and 61 more",
    ]


def test_a_line_of_more_ranks_than_it_names_has_a_row() -> None:
    assert displayed([line("10%", 0, 1, count=1024, end="\r")])[1] == "[trainers 1024 ranks] 10%"


def test_a_notebook_rewrites_one_line() -> None:
    screen = Screen("notebook")
    assert screen.show([bar("", 0), bar("10% slow", 0)]) == "\r[trainers rank 0] 10% slow"
    assert screen.show([bar("20%", 0)]) == "\r[trainers rank 0] 20%     "
    assert screen.show([line("a", 1)]) == "\r[trainers rank 1] a  \n[trainers rank 0] 20%"
    assert screen.show([bar("99%", 0), line("100%", 0)]) == "\r[trainers rank 0] 100%\n"
    assert screen.show([line("next", 0)]) == "[trainers rank 0] next\n"


def test_a_notebook_shows_a_few_bars_in_its_line() -> None:
    screen = Screen("notebook")
    assert screen.show([bar("10%", 0), bar("30%", 1)]) == "\r[trainers rank 0] 10% · [trainers rank 1] 30%"
    assert screen.show([bar("a", 2), bar("b", 3)]).endswith("[trainers rank 1] 30% · … and 2 more")
    assert screen.show([bar(" ", rank) for rank in range(4)]).strip() == ""


def test_a_file_gets_the_last_state_of_each_bar() -> None:
    screen = Screen("file")
    written = screen.show([bar("10%", 0), bar("2%", 0), bar("5%", 1), line("end", 0)])
    assert written == "[trainers rank 0] end\n"
    assert screen.show([bar("6%", 1)]) == ""
    assert screen.finish() == "[trainers rank 1] 6%\n"
    assert screen.finish() == ""


TQDM = "{}: {:3}%|{:<10}| {}/100 [00:0{}<00:09, {}it/s]"


def tqdm(rank: int, percent: int, name: str = "step") -> OutputLine:
    return bar(TQDM.format(name, percent, "█" * (percent // 10) + "▌", percent, rank, rank or "?"), rank)


def test_bars_of_many_ranks_that_differ_in_numbers_share_a_row_with_their_range() -> None:
    rows = displayed([tqdm(rank, 45 + rank) for rank in range(8)])
    assert rows == ["", "[trainers 8 ranks] step:  45–52%|████▌     | 45/100 [00:00<00:09, ?it/s]"]  # noqa: RUF001
    assert displayed([tqdm(rank, 45) for rank in range(8)])[1].startswith("[trainers 8 ranks] step:  45%|")


def test_bars_of_ranks_that_do_not_fit_into_the_line_of_a_notebook_share_it() -> None:
    screen = Screen("notebook")
    assert screen.show([tqdm(rank, 45) for rank in range(3)]).count("step") == 3
    assert screen.show([tqdm(rank, 50 + rank) for rank in range(4)]).startswith("\r[trainers 4 ranks] step:  50–53%|")  # noqa: RUF001


def test_bars_that_share_a_row_are_counted_once_each_and_name_no_host_but_a_common_one() -> None:
    one, other = tqdm(0, 45), tqdm(1, 46)
    hosts = [line.model_copy(update={"host": f"w-{at % 2}"}) for at, line in enumerate([one, other] * 3)]
    (folded,) = fold_bars(hosts)
    assert (folded.ranks, folded.count, folded.host) == ((0, 1), 6, "")
    (folded,) = fold_bars([line.model_copy(update={"host": "w-0"}) for line in hosts])
    assert folded.host == "w-0"


def test_bars_of_many_ranks_are_merged_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    copy = OutputLine.model_copy
    bars = [tqdm(rank, rank % 100) for rank in range(1024)]
    monkeypatch.setattr(OutputLine, "model_copy", lambda line, **fields: copies.append(line) or copy(line, **fields))
    (folded,) = fold_bars(bars)
    assert (folded.ranks, folded.count) == (tuple(range(MAX_RANKS_KEPT)), 1024)
    assert len(copies) == 1


def test_bars_of_few_ranks_and_different_bars_have_rows_of_their_own() -> None:
    assert len(displayed([tqdm(rank, 45 + rank) for rank in range(4)])) == 5
    rows = displayed([tqdm(rank, 45 + rank, "train" if rank < 5 else "test") for rank in range(10)])
    assert [row.partition("%")[0] for row in rows[1:]] == [
        "[trainers 5 ranks] train:  45–49",  # noqa: RUF001
        "[trainers 5 ranks] test:  50–54",  # noqa: RUF001
    ]


def test_the_bars_of_a_rank_below_one_another_have_a_row_each() -> None:
    assert displayed([bar("10% outer\n50% inner", 0)]) == [
        "",
        "[trainers rank 0] 10% outer",
        "[trainers rank 0] 50% inner",
    ]


def test_a_bar_that_was_erased_has_no_row() -> None:
    assert displayed([bar("10%", 0)], [bar(" ", 0)]) == [""]


def test_a_line_on_stdout_leaves_a_bar_on_stderr() -> None:
    assert displayed([line("10%", 0, end="\r", stream="stderr")], [line("a", 0)])[-1] == "[trainers rank 0] 10%"


@pytest.mark.parametrize("kind", ["terminal", "notebook", "file"])
def test_the_cursor_is_left_at_the_start_of_a_line(kind: Any) -> None:
    screen, terminal = Screen(kind), Emulator()
    terminal.write(screen.show([bar("10%", 0), bar("20%", 1)]))
    terminal.write(screen.finish())
    assert (terminal.column, terminal.rows[terminal.row]) == (0, "")
    assert screen.finish() == ""

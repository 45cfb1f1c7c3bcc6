"""Values of many ranks side by side, as text and as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.shapes.value_table import MOST_TEXT, are_plain, text_table, value_table


def text(values: Sequence[object], most: int = 20) -> list[str]:
    return text_table(["ranks"], [len(values)], values.__getitem__, most).splitlines()


def html_rows(html: str) -> list[list[str]]:
    return [re.findall(r">([^<]*)</t[hd]>", row) for row in html.split("</tr>")[:-1]]


def read_but(unreadable: int, values: Sequence[object]) -> Callable[[int], object]:
    def read(rank: int) -> object:
        if rank == unreadable:
            raise ImportError("no module named 'trainer'")
        return values[rank]

    return read


def test_dictionaries_have_a_row_for_each_rank_and_a_column_for_each_key() -> None:
    values = [{"loss": 0.25, "host": "node-1"}, {"loss": 12.5, "host": "n2", "step": 7}]
    assert text(values) == [
        "rank  loss  host    step",
        "   0  0.25  node-1",
        "   1  12.5  n2         7",
    ]
    assert html_rows(value_table(["ranks"], [2], values.__getitem__)) == [
        ["rank", "loss", "host", "step"],
        ["0", "0.25", "node-1", ""],
        ["1", "12.5", "n2", "7"],
    ]


def test_scalars_are_one_column() -> None:
    assert text([1, 23, None]) == ["rank  value", "   0      1", "   1     23", "   2   None"]
    assert text([True, "a b"]) == ["rank  value", "   0  True", "   1  a b"]
    assert text([np.float32(0.5), np.int64(7), np.array(2)]) == [
        "rank  value",
        "   0    0.5",
        "   1      7",
        "   2      2",
    ]


def test_several_dimensions_have_a_column_each() -> None:
    shown = text_table(["hosts", "gpus"], [2, 2], lambda rank: {"x": rank}).splitlines()
    assert shown == ["rank  hosts  gpus  x", *(f"   {n}      {n // 2}     {n % 2}  {n}" for n in range(4))]
    rows = html_rows(value_table(["hosts", "gpus"], [2, 2], lambda rank: {"x": rank}))
    assert rows == [["rank", "hosts", "gpus", "x"], *([str(n), str(n // 2), str(n % 2), str(n)] for n in range(4))]


def test_of_many_ranks_the_first_and_the_last_are_read_and_shown() -> None:
    read: list[int] = []

    def value(rank: int) -> object:
        read.append(rank)
        return {"x": rank}

    assert text_table(["ranks"], [1000], value, 5).splitlines() == [
        "rank    x",
        "   0    0",
        "   1    1",
        "   2    2",
        "… 995 more",
        " 998  998",
        " 999  999",
    ]
    assert read == [0, 1, 2, 998, 999]
    assert text([0, 1], most=1) == ["rank  value", "   0      0", "… 1 more"]


@given(st.integers(0, 30), st.integers(1, 30))
def test_each_rank_is_shown_or_counted(count: int, most: int) -> None:
    lines = text(range(count), most)[1:]
    hidden = sum(int(found[1]) for line in lines if (found := re.match(r"… (\d+) more", line)))
    ranks = [int(line.split()[0]) for line in lines if "more" not in line]
    assert ranks == sorted(set(ranks))
    assert len(ranks) == min(count, most)
    assert len(ranks) + hidden == count


def test_long_values_are_cut_and_a_value_takes_one_line() -> None:
    (_, long), (_, lines) = text(["x" * 1000]), text(["two\nlines\x1b[2J"])
    assert long == f"   0  {'x' * (MOST_TEXT - 1)}…"
    assert lines == "   0  two\\nlines\\x1b[2J"
    assert text([np.eye(2)])[1] == "   0  array([[1., 0.], [0., 1.]])"


def test_more_keys_than_columns_are_counted() -> None:
    wide = [{f"key{n}": n for n in range(40)}]
    assert text(wide)[0].split()[-1] == "key31"
    assert text(wide)[-1] == "and 8 more columns"
    assert value_table(["ranks"], [1], wide.__getitem__).endswith("<div>and 8 more columns</div>")


def test_a_value_that_cannot_be_read_leaves_the_others() -> None:
    values = [{"x": 1, "y": 2}] * 2
    assert text_table(["ranks"], [2], read_but(1, values)).splitlines()[1:] == [
        "   0  1                                         2",
        "   1  ✕ ImportError: no module named 'trainer'",
    ]
    assert "✕ ImportError: no module named" in value_table(["ranks"], [2], read_but(1, [1, 1]))
    assert "✕ ImportError: no module named" in value_table(["hosts", "gpus"], [1, 2], read_but(1, [1, 1]))


def test_two_dimensions_of_other_values_become_rows_and_columns() -> None:
    html = value_table(["hosts", "gpus"], [2, 3], lambda rank: rank)
    assert html_rows(html) == [["hosts \\ gpus", "0", "1", "2"], ["0", "0", "1", "2"], ["1", "3", "4", "5"]]
    assert "and 1744 more" in value_table(["hosts", "gpus"], [250, 8], lambda rank: rank)


@pytest.mark.parametrize(
    ("sizes", "places"), [([], [["0"]]), ([3], [["0"], ["1"], ["2"]]), ([2, 1, 1], [["0"] * 4, ["1", "1", "0", "0"]])]
)
def test_other_shapes_have_a_row_for_each_rank(sizes: list[int], places: list[list[str]]) -> None:
    header, *rows = html_rows(value_table(["a", "b", "c"][: len(sizes)], sizes, lambda rank: f"value {rank}"))
    assert header == ["rank", *(["a", "b", "c"] if len(sizes) > 1 else []), "value"]
    assert rows == [[*place, f"value {rank}"] for rank, place in enumerate(places)]


def test_html_shows_the_first_and_the_last_of_many_ranks() -> None:
    read: list[int] = []
    rows = html_rows(value_table(["ranks"], [1000], read.append))
    assert read == [*range(128), *range(872, 1000)]
    assert rows[129] == ["… 744 more", ""]


def test_html_is_escaped() -> None:
    assert "<script" not in value_table(["<script>"], [1], lambda rank: {"<script>": "<script>"})


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ([1, "a", None], True),
        ([{"x": 1}, {"y": [1]}], True),
        ([np.float32(1)], True),
        ([[1]], False),
        ([np.eye(2)], False),
    ],
)
def test_plain_values_are_scalars_and_dictionaries(values: list[object], plain: bool) -> None:
    assert are_plain(len(values), values.__getitem__) is plain

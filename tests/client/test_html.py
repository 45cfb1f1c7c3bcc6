from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from meshgate.html import Rank, card, rank_grid, repr_of, value_table


def text_of(html: str) -> str:
    return " ".join(ElementTree.fromstring(f"<div>{html}</div>").itertext())


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_everything_is_escaped() -> None:
    evil = "<script>alert('x')</script>\"&"
    html = (
        card(evil, {evil: evil})
        + rank_grid([1], [Rank(0, evil)], 1)
        + value_table([evil, evil], [1, 1], lambda rank: evil)
    )
    assert "<script" not in html
    root = ElementTree.fromstring(f"<div>{html}</div>")
    assert evil in "".join(root.itertext())
    assert [span.get("title") for span in root.iter("span")] == [evil]


def test_empty_facts_are_left_out() -> None:
    assert text_of(card("title", {"a": "1", "b": ""})) == "title a: 1"


def test_states_are_more_than_colors() -> None:
    assert "✕3" in text_of(rank_grid([4], [Rank(2), Rank(3, "died", "lost")], 4))


def test_a_large_grid_says_what_it_leaves_out() -> None:
    html = rank_grid([128, 8], [Rank(number) for number in range(256)], 1024)
    assert "repeat(8," in html
    assert "and 768 more" in html


def test_two_dimensions_become_rows_and_columns() -> None:
    html = value_table(["hosts", "gpus"], [2, 3], lambda rank: rank)
    rows = [re.findall(r">([^<]*)</t[hd]>", row) for row in html.split("</tr>")[:-1]]
    assert rows == [["hosts \\ gpus", "0", "1", "2"], ["0", "0", "1", "2"], ["1", "3", "4", "5"]]


@pytest.mark.parametrize(("sizes", "rows"), [([], ["0"]), ([3], ["0", "1", "2"]), ([2, 1, 2], ["0, 0, 0", "0, 0, 1"])])
def test_other_shapes_have_a_row_for_each_rank(sizes: list[int], rows: list[str]) -> None:
    html = value_table(["a", "b", "c"][: len(sizes)], sizes, lambda rank: f"value {rank}")
    found = re.findall(r"<tr><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", html)
    assert [where for where, _ in found][: len(rows)] == rows
    assert found[-1][1] == repr_of(f"value {len(found) - 1}").replace("'", "&#x27;")


def test_only_values_that_are_shown_are_read() -> None:
    read: list[int] = []
    html = value_table(["ranks"], [1000], read.append)
    assert len(read) == 256
    assert "and 744 more" in html


def test_a_value_that_cannot_be_read_leaves_the_others() -> None:
    def read(rank: int) -> object:
        if rank:
            raise ImportError("no module named 'trainer'")
        return BadRepr()

    text = text_of(value_table(["ranks"], [2], read))
    assert "its repr raised RuntimeError: no repr" in text
    assert "✕ ImportError: no module named" in text


def test_long_values_are_shortened() -> None:
    assert len(repr_of("x" * 10_000)) == 201

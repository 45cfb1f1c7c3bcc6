from __future__ import annotations

from xml.etree import ElementTree

from meshgate.html import Rank, card, html_table, rank_grid, repr_of


def text_of(html: str) -> str:
    return " ".join(ElementTree.fromstring(f"<div>{html}</div>").itertext())


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_everything_is_escaped() -> None:
    evil = "<script>alert('x')</script>\"&"
    html = card(evil, {evil: evil}) + rank_grid([1], [Rank(0, evil)], 1) + html_table([evil], [[evil]])
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


def test_long_values_are_shortened() -> None:
    assert len(repr_of("x" * 10_000)) == 201


def test_a_value_whose_repr_fails_is_shown_with_the_error() -> None:
    assert "its repr raised RuntimeError: no repr" in repr_of(BadRepr())

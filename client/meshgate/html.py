"""Small pieces of HTML for notebooks: cards, grids of ranks and tables.

Pure: values in, text out. Everything is escaped, nothing is loaded from elsewhere, and colors derive from those of the
page, so that they fit dark and light themes. States are also words or signs, never only colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

MOST_RANKS = 256
MOST_COLUMNS = 32
MOST_VALUE = 200  # characters of a value

State: TypeAlias = Literal["up", "lost", "unknown"]
_COLORS: Mapping[State, str] = {"up": "#2da44e", "lost": "#d1242f", "unknown": "#8c959f"}
_SIGNS: Mapping[State, str] = {"up": "", "lost": "✕", "unknown": ""}
_LINE = "1px solid rgba(127,127,127,.35)"
_CELL = f"padding:2px 8px;text-align:left;border:{_LINE};font-family:monospace;white-space:pre-wrap"


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank in a grid. ``about`` is shown when the pointer is on it."""

    number: int
    about: str = ""
    state: State = "up"


def card(title: str, facts: Mapping[str, str], body: Iterable[str] = ()) -> str:
    """A titled block of facts, without the empty ones. ``body`` is HTML."""
    lines = "".join(f"<div>{escape(name)}: {escape(value)}</div>" for name, value in facts.items() if value)
    return (
        f'<div style="border:{_LINE};border-radius:6px;padding:6px 10px;margin:2px 0;display:inline-block">'
        f"<div><b>{escape(title)}</b></div>{lines}{''.join(body)}</div>"
    )


def rank_grid(sizes: Sequence[int], ranks: Sequence[Rank], total: int) -> str:
    """``ranks``, which are the first of ``total``, in rows as long as the last dimension."""
    columns = min(sizes[-1] if len(sizes) > 1 else MOST_COLUMNS, MOST_COLUMNS)
    boxes = "".join(
        f'<span title="{escape(rank.about)}" style="background:{_COLORS[rank.state]};color:#fff;border-radius:3px;'
        f'padding:0 5px;text-align:center">{_SIGNS[rank.state]}{rank.number}</span>'
        for rank in ranks
    )
    grid = (
        f'<div style="display:grid;grid-template-columns:repeat({columns},max-content);gap:2px;margin-top:4px;'
        f'font-size:smaller">{boxes}</div>'
    )
    more = total - len(ranks)
    return grid + (f"<div>and {more} more</div>" if more else "")


def html_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join(_row(row) for row in rows)
    return f'<table style="border-collapse:collapse">{_row(header, "th")}{body}</table>'


def repr_of(value: object) -> str:
    """``repr``, shortened to 200 characters; or the error that it raises."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - of a user's class; shown in its place
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}: {error}>"
    return text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]}…"


def _row(cells: Iterable[str], tag: str = "td") -> str:
    row = "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"

"""The values of many ranks side by side, as a table of text or of HTML.

Pure: values in, text out. Dictionaries have one column for each key, anything else has one. Of many ranks the first and
the last are shown, and only values that are shown are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshgate.html import MOST_COLUMNS, MOST_RANKS, MOST_VALUE, html_table, repr_of

MOST_ROWS = 20  # of a table of text
MOST_TEXT = 40  # characters of a value in it
Read: TypeAlias = Callable[[int], object]
_Cell: TypeAlias = tuple[str, bool]  # whether it may be in a column of numbers
_BLANK: _Cell = ("", True)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """In place of a value: why it cannot be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Table:
    """``hidden`` ranks are left out before the row at ``gap``, and ``keys_left_out`` keys of dictionaries."""

    header: list[str]
    rows: list[list[_Cell]]
    gap: int
    hidden: int
    keys_left_out: int


def text_table(labels: Sequence[str], sizes: Sequence[int], read: Read, most: int = MOST_ROWS) -> str:
    """A line for each rank, of which at most ``most`` are shown. Numbers are aligned on the right."""
    table = _table(labels, sizes, read, most, MOST_TEXT)
    lines = [table.header, *([text for text, _ in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [all(number for _, number in column) for column in zip(*table.rows, strict=True)] or [True] * len(widths)
    shown = [
        "  ".join(text.rjust(width) if number else text.ljust(width) for text, width, number in zip(*each, strict=True))
        for each in ((line, widths, right) for line in lines)
    ]
    if table.hidden:
        shown.insert(table.gap + 1, f"… {table.hidden} more")
    if table.keys_left_out:
        shown.append(f"and {table.keys_left_out} more columns")
    return "\n".join(line.rstrip() for line in shown)


def value_table(labels: Sequence[str], sizes: Sequence[int], read: Read) -> str:
    """The HTML of the values by rank. In two dimensions, values other than dictionaries have a row for each index of
    the first, and a column for each of the last."""
    if len(sizes) == 2 and 0 < sizes[1] <= MOST_COLUMNS and not (sizes[0] and isinstance(_read(read, 0), Mapping)):
        return _grid(labels, sizes, read)
    table = _table(labels, sizes, read, MOST_RANKS, MOST_VALUE)
    rows = [[text for text, _ in row] for row in table.rows]
    if table.hidden:
        rows.insert(table.gap, [f"… {table.hidden} more", *[""] * (len(table.header) - 1)])
    more = f"<div>and {table.keys_left_out} more columns</div>" if table.keys_left_out else ""
    return html_table(table.header, rows) + more


def are_plain(count: int, read: Read) -> bool:
    """Whether the values that a table shows are scalars, or dictionaries."""
    values = [_read(read, rank) for rank in _chosen(count, MOST_ROWS)]
    return all(isinstance(value, (Mapping, _Unreadable)) or _is_scalar(value) for value in values)


def _table(labels: Sequence[str], sizes: Sequence[int], read: Read, most: int, longest: int) -> _Table:
    count = math.prod(sizes)
    ranks = _chosen(count, most)
    values = [_read(read, rank) for rank in ranks]
    keys = _keys(values)
    dimensions = list(labels) if len(labels) > 1 else []
    rows = []
    for rank, value in zip(ranks, values, strict=True):
        indices = _coordinates(rank, sizes) if dimensions else []
        place: list[_Cell] = [(str(number), True) for number in (rank, *indices)]
        rows.append([*place, *_cells(value, keys[:MOST_COLUMNS], longest)])
    header = ["rank", *dimensions, *([_text(key, longest) for key in keys[:MOST_COLUMNS]] or ["value"])]
    hidden = count - len(ranks)
    return _Table(header, rows, (len(ranks) + 1) // 2, hidden, max(len(keys) - MOST_COLUMNS, 0))


def _chosen(count: int, most: int) -> list[int]:
    """The first and the last ranks, ``most`` together."""
    if count <= most:
        return list(range(count))
    return [*range((most + 1) // 2), *range(count - most // 2, count)]


def _keys(values: Sequence[object]) -> list[object]:
    """The keys of all dictionaries, in the order in which they first appear; none if there is anything else."""
    if not all(value is None or isinstance(value, (Mapping, _Unreadable)) for value in values):
        return []
    return list(dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value))


def _cells(value: object, keys: Sequence[object], longest: int) -> Iterator[_Cell]:
    if isinstance(value, Mapping) and keys:
        for key in keys:
            yield _cell(value[key], longest) if key in value else _BLANK
    else:
        yield _cell(value, longest)
        yield from [_BLANK] * (len(keys) - 1)


def _cell(value: object, longest: int) -> _Cell:
    if isinstance(value, _Unreadable):
        return _cut(value.reason, longest), False
    if not isinstance(value, (str, bytes)) and _is_scalar(value) and hasattr(value, "item"):  # of numpy, of torch
        value = value.item()
    number = value is None or (isinstance(value, (int, float, complex)) and not isinstance(value, bool))
    return _text(value, longest), number


def _text(value: object, longest: int) -> str:
    """A string as it is, anything else by its repr; on one line, without control characters."""
    text = value if isinstance(value, str) else " ".join(repr_of(value).split())
    return _cut("".join(each if each.isprintable() else repr(each)[1:-1] for each in text[: longest + 1]), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _is_scalar(value: object) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return True
    return getattr(value, "shape", None) == () and callable(getattr(value, "item", None))


def _read(read: Read, rank: int) -> object:
    try:
        return read(rank)
    except Exception as error:  # noqa: BLE001 - of one value; the others can be read
        return _Unreadable(f"✕ {type(error).__name__}: {error}")


def _coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    indices = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        indices.append(index)
    return indices[::-1]


def _grid(labels: Sequence[str], sizes: Sequence[int], read: Read) -> str:
    height, width = sizes
    shown = min(height, max(MOST_RANKS // width, 1))
    rows = []
    for row in range(shown):
        values = [_read(read, row * width + column) for column in range(width)]
        cells = [_cut(v.reason, MOST_VALUE) if isinstance(v, _Unreadable) else repr_of(v) for v in values]
        rows.append([str(row), *cells])
    more = f"<div>and {(height - shown) * width} more</div>" if height > shown else ""
    return html_table([f"{labels[0]} \\ {labels[1]}", *map(str, range(width))], rows) + more

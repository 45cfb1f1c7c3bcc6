"""The layout of printed lines: lines in, the text to write to a terminal, a notebook or a file out.

Pure. On a terminal each rank whose latest line ended in ``\\r``, such as a progress bar, has a row below the ordinary
lines, which is rewritten in place; ranks with equal rows share one, and so do many ranks whose bars differ in numbers
alone. A notebook rewrites one line, and a file gets the last state of each bar.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from meshgate_wire.messages import OutputLine

Kind: TypeAlias = Literal["terminal", "notebook", "file"]

MAX_RANKS_KEPT = 64
MAX_ROWS = 16
MAX_NOTEBOOK_BARS = 3
MAX_SINGLE_BARS = 4  # ranks, on a terminal; the bars of more are folded if they differ in numbers alone
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")
_NUMBER = re.compile(r"\d+(?:[.:,]\d+)*|\?")  # a rate or a time that is not known yet is a question mark
_BLOCKS = re.compile(r"[\u2580-\u259f#=>.\- 0]+")  # what bars are drawn with; tqdm also uses digits
_CLEAR_BELOW = "\x1b[J"


def fold(lines: Iterable[OutputLine]) -> list[OutputLine]:
    """Merges identical lines of different ranks into the first of them.

    The lines of each rank keep their order: a line is merged only into one that follows everything else its ranks
    printed.
    """
    folded: list[OutputLine] = []
    last_of_rank: dict[tuple[str, int], int] = {}
    last_of_text: dict[tuple[str, str, str, str], int] = {}
    for line in lines:
        text = (line.stream, line.mesh, line.text, line.end)
        ranks = [(line.mesh, rank) for rank in line.ranks]
        index = last_of_text.get(text)
        latest = max((last_of_rank.get(rank, -1) for rank in ranks), default=-1)
        if index is None or not ranks or latest >= index:
            index = len(folded)
            folded.append(line)
        else:
            folded[index] = _merge(folded[index], line)
        last_of_text[text] = index
        last_of_rank.update(dict.fromkeys(ranks, index))
    return folded


def _merge(first: OutputLine, second: OutputLine) -> OutputLine:
    ranks = tuple(sorted({*first.ranks, *second.ranks}))[:MAX_RANKS_KEPT]
    return first.model_copy(
        update={
            "ranks": ranks,
            "count": first.count + second.count,
            "host": first.host if first.host == second.host else "",
        }
    )


def label(line: OutputLine) -> str:
    """The source of a line: ``[workers-0 trainers rank 3]``, ``[trainers 8 ranks]``."""
    if line.count > 1:
        ranks = f"{line.count} ranks"
    elif line.ranks:
        ranks = f"rank {line.ranks[0]}"
    else:
        ranks = ""
    return f"[{' '.join(filter(None, (line.host, line.mesh, ranks)))}]"


class Screen:
    """Where lines are shown. ``columns`` and ``rows`` are the size of a terminal, which may change."""

    def __init__(self, kind: Kind, *, columns: int = 80, rows: int = 24) -> None:
        self.kind = kind
        self.columns, self.rows = columns, rows
        self._progress: dict[tuple[str, str, int], OutputLine] = {}  # the latest state of each rank's bars
        self._drawn = 0  # rows of progress on the terminal, below the line of the cursor
        self._written = 0  # length of the progress line that a notebook ends in

    def show(self, lines: Iterable[OutputLine]) -> str:
        """The text to write for ``lines``."""
        ordinary = [text for line in lines if (text := self._update(line)) is not None]
        if self.kind == "terminal":
            return f"{self._erase()}{''.join(ordinary)}{self._draw()}"
        return self._rewritten(ordinary) if self.kind == "notebook" else "".join(ordinary)

    def finish(self) -> str:
        """The text to write last, which leaves the cursor at the start of a line. A file gets the last states."""
        drawn, written = self._drawn, self._written
        last = "".join(f"{row}\n" for row in self._bars()) if self.kind == "file" else ""
        self._progress.clear()
        self._drawn = self._written = 0
        return f"\x1b[{drawn}B\n" if drawn else "\n" if written else last

    def _rewritten(self, ordinary: list[str]) -> str:
        """A notebook's last line is rewritten: first to the ordinary lines, then to the bars below them."""
        texts = [text.removesuffix("\n") for text in ordinary]
        bars = self._bars()
        if len(bars) > MAX_NOTEBOOK_BARS:
            bars = [*bars[: MAX_NOTEBOOK_BARS - 1], f"… and {len(bars) - MAX_NOTEBOOK_BARS + 1} more"]
        bar = " · ".join(bars)
        if not texts:
            written, self._written = self._written, len(bar)
            return f"\r{bar}{' ' * (written - len(bar))}" if bar or written else ""
        if self._written:
            texts[0] = f"\r{texts[0]}{' ' * (self._written - len(texts[0]))}"
        self._written = len(bar)
        return "".join(f"{text}\n" for text in texts) + bar

    def _update(self, line: OutputLine) -> str | None:
        """Takes ``line`` into the bars; returns its text if it is an ordinary line, which ends its ranks' bars."""
        whole = line.count == len(line.ranks)
        keys = [(line.mesh, line.stream, rank) for rank in line.ranks] if whole else [(label(line), line.stream, -1)]
        if line.end != "\r":
            for key in keys:
                self._progress.pop(key, None)
            return f"{label(line)} {line.text}\n"
        for key in keys:
            if not line.text.strip():
                if line.text:  # erased
                    self._progress.pop(key, None)
            else:
                single = {"ranks": (key[2],), "count": 1} if key[2] >= 0 else {}
                self._progress[key] = line.model_copy(update=single)
        return None

    def _bars(self) -> list[str]:
        single = MAX_NOTEBOOK_BARS if self.kind == "notebook" else MAX_SINGLE_BARS
        lines = fold_bars(fold(self._progress.values()), single)
        return [f"{label(line)} {bar}" for line in lines for bar in line.text.split("\n")]

    def _erase(self) -> str:
        return f"\r{_CLEAR_BELOW}" if self._drawn else ""

    def _draw(self) -> str:
        """The rows, below the cursor: what the program itself prints meanwhile is above them and never erased."""
        rows = self._bars()
        most = max(min(self.rows - 2, MAX_ROWS), 1)
        if len(rows) > most:
            rows = [*rows[: most - 1], f"… and {len(rows) - most + 1} more"]
        self._drawn = len(rows)
        text = "".join(f"\n{_fit(row, max(self.columns - 1, 1))}" for row in rows)
        return f"{text}\r\x1b[{len(rows)}A" if rows else ""


def fold_bars(lines: Sequence[OutputLine], single: int = MAX_SINGLE_BARS) -> list[OutputLine]:
    """Merges the bars of more than ``single`` ranks that differ in numbers alone.

    What is shown is the bar that is furthest behind, with the range of percentages: ``[trainers 8 ranks] 45–52%|…``.
    """  # noqa: RUF002 - a range has an en dash
    alike: dict[tuple[str, ...], list[OutputLine]] = {}
    for line in lines:
        kind = (line.text,) if _PERCENT.search(line.text) is None else (_BLOCKS.sub("", _NUMBER.sub("0", line.text)),)
        alike.setdefault((line.stream, line.mesh, *kind), []).append(line)
    folded: list[OutputLine] = []
    for group in alike.values():
        if len(group) == 1 or sum(line.count for line in group) <= single:
            folded += group
        else:
            folded.append(_range(group))
    return folded


def _range(group: list[OutputLine]) -> OutputLine:
    behind, ahead = min(group, key=_percent), max(group, key=_percent)
    least, most = _percent_text(behind), _percent_text(ahead)
    numbers = least if least == most else f"{least}–{most}"  # noqa: RUF001 - a range has an en dash
    return behind.model_copy(
        update={
            "text": _PERCENT.sub(lambda _: f"{numbers}%", behind.text, count=1),
            "ranks": tuple(sorted({rank for line in group for rank in line.ranks}))[:MAX_RANKS_KEPT],
            "count": sum(line.count for line in group),
            "host": behind.host if len({line.host for line in group}) == 1 else "",
        }
    )


def _percent_text(line: OutputLine) -> str:
    found = _PERCENT.search(line.text)
    assert found is not None
    return found[1]


def _percent(line: OutputLine) -> float:
    return float(_percent_text(line))


def _fit(text: str, columns: int) -> str:
    """The beginning of ``text`` that fits into ``columns`` columns."""
    if text.isascii():
        return text[:columns]
    width = 0
    for index, character in enumerate(text):
        width += 2 if unicodedata.east_asian_width(character) in "WF" else not unicodedata.combining(character)
        if width > columns:
            return text[:index]
    return text

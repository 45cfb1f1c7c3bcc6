"""The layout of printed lines: lines in, the text to write to a terminal, a notebook or a file out.

Pure. On a terminal each rank whose latest line ended in ``\\r``, such as a progress bar, has a row below the ordinary
lines, which is rewritten in place; ranks with equal rows share one. A notebook rewrites one line, and a file keeps all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Literal, TypeAlias

from meshgate_wire.messages import OutputLine

__all__ = ["Kind", "Screen", "fold", "label"]

Kind: TypeAlias = Literal["terminal", "notebook", "file"]

MAX_RANKS_KEPT = 64
MAX_ROWS = 16
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
        self._progress: dict[tuple[str, int], OutputLine] = {}  # the latest refresh of each rank
        self._drawn = 0  # rows of progress on the terminal, below the line of the cursor
        self._written = 0  # length of the progress line that a notebook or file ends in
        self._source = ""  # of that line

    def show(self, lines: Iterable[OutputLine]) -> str:
        """The text to write for ``lines``."""
        if self.kind != "terminal":
            return "".join(map(self._appended, lines))
        ordinary = [text for line in lines if (text := self._update(line)) is not None]
        return f"{self._erase()}{''.join(ordinary)}{self._draw()}"

    def finish(self) -> str:
        """The text to write last, which leaves the cursor at the start of a line."""
        drawn, written = self._drawn, self._written
        self._progress.clear()
        self._drawn = self._written = 0
        self._source = ""
        return f"\x1b[{drawn}B\n" if drawn else "\n" if written else ""

    def _appended(self, line: OutputLine) -> str:
        source = label(line)
        text = f"{source} {line.text}"
        if line.end == "\r" and not line.text:  # a bar begins its first line with \r
            return ""
        same = self.kind == "notebook" and source == self._source
        if line.end == "\r" or same:
            padding = " " * (self._written - len(text)) if self.kind == "notebook" else ""
            ended = line.end != "\r"
            self._written, self._source = (0, "") if ended else (len(text), source)
            return f"\r{text}{padding}" + ("\n" if ended else "")
        started = "\n" if self._written else ""
        self._written, self._source = 0, ""
        return f"{started}{text}\n"

    def _update(self, line: OutputLine) -> str | None:
        """Takes ``line`` into the rows; returns its text if it is an ordinary line, which ends its ranks' rows."""
        keys = [(line.mesh, rank) for rank in line.ranks] if line.count == len(line.ranks) else [(label(line), -1)]
        if line.end != "\r":
            for key in keys:
                self._progress.pop(key, None)
            return f"{label(line)} {line.text}\n"
        if line.text:
            for key in keys:
                single = {"ranks": (key[1],), "count": 1} if key[1] >= 0 else {}
                self._progress[key] = line.model_copy(update=single)
        return None

    def _erase(self) -> str:
        return f"\r{_CLEAR_BELOW}" if self._drawn else ""

    def _draw(self) -> str:
        """The rows, below the cursor: what the program itself prints meanwhile is above them and never erased."""
        rows = [f"{label(line)} {line.text}" for line in fold(self._progress.values())]
        most = max(min(self.rows - 2, MAX_ROWS), 1)
        if len(rows) > most:
            rows = [*rows[: most - 1], f"… and {len(rows) - most + 1} more"]
        self._drawn = len(rows)
        text = "".join(f"\n{_fit(row, max(self.columns - 1, 1))}" for row in rows)
        return f"{text}\r\x1b[{len(rows)}A" if rows else ""


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

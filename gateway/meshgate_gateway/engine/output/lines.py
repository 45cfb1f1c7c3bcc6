"""Turns what worker processes print into labelled, folded lines. Pure: bytes in, ``OutputLine`` out.

A line ends at ``\\n``; the states of a progress bar have the end ``\\r``. A line that many ranks print at about
the same time becomes one line with a count.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from meshgate_wire.fields import spans_of
from meshgate_wire.messages import MAX_SPANS, OutputLine

MAX_LINE = 65_536  # bytes
MAX_MESSAGE = 512 * 1024  # bytes, estimated
MAX_RANKS_NAMED = 64
MAX_BARS = 16  # rows of progress bars below one another
CURSOR_UP = b"\x1b[A"
_CONTROL = re.compile(rb"\r\n|\n|\r|\x1b\[A")
_STARTS = (b"\x1b[", b"\x1b", b"\r")  # which more may follow
LineEnd = Literal["\n", "\r", ""]


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line of one rank."""

    stream: Literal["stdout", "stderr"]
    mesh: str
    rank: int
    host: str
    text: str
    end: LineEnd
    procs: int = 0  # object number of the process's mesh


@dataclass(slots=True)
class LineSplitter:
    """Splits a byte stream into lines; ``\\r\\n`` is one line end. Bytes of an unfinished line wait for the next.

    What follows a ``\\r`` is a progress bar: its states are returned with the end ``\\r``, until its line ends. Bars
    below one another, which a program reaches with ``\\n`` and leaves with the escape sequence of cursor-up, as tqdm
    does, are one state of several rows. So the line of a bar that ends is kept until what follows shows that the cursor
    stays below.
    """

    _rows: list[bytearray] = field(default_factory=lambda: [bytearray()])
    _at: int = 0  # the row of the cursor
    _bars: set[int] = field(default_factory=set)  # the rows that a \r has begun again
    _over: set[int] = field(default_factory=set)  # of them, those that the next text overwrites
    _shown: str = ""  # the state of the bars that was returned last
    _held: bytes = b""  # the beginning of a control sequence

    def feed(self, data: bytes) -> list[tuple[str, LineEnd]]:
        data = self._held + data
        held = next((len(start) for start in _STARTS if data.endswith(start)), 0)
        end = len(data) - held
        self._held = data[end:]
        lines: list[tuple[str, LineEnd]] = []
        start = 0
        for control in _CONTROL.finditer(data, 0, end):
            self._write(data[start : control.start()], lines)
            start = control.end()
            if control.group() == b"\r":
                self._restart(lines)
            elif control.group() == CURSOR_UP:
                self._at = max(self._at - 1, 0)
            else:
                self._end_line(lines, certain=control.group() == b"\r\n")
        self._write(data[start:end], lines)
        return lines

    def flush(self) -> list[tuple[str, LineEnd]]:
        """The unfinished line, when it has waited long enough, or the state of the bars. Lines of bars have ended."""
        lines: list[tuple[str, LineEnd]] = []
        held, self._held = self._held, b""
        if held == b"\r":
            self._restart(lines)
        else:
            self._write(held, lines)
        if self._left_bars:
            self._end_rows(lines, self._at)
        if self._bars:
            self._add_state(lines)
        elif whole := _whole(self._rows[0], len(self._rows[0])):
            lines.append((_text(self._rows[0][:whole]), ""))
            del self._rows[0][:whole]
        return lines

    def end(self) -> list[tuple[str, LineEnd]]:
        """What is left at the end of the stream."""
        lines = self.flush()
        left = [text for row in self._rows if (text := _text(row)).strip()]
        self._rows, self._at, self._bars, self._over, self._shown = [bytearray()], 0, set(), set(), ""
        return [*lines, *((text, "\n") for text in left[:-1]), *((text, "") for text in left[-1:])]

    @property
    def pending(self) -> bool:
        """Whether ``flush`` would return something."""
        if self._held or self._left_bars:
            return True
        if not self._bars:
            return bool(_whole(self._rows[0], len(self._rows[0])))
        state = self._state()
        return bool(state) and state != self._shown

    @property
    def has_bars(self) -> bool:
        return bool(self._bars)

    @property
    def _left_bars(self) -> bool:
        return 0 < self._at == len(self._rows) - 1

    def _write(self, data: bytes, lines: list[tuple[str, LineEnd]]) -> None:
        row = self._rows[self._at]
        if data and self._at in self._over:
            self._over.remove(self._at)
            row.clear()
        row += data
        while len(row) > MAX_LINE:
            whole = _whole(row, MAX_LINE)
            lines.append((_text(row[:whole]), ""))
            del row[:whole]

    def _restart(self, lines: list[tuple[str, LineEnd]]) -> None:
        if self._at in self._over:
            return
        self._add_state(lines)
        self._bars.add(self._at)
        self._over.add(self._at)

    def _end_line(self, lines: list[tuple[str, LineEnd]], *, certain: bool) -> None:
        if self._at + 1 < len(self._rows):
            self._at += 1
        elif self._at in self._bars and not certain and len(self._rows) < MAX_BARS:
            self._rows.append(bytearray())
            self._at += 1
        else:
            self._end_rows(lines, len(self._rows))

    def _end_rows(self, lines: list[tuple[str, LineEnd]], count: int) -> None:
        """The first ``count`` rows are lines that have ended. A bar that was erased leaves none."""
        for index, row in enumerate(self._rows[:count]):
            text = _text(row)
            if text.strip() or index not in self._bars:
                lines.append((text, "\n"))
            elif self._shown.strip():
                lines.append((" ", "\r"))
        self._rows = self._rows[count:] or [bytearray()]
        self._bars = {bar - count for bar in self._bars if bar >= count}
        self._over = {row - count for row in self._over if row >= count}
        self._at, self._shown = max(self._at - count, 0), ""

    def _state(self) -> str:
        texts = [_text(row) for row in self._rows]
        return "\n".join(text for text in texts if text.strip()) or (" " if self._shown.strip() and any(texts) else "")

    def _add_state(self, lines: list[tuple[str, LineEnd]]) -> None:
        state = self._state()
        if state and state != self._shown:
            self._shown = state
            lines.append((state, "\r"))


def _whole(row: bytearray, limit: int) -> int:
    """The most of the first ``limit`` bytes that do not end within a character of UTF-8."""
    for at in range(limit - 1, max(limit - 4, -1), -1):
        if row[at] & 0xC0 != 0x80:  # the first byte of a character, which says how many it has
            length = 4 if row[at] >= 0xF0 else 3 if row[at] >= 0xE0 else 2 if row[at] >= 0xC0 else 1
            return at if at + length > limit else limit
    return limit


def _text(row: bytearray) -> str:
    return row.decode(errors="replace")


def fold(printed: Iterable[PrintedLine]) -> tuple[OutputLine, ...]:
    """Folds equal lines of different ranks into one ``OutputLine``, in the order of their first appearance.

    Lines of one rank keep their order.
    """
    groups: list[list[PrintedLine]] = []
    latest: dict[int, int] = {}  # rank to the index of the group that holds its last line
    open_groups: dict[tuple[str, str, int, str, str], list[int]] = {}
    for line in printed:
        key = (line.stream, line.mesh, line.procs, line.text, line.end)
        after = latest.get(line.rank, -1)
        candidates = open_groups.setdefault(key, [])  # ascending
        place = bisect_right(candidates, after)
        if place == len(candidates):
            candidates.append(len(groups))
            groups.append([])
        index = candidates[place]
        groups[index].append(line)
        latest[line.rank] = index
    return tuple(line for group in groups for line in _lines(group))


def split_into_messages(lines: Sequence[OutputLine]) -> Iterator[tuple[OutputLine, ...]]:
    """Splits ``lines`` into parts that each fit into the header of one message."""
    part: list[OutputLine] = []
    size = 0
    for line in lines:
        length = 6 * len(line.text) + 2048  # JSON encodes a character as at most six
        if part and size + length > MAX_MESSAGE:
            yield tuple(part)
            part, size = [], 0
        part.append(line)
        size += length
    if part:
        yield tuple(part)


def _lines(group: list[PrintedLine]) -> Iterator[OutputLine]:
    """The group as one line, or as several if their ranks take more spans than a line may have."""
    if len(group) == 1:
        yield _line(group[0], (group[0].rank,), (), 1, group[0].host)
        return
    hosts = {line.rank: line.host for line in group}
    ranks = sorted(hosts)
    while ranks:
        named, rest = tuple(ranks[:MAX_RANKS_NAMED]), ranks[MAX_RANKS_NAMED:]
        spans = tuple(islice(spans_of(rest), MAX_SPANS))
        count = len(named) + sum(last - first + 1 for first, last in spans)
        found = {hosts[rank] for rank in ranks[:count]}
        yield _line(group[0], named, spans, count, found.pop() if len(found) == 1 else "")
        ranks = ranks[count:]


def _line(
    first: PrintedLine, named: tuple[int, ...], spans: tuple[tuple[int, int], ...], count: int, host: str
) -> OutputLine:
    return OutputLine(
        stream=first.stream,
        mesh=first.mesh,
        procs=first.procs,
        ranks=named,
        more_ranks=spans,
        count=count,
        host=host,
        text=first.text,
        end=first.end,
    )

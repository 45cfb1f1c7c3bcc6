"""Turns what worker processes print into labelled, folded lines. Pure: bytes in, ``OutputLine`` out.

A line ends at ``\\n`` or at ``\\r`` (a progress bar), whichever comes first. What many ranks print alike within one
folding window is told once, with a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshgate_wire.messages import OutputLine

MAX_LINE = 65_536
MAX_MESSAGE = 512 * 1024
MAX_RANKS_NAMED = 64
End = Literal["\n", "\r", ""]


@dataclass(frozen=True, slots=True)
class Printed:
    """One line of one rank."""

    stream: Literal["stdout", "stderr"]
    mesh: str
    rank: int
    host: str
    text: str
    end: End


@dataclass(slots=True)
class LineSplitter:
    """Cuts a byte stream into lines; ``\\r\\n`` is one line end. Incomplete UTF-8 is kept for the next bytes."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[tuple[str, End]]:
        self._rest += data
        lines: list[tuple[str, End]] = []
        start = 0
        rest = self._rest
        while True:
            newline, carriage = rest.find(b"\n", start), rest.find(b"\r", start)
            if carriage >= 0 and (newline < 0 or carriage < newline):
                if carriage + 1 == len(rest):
                    break  # the next byte tells whether this is \r\n
                cut, skip = carriage, 2 if rest[carriage + 1] == 0x0A else 1
                end: End = "\n" if skip == 2 else "\r"
            elif newline >= 0:
                cut, skip, end = newline, 1, "\n"
            else:
                break
            lines.append((rest[start:cut].decode(errors="replace"), end))
            start = cut + skip
        del rest[:start]
        while len(rest) > MAX_LINE:
            lines.append((rest[:MAX_LINE].decode(errors="replace"), ""))
            del rest[:MAX_LINE]
        return lines

    def flush(self) -> list[tuple[str, End]]:
        """What is left of an unfinished line: at the stream's end, or when it has waited long enough."""
        if not self._rest:
            return []
        text, end = bytes(self._rest), "\r" if self._rest.endswith(b"\r") else ""
        self._rest.clear()
        return [(text.removesuffix(b"\r").decode(errors="replace"), "\r" if end else "")]

    @property
    def pending(self) -> bool:
        return bool(self._rest)


def fold(printed: Iterable[Printed]) -> tuple[OutputLine, ...]:
    """One ``OutputLine`` for equal lines of different ranks, in the order of their first appearance.

    Lines of one rank keep their order: a rank's n-th line is only folded with lines that come at the same place or
    later in the other ranks' sequences.
    """
    groups: list[list[Printed]] = []
    latest: dict[int, int] = {}  # rank to the index of the group that holds its last line
    open_groups: dict[tuple[str, str, str, str], list[int]] = {}
    for line in printed:
        key = (line.stream, line.mesh, line.text, line.end)
        after = latest.get(line.rank, -1)
        index = next((i for i in open_groups.get(key, ()) if i > after), None)
        if index is None:
            index = len(groups)
            groups.append([])
            open_groups.setdefault(key, []).append(index)
        groups[index].append(line)
        latest[line.rank] = index
    return tuple(_line(group) for group in groups)


def in_messages(lines: Sequence[OutputLine]) -> Iterator[tuple[OutputLine, ...]]:
    """``lines`` in parts that fit into a message's header each."""
    part: list[OutputLine] = []
    size = 0
    for line in lines:
        length = 6 * len(line.text) + 1024  # JSON writes a character as six at most
        if part and size + length > MAX_MESSAGE:
            yield tuple(part)
            part, size = [], 0
        part.append(line)
        size += length
    if part:
        yield tuple(part)


def _line(group: list[Printed]) -> OutputLine:
    first = group[0]
    ranks = sorted({line.rank for line in group})
    return OutputLine(
        stream=first.stream,
        mesh=first.mesh,
        ranks=tuple(ranks[:MAX_RANKS_NAMED]),
        count=len(ranks),
        host=first.host if len({line.host for line in group}) == 1 else "",
        text=first.text,
        end=first.end,
    )

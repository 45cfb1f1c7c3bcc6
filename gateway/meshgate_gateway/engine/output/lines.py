"""Turns what worker processes print into labelled, folded lines. Pure: bytes in, ``OutputLine`` out.

A line ends at ``\\n`` or at ``\\r`` (a progress bar), whichever comes first. A line that many ranks print at about
the same time becomes one line with a count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshgate_wire.messages import OutputLine

MAX_LINE = 65_536  # bytes
MAX_MESSAGE = 512 * 1024  # bytes, estimated
MAX_RANKS_NAMED = 64
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
    """Splits a byte stream into lines; ``\\r\\n`` is one line end. Bytes of an unfinished line wait for the next."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[tuple[str, LineEnd]]:
        self._rest += data
        lines: list[tuple[str, LineEnd]] = []
        start = 0
        rest = self._rest
        newline = carriage = 0  # each is searched for again only once passed, so that the whole is linear
        while True:
            if 0 <= newline <= start:
                newline = rest.find(b"\n", start)
            if 0 <= carriage <= start:
                carriage = rest.find(b"\r", start)
            if carriage >= 0 and (newline < 0 or carriage < newline):
                if carriage + 1 == len(rest):
                    break  # the next byte decides whether this is \r\n
                cut, skip = carriage, 2 if rest[carriage + 1] == 0x0A else 1
                end: LineEnd = "\n" if skip == 2 else "\r"
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

    def flush(self) -> list[tuple[str, LineEnd]]:
        """The unfinished line, at the end of the stream or when it has waited long enough."""
        if not self._rest:
            return []
        text, end = bytes(self._rest), "\r" if self._rest.endswith(b"\r") else ""
        self._rest.clear()
        return [(text.removesuffix(b"\r").decode(errors="replace"), "\r" if end else "")]

    @property
    def pending(self) -> bool:
        return bool(self._rest)


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
    return tuple(_line(group) for group in groups)


def split_into_messages(lines: Sequence[OutputLine]) -> Iterator[tuple[OutputLine, ...]]:
    """Splits ``lines`` into parts that each fit into the header of one message."""
    part: list[OutputLine] = []
    size = 0
    for line in lines:
        length = 6 * len(line.text) + 1024  # JSON encodes a character as at most six
        if part and size + length > MAX_MESSAGE:
            yield tuple(part)
            part, size = [], 0
        part.append(line)
        size += length
    if part:
        yield tuple(part)


def _line(group: list[PrintedLine]) -> OutputLine:
    first = group[0]
    ranks = sorted({line.rank for line in group})
    return OutputLine(
        stream=first.stream,
        mesh=first.mesh,
        procs=first.procs,
        ranks=tuple(ranks[:MAX_RANKS_NAMED]),
        count=len(ranks),
        host=first.host if len({line.host for line in group}) == 1 else "",
        text=first.text,
        end=first.end,
    )

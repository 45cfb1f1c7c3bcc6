"""Shows what actors print on the driver's terminal.

Folding and layout are pure: lines in, text out. :class:`Screen` remembers whether the cursor stands on a progress
line, so that ``\\r`` rewrites in place and ordinary lines never land in the middle of one. :class:`OutputPrinter`
writes on a thread of its own: a terminal that is slow or stopped holds up no call.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TextIO

from meshgate.serial import SerialThread
from meshgate_wire.messages import OutputLine

__all__ = ["OutputPrinter", "Screen", "fold", "label"]

_MAX_RANKS_KEPT = 64


def fold(lines: Iterable[OutputLine]) -> list[OutputLine]:
    """Merges identical lines of different ranks into one, where the first of them stands.

    No rank's lines change their order: a line is merged only into one that stands after everything else its
    ranks printed.
    """
    folded: list[OutputLine] = []
    last_of_rank: dict[tuple[str, int], int] = {}
    last_of_text: dict[tuple[str, str, str, str], int] = {}
    for line in lines:
        text = (line.stream, line.mesh, line.text, line.end)
        ranks = [(line.mesh, rank) for rank in line.ranks]
        place = last_of_text.get(text)
        latest = max((last_of_rank.get(rank, -1) for rank in ranks), default=-1)
        if place is None or not ranks or latest >= place:
            place = len(folded)
            folded.append(line)
        else:
            folded[place] = _merge(folded[place], line)
        last_of_text[text] = place
        last_of_rank.update(dict.fromkeys(ranks, place))
    return folded


def _merge(first: OutputLine, second: OutputLine) -> OutputLine:
    ranks = tuple(sorted({*first.ranks, *second.ranks}))[:_MAX_RANKS_KEPT]
    return first.model_copy(
        update={
            "ranks": ranks,
            "count": first.count + second.count,
            "host": first.host if first.host == second.host else "",
        }
    )


def label(line: OutputLine) -> str:
    """Who printed it: ``[workers-0 trainers rank 3]``, ``[trainers 8 ranks]``."""
    if line.count > 1:
        who = f"{line.count} ranks"
    elif line.ranks:
        who = f"rank {line.ranks[0]}"
    else:
        who = ""
    return f"[{' '.join(filter(None, (line.host, line.mesh, who)))}]"


class Screen:
    """Turns lines into what is written to a terminal or a file.

    A line that ended in ``\\r`` is rewritten in place by whatever comes next; in a file, which cannot take
    anything back, it stays and the next ordinary line follows it.
    """

    def __init__(self, *, terminal: bool, columns: int = 80) -> None:
        self.terminal = terminal
        self.columns = columns
        self._in_progress = False

    def show(self, line: OutputLine) -> str:
        """The characters to write for ``line``."""
        text = f"{label(line)} {line.text}"
        if line.end == "\r":
            self._in_progress = True
            return f"\r{self._fit(text)}{self._clear()}"
        if not self._in_progress:
            return f"{text}\n"
        self._in_progress = False
        return f"\r{text}{self._clear()}\n" if self.terminal else f"\n{text}\n"

    def finish(self) -> str:
        """What to write last, so that the cursor stands at the start of a line."""
        in_progress, self._in_progress = self._in_progress, False
        return "\n" if in_progress else ""

    def _clear(self) -> str:
        return "\x1b[K" if self.terminal else ""

    def _fit(self, text: str) -> str:
        return text[: max(self.columns - 1, 1)] if self.terminal else text


class _Terminal:
    """The process's ``sys.stdout`` and ``sys.stderr`` of the moment, which a notebook exchanges from cell to cell."""

    def __init__(self) -> None:
        self._streams: tuple[TextIO | None, TextIO | None] = (None, None)
        self._screens: dict[Literal["stdout", "stderr"], Screen] = {}

    def write(self, lines: Sequence[OutputLine]) -> None:
        """Writes the lines. Raises OSError or ValueError when the stream is closed."""
        self._look_at_streams()
        out, err = self._streams
        for line in lines:
            stream = out if line.stream == "stdout" else err
            if stream is not None:
                stream.write(self._screens[line.stream].show(line))
        for stream in self._streams:
            if stream is not None:
                stream.flush()

    def finish(self) -> None:
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            if stream is not None:
                stream.write(self._screens[name].finish())  # type: ignore[index]
                stream.flush()

    def _look_at_streams(self) -> None:
        if self._streams == (sys.stdout, sys.stderr):
            return
        self._streams = (sys.stdout, sys.stderr)
        columns = shutil.get_terminal_size().columns
        out, err = (Screen(terminal=_is_terminal(stream), columns=columns) for stream in self._streams)
        self._screens = {"stdout": out, "stderr": out if out.terminal and err.terminal else err}


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and hasattr(stream, "isatty") and stream.isatty()


class OutputPrinter:
    """Prints on a thread of its own. A terminal that is gone ends the printing, not the program."""

    def __init__(self) -> None:
        self._terminal = _Terminal()
        self._thread = SerialThread("meshgate-output")
        self._terminal_gone = False
        self._used = False

    def put(self, lines: Sequence[OutputLine], printed: Callable[[], object]) -> None:
        """Prints ``lines`` soon and then calls ``printed``, on the printing thread. Never blocks."""
        self._used = True
        self._thread.call(lambda: self._print(lines, printed))

    def close(self, timeout: float) -> None:
        """Waits until what was put is printed, ``timeout`` seconds at most."""
        if self._used:
            self._thread.call(self._finish)
            self._thread.close(timeout)

    def _print(self, lines: Sequence[OutputLine], printed: Callable[[], object]) -> None:
        try:
            if not self._terminal_gone:
                self._terminal.write(fold(lines))
        except (OSError, ValueError):
            self._terminal_gone = True
        finally:
            printed()

    def _finish(self) -> None:
        if not self._terminal_gone:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.finish()

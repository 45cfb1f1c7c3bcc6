"""Prints what actors print on the driver's terminal, in its notebook or to its files.

``OutputPrinter`` prints on its own thread, so a terminal that is slow or stopped holds up no call. In a notebook the
output appears under the cell that made the last call: reading a result waits, for a moment, until what arrived
before it is printed. The layout is that of ``screen.py``.
"""

from __future__ import annotations

import contextvars
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from meshgate.session.output.log_files import LogFiles, missing_text
from meshgate.session.output.screen import Kind, Screen, fold
from meshgate.session.serial_thread import SerialThread
from meshgate_wire.messages import OutputLine

log = logging.getLogger("meshgate.session.output")

PRINT_TIMEOUT = 0.5  # seconds that reading a result waits for what the ranks printed before it


@dataclass(slots=True)
class _Shown:
    """A stream, its layout, and which of the actors' streams it shows."""

    stream: TextIO
    screen: Screen
    shows: frozenset[str]


class _Streams:
    """The current ``sys.stdout`` and ``sys.stderr``. If both are terminals, they are taken for the same one.

    A stream that cannot be written loses those lines only: the next lines are tried again, because the disk may have
    space by then, or the program may have another ``sys.stdout``. Once that works, a line says what is missing.
    """

    def __init__(self) -> None:
        self._current: tuple[TextIO | None, TextIO | None] = (None, None)
        self._shown: list[_Shown] = []
        self._lost: dict[frozenset[str], tuple[int, str]] = {}  # the lines that were not written, and why

    def write(self, lines: Sequence[OutputLine]) -> None:
        self._update()
        for shown in self._shown:
            screen = shown.screen
            if screen.kind == "terminal":
                screen.columns, screen.rows = shutil.get_terminal_size()
            if wanted := [line for line in lines if line.stream in shown.shows]:
                lost, reason = self._lost.get(shown.shows, (0, ""))
                notice = [_lost_notice(lost, reason)] if lost else []
                self._write(shown, screen.show([*notice, *wanted]), len(wanted))

    def finish(self) -> None:
        for shown in self._shown:
            if text := shown.screen.finish():
                self._write(shown, text, 0)

    def _write(self, shown: _Shown, text: str, lines: int) -> None:
        try:
            write_text(shown.stream, text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            lost, _ = self._lost.get(shown.shows, (0, ""))
            self._lost[shown.shows] = (lost + lines, str(error))
        else:
            self._lost.pop(shown.shows, None)

    def _update(self) -> None:
        if self._current == (sys.stdout, sys.stderr):
            return
        out, err = self._current = (sys.stdout, sys.stderr)
        self._shown = []
        both = out is not None and err is not None and kind_of(out) == kind_of(err) == "terminal"
        if out is not None:
            shows = frozenset({"stdout", "stderr"} if both else {"stdout"})
            self._shown.append(_Shown(out, Screen(kind_of(out)), shows))
        if err is not None and not both:
            self._shown.append(_Shown(err, Screen(kind_of(err)), frozenset({"stderr"})))


def _lost_notice(lost: int, reason: str) -> OutputLine:
    return OutputLine(stream="stderr", mesh="meshgate", text=missing_text(lost, reason))


def write_text(stream: TextIO, text: str) -> None:
    """Writes ``text``, with the characters that the stream cannot encode as escapes, and flushes the stream."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def kind_of(stream: TextIO) -> Kind:
    """How text is shown there. A terminal that cannot move its cursor is like a file, and so is a closed stream."""
    if type(stream).__module__.startswith("ipykernel."):
        return "notebook"
    try:
        if getattr(stream, "closed", False) or os.environ.get("TERM") == "dumb":
            return "file"
        return "terminal" if hasattr(stream, "isatty") and stream.isatty() else "file"
    except Exception:  # the program's own stream, which must not end the connection
        log.debug("a %s does not say whether it is a terminal", type(stream).__name__, exc_info=True)
        return "file"


class OutputPrinter:
    """Prints on its own thread. If nothing can be written, the program continues.

    ``files`` get what the ranks print. ``quiet``: it is not printed; lines of the gateway and of this client are.
    """

    def __init__(self, files: LogFiles | None = None, *, quiet: bool = False) -> None:
        self._streams = _Streams()
        self._files, self._quiet = files, quiet
        self._context = contextvars.Context()
        self._thread = SerialThread("meshgate-output")
        self._used = False
        # Batches. The thread counts those that are printed; several threads post, so the lock keeps their order.
        self.posted = self.printed = 0
        self._progressed = threading.Condition()
        self._stalled = False  # a wait timed out, and none begins until all is printed

    def follow_caller(self) -> None:
        """From now on prints in the context of the caller, by which a notebook finds the cell."""
        self._context = contextvars.copy_context()

    def put(
        self, lines: Sequence[OutputLine], printed: Callable[[], object], arrived: Sequence[OutputLine] = ()
    ) -> None:
        """Prints ``lines`` and then calls ``printed``, both on the printing thread. Never blocks.

        ``arrived`` goes to files: the lines as they are without folding, aggregation and choice.
        """
        self._used = True
        with self._progressed:
            self.posted += 1
            self._thread.call(lambda: self._print(lines, printed, arrived))

    def unprinted(self) -> Callable[[], object] | None:
        """What waits until everything so far is printed, for ``PRINT_TIMEOUT`` seconds at most; None: it is.

        After a wait that timed out, as on a terminal that was stopped, nothing waits until the printing has caught up.
        """
        with self._progressed:
            last = self.posted
            if self.printed >= last or self._stalled:
                return None
        return lambda: self._wait_printed(last)

    def _wait_printed(self, last: int) -> None:
        if self._thread.is_current():  # a stream of the program's own may call actors
            return
        with self._progressed:
            if not self._stalled and not self._progressed.wait_for(lambda: self.printed >= last, PRINT_TIMEOUT):
                self._stalled = True

    def close(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds until everything is printed."""
        if self._used:
            self._thread.call(self._finish)
        self._thread.close(timeout)  # also before its first call, so that a line that comes later leaves no thread

    def _print(self, lines: Sequence[OutputLine], printed: Callable[[], object], arrived: Sequence[OutputLine]) -> None:
        try:
            notices = self._files.write(arrived) if self._files is not None else []
            shown = [line for line in lines if not (self._quiet and line.ranks)]
            self._context.run(self._streams.write, fold([*notices, *shown]))
        finally:
            with self._progressed:
                self.printed += 1
                self._stalled = self._stalled and self.printed < self.posted
                self._progressed.notify_all()
            printed()

    def _finish(self) -> None:
        if self._files is not None:
            self._files.close()
        self._context.run(self._streams.finish)

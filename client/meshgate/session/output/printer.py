"""Prints what actors print on the driver's terminal, in its notebook or to its files.

``OutputPrinter`` prints on its own thread, so a terminal that is slow or stopped holds up no call. In a notebook the
output appears under the cell that made the last call. The layout is that of ``screen.py``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from meshgate.session.output.screen import Kind, Screen, fold
from meshgate.session.serial_thread import SerialThread
from meshgate_wire.messages import OutputLine

__all__ = ["OutputPrinter", "kind_of"]


class _Streams:
    """The current ``sys.stdout`` and ``sys.stderr``. If both are terminals, they are taken for the same one."""

    def __init__(self) -> None:
        self._current: tuple[TextIO | None, TextIO | None] = (None, None)
        self._screens: list[tuple[TextIO, Screen, frozenset[str]]] = []  # each with the streams it shows

    def write(self, lines: Sequence[OutputLine]) -> None:
        """Writes the lines. Raises OSError or ValueError if a stream is closed."""
        self._update()
        for stream, screen, shown in self._screens:
            if screen.kind == "terminal":
                screen.columns, screen.rows = shutil.get_terminal_size()
            stream.write(screen.show([line for line in lines if line.stream in shown]))
            stream.flush()

    def finish(self) -> None:
        for stream, screen, _ in self._screens:
            stream.write(screen.finish())
            stream.flush()

    def _update(self) -> None:
        if self._current == (sys.stdout, sys.stderr):
            return
        out, err = self._current = (sys.stdout, sys.stderr)
        self._screens = []
        both = out is not None and err is not None and kind_of(out) == kind_of(err) == "terminal"
        if out is not None:
            self._screens.append((out, Screen(kind_of(out)), frozenset({"stdout", "stderr"} if both else {"stdout"})))
        if err is not None and not both:
            self._screens.append((err, Screen(kind_of(err)), frozenset({"stderr"})))


def kind_of(stream: TextIO) -> Kind:
    """How text is shown there. A terminal that cannot move its cursor is like a file."""
    if type(stream).__module__.startswith("ipykernel."):
        return "notebook"
    terminal = hasattr(stream, "isatty") and stream.isatty() and os.environ.get("TERM") != "dumb"
    return "terminal" if terminal else "file"


class OutputPrinter:
    """Prints on its own thread. If the terminal goes away, printing ends and the program continues."""

    def __init__(self) -> None:
        self._streams = _Streams()
        self._context = contextvars.Context()
        self._thread = SerialThread("meshgate-output")
        self._terminal_gone = False
        self._used = False

    def follow_caller(self) -> None:
        """From now on prints in the context of the caller, by which a notebook finds the cell."""
        self._context = contextvars.copy_context()

    def put(self, lines: Sequence[OutputLine], printed: Callable[[], object]) -> None:
        """Prints ``lines`` and then calls ``printed``, both on the printing thread. Never blocks."""
        self._used = True
        self._thread.call(lambda: self._print(lines, printed))

    def close(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds until everything is printed."""
        if self._used:
            self._thread.call(self._finish)
            self._thread.close(timeout)

    def _print(self, lines: Sequence[OutputLine], printed: Callable[[], object]) -> None:
        try:
            if not self._terminal_gone:
                self._context.run(self._streams.write, fold(lines))
        except (OSError, ValueError):
            self._terminal_gone = True
        finally:
            printed()

    def _finish(self) -> None:
        if not self._terminal_gone:
            with contextlib.suppress(OSError, ValueError):
                self._context.run(self._streams.finish)

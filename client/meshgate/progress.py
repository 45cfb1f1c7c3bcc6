"""What is shown on stderr while a job starts, files are copied or code is synced.

``MESHGATE_PROGRESS`` is ``auto`` (the default), ``plain`` or ``off``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

from typing_extensions import Self

if TYPE_CHECKING:
    from rich.console import Console

Mode: TypeAlias = Literal["live", "plain", "off"]

SILENCE = 2.0  # seconds
REPEAT_INTERVAL = 10.0  # seconds
REDRAW_INTERVAL = 0.25  # seconds


def progress_mode(stream: TextIO) -> Mode:
    """What the variable and the terminal, or notebook, ask for. Raises ValueError on another value of the variable."""
    mode = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
    if mode not in ("auto", "plain", "off"):
        raise ValueError(f"MESHGATE_PROGRESS={mode!r}: expected auto, plain or off")
    if mode == "off":
        return "off"
    return "live" if mode == "auto" and (stream.isatty() or _shows_widgets()) else "plain"


def _shows_widgets() -> bool:
    """Whether this is a notebook with ipywidgets, where rich replaces what it has shown in the cell."""
    if "IPython" not in sys.modules:
        return False
    return new_console().is_jupyter and importlib.util.find_spec("ipywidgets") is not None


def new_console(**options: Any) -> Console:
    """A console of rich that shows text as it is: ``[conv,fc]`` and ``:x:`` in a command, a path or an error are no
    markup. What is to be bold is a ``Text`` or has a style. All consoles of meshgate come from here."""
    from rich.console import Console  # noqa: PLC0415 - not for programs that show nothing

    return Console(markup=False, emoji=False, highlight=False, **options)


def report_stream() -> TextIO:
    """Where a line says that something was done: stderr, but stdout in a notebook, which shows stderr as an error."""
    return sys.stdout if type(sys.stderr).__module__.startswith("ipykernel.") else sys.stderr


def size_text(nbytes: float) -> str:
    """A number of bytes for people, such as ``3.2 MB``."""
    unit, *larger = "B", "kB", "MB", "GB"
    while nbytes >= 1000 and larger:
        nbytes, unit, *larger = nbytes / 1000, *larger
    return f"{nbytes:.0f} {unit}" if nbytes >= 10 or unit == "B" else f"{nbytes:.1f} {unit}"


class Block:
    """A ``with`` block around waiting, in which nothing is set up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Waiting(Block):
    """A ``with`` block that shows what it waits for, if that takes longer than two seconds.

    ``text`` returns it, and is called on another thread. A terminal has one line, which is gone after the block;
    elsewhere a changed text is another line, at most every ten seconds.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="meshgate-waiting", daemon=True)
        self._shown = progress_mode(sys.stderr) != "off"

    def __enter__(self) -> Self:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._shown:
            self._thread.join()

    def _show(self) -> None:
        if self._over.wait(SILENCE):
            return
        if progress_mode(sys.stderr) == "live" and sys.stderr.isatty():
            self._redraw()
        else:
            self._print_changes(report_stream())

    def _redraw(self) -> None:
        from rich.text import Text  # noqa: PLC0415 - most waits are short

        with new_console(stderr=True).status(Text(self._text())) as status:
            while not self._over.wait(REDRAW_INTERVAL):
                status.update(Text(self._text()))

    def _print_changes(self, stream: TextIO) -> None:
        shown = ""
        while True:
            if (text := self._text()) != shown:
                stream.write(f"meshgate: {text}\n")
                stream.flush()
                shown = text
            if self._over.wait(REPEAT_INTERVAL):
                return

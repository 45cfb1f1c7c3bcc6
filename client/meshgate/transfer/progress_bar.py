"""Terminal output of a pull: a progress bar on a terminal, and one line at the end.

``MESHGATE_PROGRESS`` selects ``auto`` (the default), ``plain`` or ``off``. All output goes to stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from typing_extensions import Self

from meshgate.transfer.pulled import Pulled


class PullProgress:
    """A context manager around a pull. Thread-safe."""

    def __init__(self, title: str) -> None:
        mode = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
        self._silent = mode == "off"
        self._started = time.monotonic()
        self._title = title
        self._lock = threading.Lock()
        self._expected = 0
        self._bar: Progress | None = None
        if mode == "auto" and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"pull {title}", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, count: int) -> None:
        """Adds ``count`` bytes to the expected total."""
        with self._lock:
            self._expected += count
        if self._bar is not None:
            self._bar.update(self._task, total=self._expected)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def done(self, result: Pulled) -> None:
        """Prints the final line."""
        if self._silent:
            return
        seconds = time.monotonic() - self._started
        files = f"{result.files} file{'' if result.files == 1 else 's'}"
        line = f"pulled {self._title}: {files}, {_size_text(result.size)}, {_size_text(result.travelled)} transferred"
        sys.stderr.write(f"{line}, in {seconds:.1f} s{_left_out_text(result.left_out)}\n")
        sys.stderr.flush()


def _left_out_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    kinds = "special files, links out of the directory and files removed meanwhile"
    return f"; left out, as {kinds} are: {', '.join(names[:5])}{more}"


def _size_text(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

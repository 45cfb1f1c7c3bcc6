"""What is shown while files are pulled: a bar on a terminal, one line at the end elsewhere.

``MESHGATE_PROGRESS`` chooses, as while a job starts: ``auto``, ``plain``, ``off``. Everything goes to stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from typing_extensions import Self

if TYPE_CHECKING:
    from meshgate.pull import Pulled

__all__ = ["PullProgress"]


class PullProgress:
    """A context manager around the pulling; told from several threads."""

    def __init__(self, title: str) -> None:
        wanted = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
        self._silent = wanted == "off"
        self._begun = time.monotonic()
        self._title = title
        self._lock = threading.Lock()
        self._expected = 0
        self._bar: Progress | None = None
        if wanted == "auto" and sys.stderr.isatty():
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
        """``count`` more bytes are to come."""
        with self._lock:
            self._expected += count
        if self._bar is not None:
            self._bar.update(self._task, total=self._expected)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def done(self, result: Pulled) -> None:
        """The line that stays."""
        if self._silent:
            return
        seconds = time.monotonic() - self._begun
        files = f"{result.files} file{'' if result.files == 1 else 's'}"
        line = f"pulled {self._title}: {files}, {_size(result.size)}, of which {_size(result.travelled)} travelled"
        left_out = f"; left out: {', '.join(result.left_out[:5])}" if result.left_out else ""
        sys.stderr.write(f"{line}, in {seconds:.1f} s{left_out}\n")
        sys.stderr.flush()


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

"""Counts similar lines over a window of time, for meshes whose ``logging_option`` asks for it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshgate_wire.messages import OutputLine

MAX_HELD = 1024  # different lines of a mesh; above it they are shown before the window ends
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Window:
    """The lines of one mesh since the window began, by what is similar in them."""

    seconds: float
    began: float = 0.0
    held: dict[tuple[str, str], OutputLine] = field(default_factory=dict)
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    timer: threading.Timer | None = None


class Aggregator:
    """``show(lines)`` gets what to print; it may be called on a thread of a timer. Safe to use on any thread, and in a
    signal handler that interrupts it."""

    def __init__(self, show: Callable[[Sequence[OutputLine]], None]) -> None:
        self._show = show
        self._lock = threading.RLock()
        self._windows: dict[int, _Window] = {}  # by proc mesh

    def set_window(self, procs: int, seconds: float | None) -> None:
        """Aggregates what ``procs`` prints over ``seconds``; None: no longer, and shows what is held."""
        with self._lock:
            if seconds is None:
                ended = self._windows.pop(procs, None)
                self._flush(ended)
                return
            window = self._windows.setdefault(procs, _Window(seconds))
            window.seconds = seconds
            if window.held:
                self._start_timer(window)

    def take(self, lines: Sequence[OutputLine]) -> list[OutputLine]:
        """Holds the lines of meshes with a window, and returns the others."""
        if not self._windows:
            return list(lines)
        others: list[OutputLine] = []
        with self._lock:
            for line in lines:
                window = self._windows.get(line.procs)
                if window is None or line.end == "\r":
                    others.append(line)
                else:
                    self._hold(window, line)
        return others

    def close(self) -> None:
        """Shows what is held."""
        with self._lock:
            for procs in list(self._windows):
                self._flush(self._windows.pop(procs, None))

    def _hold(self, window: _Window, line: OutputLine) -> None:
        key = (line.stream, _NUMBER.sub("0", line.text))
        first = window.held.setdefault(key, line)
        ranks = tuple(sorted({*first.ranks, *line.ranks}))
        count = max(first.count, line.count, len(ranks))
        host = first.host if first.host == line.host else ""
        window.held[key] = first.model_copy(update={"ranks": ranks[:64], "count": count, "host": host})
        window.lines[key] = window.lines.get(key, 0) + line.count
        if len(window.held) > MAX_HELD:
            self._flush(window)
        elif window.timer is None:
            window.began = time.monotonic()
            self._start_timer(window)

    def _start_timer(self, window: _Window) -> None:
        if window.timer is not None:
            window.timer.cancel()
        left = max(0.0, window.began + window.seconds - time.monotonic())
        timer = threading.Timer(left, lambda: self._window_over(window, timer))
        window.timer = timer
        timer.daemon = True
        timer.start()

    def _window_over(self, window: _Window, timer: threading.Timer) -> None:
        with self._lock:
            if window.timer is timer:  # otherwise it was flushed, or has another length, meanwhile
                self._flush(window)

    def _flush(self, window: _Window | None) -> None:
        if window is None:
            return
        if window.timer is not None:
            window.timer.cancel()
            window.timer = None
        held, window.held = window.held, {}
        lines, window.lines = window.lines, {}
        counted = [
            line.model_copy(update={"text": f"[{number} similar log lines] {line.text}"}) if number > 1 else line
            for key, line in held.items()
            for number in (lines.get(key, 1),)
        ]
        if counted:
            self._show(counted)

"""Detects files that are saved continuously, such as a log or a checkpoint: each save creates a new version."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

SAVES = 20
WINDOW = 10.0  # seconds


class BusyFiles:
    """The files that have been saved ``SAVES`` times within ``WINDOW``. A busy file stays busy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._saves: dict[str, deque[float]] = {}
        self._busy: set[str] = set()

    def record_saves(self, paths: Sequence[str]) -> list[str]:
        """Records one save of each path; returns the paths that have just become busy."""
        now = self._clock()
        self._saves = {path: saves for path, saves in self._saves.items() if saves[-1] > now - WINDOW}
        newly_busy = []
        for path in paths:
            saves = self._saves.setdefault(path, deque(maxlen=SAVES))
            saves.append(now)
            if path not in self._busy and len(saves) == SAVES and saves[0] > now - WINDOW:
                self._busy.add(path)
                newly_busy.append(path)
        return newly_busy

    def contains_all(self, paths: Sequence[str]) -> bool:
        """Whether every one of ``paths`` is busy; False for an empty sequence."""
        return bool(paths) and self._busy.issuperset(paths)

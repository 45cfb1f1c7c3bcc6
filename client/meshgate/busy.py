"""Files that are saved all the time, a log or a checkpoint in the tree: each save is a version, sent to every host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["BusyFiles"]

OFTEN = 20  # saves
WITHIN = 10.0  # seconds


class BusyFiles:
    """Which files are busy: those that were saved ``OFTEN`` times ``WITHIN`` seconds, from then on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._saves: dict[str, deque[float]] = {}
        self._busy: set[str] = set()

    def saved(self, paths: Sequence[str]) -> list[str]:
        """Notes one save of each; returns those that are found busy by it."""
        now = self._clock()
        self._saves = {path: saves for path, saves in self._saves.items() if saves[-1] > now - WITHIN}
        found = []
        for path in paths:
            saves = self._saves.setdefault(path, deque(maxlen=OFTEN))
            saves.append(now)
            if path not in self._busy and len(saves) == OFTEN and saves[0] > now - WITHIN:
                self._busy.add(path)
                found.append(path)
        return found

    def hold_all(self, paths: Sequence[str]) -> bool:
        """Whether all of these are busy; False for none."""
        return bool(paths) and self._busy.issuperset(paths)

"""Watches directories and yields the files that were saved, without those that the tree ignores."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from meshgate_sync.errors import TreeError
from meshgate_sync.tree.scan import Scanner

DEBOUNCE = 50  # ms; saves closer together than this are one burst
POLL_INTERVAL = 200  # ms between checks of ``stop``
OUTPUTS = ("events.out.tfevents.*", "*.ckpt", "*.distcp", "*.pt", "*.pth", "*.safetensors")
"""Names of event files and checkpoints, which programs write and no one edits."""


SAVES = 20
WINDOW = 10.0  # seconds


def watch(scanners: Sequence[Scanner], stop: threading.Event) -> Iterator[list[str] | None]:
    """Yields the absolute paths of each burst of saves until ``stop`` is set.

    Skips paths that all scanners ignore, event files, checkpoints, and the file that this program's output goes to.

    The first value is None, yielded once watching has begun: earlier saves are not reported. Raises TreeError if
    watching cannot begin or fails later.
    """
    from watchfiles import watch as watch_files  # noqa: PLC0415 - only drivers that watch pay for the import

    roots = [os.fsdecode(scanner.root) for scanner in scanners]
    is_relevant = _relevance_filter(scanners)
    started = False
    try:
        for changes in watch_files(
            *roots,
            watch_filter=lambda _, path: is_relevant(path),
            stop_event=stop,
            debounce=DEBOUNCE,
            step=10,
            rust_timeout=POLL_INTERVAL,
            yield_on_timeout=True,
        ):
            if missing := next((root for root in roots if not os.path.isdir(root)), None):
                raise FileNotFoundError(f"directory {missing} was removed")
            if not started:
                started = True
                yield None
            if changes:
                yield [path for _, path in changes]
    except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeError for most errors of the system
        text = str(error)
        rename = "rename that file, whose name is not valid UTF-8, and " if "decode path" in text else ""
        raise TreeError(
            f"cannot watch {', '.join(roots)}: {text}. Saves are no longer pushed; {rename}call "
            "job.sync(watch=True) to resume"
        ) from error


def _relevance_filter(scanners: Sequence[Scanner]) -> Callable[[str], bool]:
    own_output = _own_output()

    def is_relevant(path: str) -> bool:
        if any(fnmatchcase(os.path.basename(path), name) for name in OUTPUTS):
            return False
        return not all(scanner.ignores(path) for scanner in scanners) and _identity(path) not in own_output

    return is_relevant


def _own_output() -> set[tuple[int, int]]:
    """The files that stdout and stderr of this program are redirected to."""
    return {identity for descriptor in (1, 2) if (identity := _identity(descriptor)) is not None}


def _identity(file: str | int) -> tuple[int, int] | None:
    """Device and inode of a regular file; None for what is not one, and for what does not exist."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


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

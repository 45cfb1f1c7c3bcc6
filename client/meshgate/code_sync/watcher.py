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
# While this program is stopped, as by Ctrl-Z or a debugger, the kernel queues events, and drops what comes after the
# first 16,384; watchfiles does not report that. A save causes about four events: 4,096 changes arrive then.
MAX_BURST = 1000  # changes; after more, any path may have changed
POLL_INTERVAL = 200  # ms between checks of ``stop``
OUTPUTS = ("events.out.tfevents.*", "*.ckpt", "*.distcp", "*.pt", "*.pth", "*.safetensors")
"""Names of event files and checkpoints, which programs write and no one edits."""


SAVES = 20
WINDOW = 10.0  # seconds


def watch(scanners: Sequence[Scanner], stop: threading.Event) -> Iterator[list[str] | None]:
    """Yields the absolute paths of each burst of saves until ``stop`` is set.

    Skips paths that all scanners ignore, event files, checkpoints, and the file that this program's output goes to.

    None stands for any path: it is the first value, yielded once watching has begun, because earlier saves are not
    reported, and follows more than ``MAX_BURST`` changes at once, of which some may be missing. Raises TreeError if
    watching cannot begin or fails later.
    """
    from watchfiles import watch as watch_files  # noqa: PLC0415 - only drivers that watch pay for the import

    roots = [os.fsdecode(scanner.root) for scanner in scanners]
    is_relevant = _relevance_filter(scanners)
    burst = _Burst(stop)
    started = False

    def is_yielded(_: object, path: str) -> bool:
        burst.count()
        return is_relevant(path)

    try:
        for changes in watch_files(
            *roots,
            watch_filter=is_yielded,
            stop_event=burst,
            debounce=DEBOUNCE,
            step=10,
            rust_timeout=POLL_INTERVAL,
            yield_on_timeout=True,
        ):
            if missing := next((root for root in roots if not os.path.isdir(root)), None):
                raise FileNotFoundError(f"directory {missing} was removed")
            if burst.was_large() or not started:
                started = True
                yield None
            elif changes:
                yield [path for _, path in changes]
    except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeError for most errors of the system
        text = str(error)
        first = ""
        if "decode path" in text:
            first = "rename that file, whose name is not valid UTF-8, and "
        elif "Permission denied" in text:  # the system watches whole trees
            first = "make that directory readable or move it elsewhere, even if it is ignored, and "
        raise TreeError(
            f"cannot watch {', '.join(roots)}: {text}. Saves are no longer pushed; {first}call "
            "job.sync(watch=True) to resume"
        ) from error


class _Burst:
    """Finds large bursts. Ignored files count too, because they fill the kernel's queue like others."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._size = 0
        self._large = False

    def is_set(self) -> bool:
        """Whether to stop. watchfiles asks before each burst."""
        self._size = 0
        return self._stop.is_set()

    def count(self) -> None:
        self._size += 1
        self._large = self._large or self._size > MAX_BURST

    def was_large(self) -> bool:
        """Whether a burst since the last call was large."""
        large, self._large = self._large, False
        return large


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

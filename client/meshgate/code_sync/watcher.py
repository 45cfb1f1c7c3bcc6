"""Watches directories and yields the files that were saved, without those that the tree ignores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from meshgate_sync.errors import TreeError
from meshgate_sync.tree.scan import Scanner

__all__ = ["watch"]

DEBOUNCE = 50  # ms; saves closer together than this are one burst
POLL_INTERVAL = 200  # ms between checks of ``stop``


def watch(scanners: Sequence[Scanner], stop: threading.Event) -> Iterator[list[str] | None]:
    """Yields the absolute paths of each burst of saves until ``stop`` is set; skips paths that all scanners ignore.

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
        raise TreeError(
            f"cannot watch {', '.join(roots)}: {error}. Saves are no longer pushed; call job.sync(watch=True) to resume"
        ) from error


def _relevance_filter(scanners: Sequence[Scanner]) -> Callable[[str], bool]:
    return lambda path: not all(scanner.ignores(path) for scanner in scanners)

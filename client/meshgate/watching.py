"""Sees what is saved below some directories, and says which of it may matter."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from meshgate_sync.errors import TreeError
from meshgate_sync.scan import Scanner

__all__ = ["watch"]

DEBOUNCE = 50  # ms that a burst of saves may take to be one
POLL = 200  # ms until ``stop`` is looked at


def watch(scanners: Sequence[Scanner], stop: threading.Event) -> Iterator[list[str] | None]:
    """The absolute paths of each burst of saves, without those that ``scanners`` leave out, until ``stop``.

    First None, as soon as saves are seen: what happened before is not told. Raises TreeError when saves cannot
    be seen, or no longer.
    """
    from watchfiles import watch as watch_files  # noqa: PLC0415 - only who watches pays for it

    roots = [os.fsdecode(scanner.root) for scanner in scanners]
    matters = _matters(scanners)
    started = False
    try:
        for changes in watch_files(
            *roots,
            watch_filter=lambda _, path: matters(path),
            stop_event=stop,
            debounce=DEBOUNCE,
            step=10,
            rust_timeout=POLL,
            yield_on_timeout=True,
        ):
            if gone := next((root for root in roots if not os.path.isdir(root)), None):
                raise FileNotFoundError(f"{gone} is gone")
            if not started:
                started = True
                yield None
            if changes:
                yield [path for _, path in changes]
    except (OSError, RuntimeError) as error:  # RuntimeError: what watchfiles makes of most that the system refuses
        raise TreeError(
            f"{', '.join(roots)} cannot be watched: {error}. Saves are not pushed; sync(watch=True) tries again"
        ) from error


def _matters(scanners: Sequence[Scanner]) -> Callable[[str], bool]:
    return lambda path: not all(scanner.ignores(path) for scanner in scanners)

"""SIGTERM and SIGHUP in a ``with`` block raise SystemExit, so that the block ends its job.

By default they end the process at once: nothing is cleaned up, and a job in a cluster would keep its hosts. Handlers
that the program has set are left alone, and so is an ignored SIGHUP (nohup).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_blocks = 0  # changed in the main thread only


def catch_end_signals() -> bool:
    """Called at the start of a block. Returns whether ``restore_signals`` must be called at its end: not outside the
    main thread, where handlers cannot be set."""
    global _blocks  # noqa: PLW0603 - handlers belong to the process
    if threading.current_thread() is not threading.main_thread():
        return False
    _blocks += 1
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise)
    return True


def restore_signals() -> None:
    """The end of the outermost block restores the default handlers, unless the program has set others meanwhile."""
    global _blocks  # noqa: PLW0603
    _blocks -= 1
    if _blocks == 0 and threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _raise:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Restores the handlers of Ctrl-C and SIGTERM after a block that runs a library which replaces them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and handler is not None:  # None: set by other than Python
                signal.signal(number, handler)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP in a block takes effect at its end; a second one at once, as the block may
    hang. Only in the main thread, and only what Python handles."""
    numbers = (signal.SIGINT, *_SIGNALS) if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    held: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        restore()

    try:
        for number in before:
            signal.signal(number, hold)
        yield
    finally:
        restore()
        for each in held:
            signal.raise_signal(each)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)

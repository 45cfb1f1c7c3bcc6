"""Reports calls that failed although the program has not read their results, as asyncio does for its tasks.

A failure that is never read would otherwise be silent, and a program whose every call failed would exit with 0. It is
reported when the program drops the last of the call's futures, or ends. Not reported: the death of a process, which
``unhandled_fault_hook`` gets; calls that the program itself ended by closing its session; and calls of a detached
session, whose next holder may read them.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshgate.errors import CallCancelledError, GatewayError, SessionTakenOverError, SupervisionError
from meshgate.session.futures import FutureProxy
from meshgate.session.output.printer import write_text
from meshgate.session.serial_thread import SerialThread

MAX_KINDS = 64  # of failures that are printed in full; others are only counted
# Or known to the program: it has cancelled the call. And a session that was closed: a plain GatewayError.
_REPORTED_ELSEWHERE = (CallCancelledError, SupervisionError, SessionTakenOverError)


@dataclass(slots=True)
class _Kind:
    """Equal failures, of which the first was printed."""

    endpoint: str
    error: str
    more: int = 0


class UnreadFailures:
    """Those of one session. Equal failures are printed once and counted. Thread-safe."""

    def __init__(self) -> None:
        self.watching = True
        """Whether calls that fail from now on are reported. Set it to False when the program ends the session."""
        self.ignored = False
        """Whether nothing is reported, because the session is detached and another process may read it."""
        self._thread = SerialThread("meshgate-unread")
        self._closed = False
        self._kinds: dict[str, _Kind] = {}  # by the text that was printed
        weakref.finalize(self, _print_counts, self._kinds)  # older than those of futures, so later when a program ends

    def failed_call(self, endpoint: str) -> FailedCall:
        self._thread.call(lambda: None)  # starts it: a finalizer must not, because that takes locks
        return FailedCall(self, endpoint)

    def report(self, endpoint: str, make_error: Callable[[], Exception]) -> None:
        """For finalizers: takes no lock, and while the session lasts, unpickles the error on another thread."""
        if self._closed:
            self._report(endpoint, make_error)
        else:
            self._thread.call(lambda: self._report(endpoint, make_error))

    def close(self, timeout: float) -> None:
        """Prints what was dropped so far, for up to ``timeout`` seconds. Later reports are printed at once."""
        self._closed = True
        self._thread.close(timeout)
        _print_counts(self._kinds)

    def _report(self, endpoint: str, make_error: Callable[[], Exception]) -> None:
        error = make_error()
        if self.ignored or type(error) is GatewayError or isinstance(error, _REPORTED_ELSEWHERE):
            return
        text = _text(endpoint, error)
        if text in self._kinds:
            self._kinds[text].more += 1
        elif len(self._kinds) < MAX_KINDS:
            self._kinds[text] = _Kind(endpoint, traceback.format_exception_only(error)[-1].partition("\n")[0])
            _print(text)
        else:
            self._kinds.setdefault("", _Kind("other endpoints", "see the first failures")).more += 1


class FailedCall:
    """A call of which some futures have failed. It is reported once, unless the program reads any of those."""

    def __init__(self, reports: UnreadFailures, endpoint: str) -> None:
        self._reports, self._endpoint = reports, endpoint
        self._settled = False

    def watch(self, futures: Sequence[FutureProxy[Any]], make_error: Callable[[], Exception]) -> None:
        """To be called before ``futures`` are settled with the error that ``make_error`` returns."""
        for future in futures:
            future.when_read(self._read)
            weakref.finalize(future, self._dropped, make_error)  # also called when the program ends

    def _read(self) -> None:
        self._settled = True

    def _dropped(self, make_error: Callable[[], Exception]) -> None:
        if not self._settled:
            self._settled = True
            self._reports.report(self._endpoint, make_error)


def _text(endpoint: str, error: Exception) -> str:
    shown = "".join(traceback.format_exception_only(error)).rstrip()
    return (
        f"meshgate: a call of {endpoint} failed, and the program has not read its result. "
        f"Read each future with get() or await.\n{shown}\n"
    )


def _print_counts(kinds: dict[str, _Kind]) -> None:
    for kind in list(kinds.values()):
        if kind.more:
            calls = "one more call" if kind.more == 1 else f"{kind.more} more calls"
            _print(f"meshgate: {calls} of {kind.endpoint} failed in the same way, unread: {kind.error}\n")
            kind.more = 0


def _print(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed: there is no other place to report to
            write_text(sys.stderr, text)

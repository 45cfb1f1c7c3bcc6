"""Reports failures to ``meshgate.unhandled_fault_hook`` and ends the program if the hook raises, as Monarch does.

The hook runs on its own thread, one failure at a time, so it may block and call actors without holding up the
connection.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from meshgate.caller import is_interactive, note_no_waits
from meshgate.errors import MeshFailure, ranks_text
from meshgate.monarch_classes import monarch_api

log = logging.getLogger("meshgate.faults")

LEAVE_TIMEOUT = 1.0  # seconds that a program has to end by itself, with the error of a call that failed
REPEAT_WINDOW = 60.0  # seconds during which a similar failure is reported in one line
_LAST_LINES = re.compile(r"\nThe last lines of [^\n]*:(?:\n  [^\n]*)*")  # of a host's log, which differ on each host
_HOSTS_REMAIN = "Slices without these ranks still work, and you can spawn again on the remaining hosts"
_JOB_LOST = "The job has no host any more, and kill() and apply() start it again"
_PROGRAM_ENDS = (
    "The program ends, as with Monarch. {remedy}: to continue, assign a function to meshgate.unhandled_fault_hook"
)


@dataclass(slots=True)
class FaultReporter:
    """Formats failures: the first of a kind in full with a hint, similar ones on other ranks in one line."""

    _reported: dict[tuple[str, str], float] = field(default_factory=dict)

    def text(self, failure: MeshFailure, now: float) -> str:
        """What to print about ``failure`` at time ``now``, in seconds."""
        kind = (failure.mesh_name, re.sub(r"\d+", "#", _LAST_LINES.sub("", failure.reason)))
        self._reported = {each: when for each, when in self._reported.items() if now - when < REPEAT_WINDOW}
        repeated = kind in self._reported
        self._reported[kind] = now
        if not repeated:
            remedy = _JOB_LOST if failure.job_lost else _HOSTS_REMAIN
            return f"meshgate: {failure}\n  {remedy if is_interactive() else _PROGRAM_ENDS.format(remedy=remedy)}.\n"
        hosts = sorted({failure.hosts[rank] for rank in failure.ranks if rank in failure.hosts})
        on = f" on {', '.join(hosts)}" if hosts else ""
        ranks = ranks_text(failure.ranks) if failure.ranks else "another part"
        return f"meshgate: {ranks} of mesh {failure.mesh_name!r}{on} failed in the same way\n"


_reporter = FaultReporter()


def default_fault_hook(failure: MeshFailure) -> NoReturn:
    """Writes the failure and a hint to stderr, and ends the program."""
    write_fault(failure)
    raise SystemExit(1)


def write_fault(failure: MeshFailure) -> None:
    if sys.stderr is not None:
        sys.stderr.write(_reporter.text(failure, time.monotonic()))
        sys.stderr.flush()


def fault_hook() -> Callable[[MeshFailure], object]:
    """The current hook: a program may assign to ``meshgate.unhandled_fault_hook`` at any time.

    If it has assigned to ``monarch.actor.unhandled_fault_hook`` only, that one.
    """
    package = sys.modules["meshgate"]
    hook: Callable[[MeshFailure], object] = package.unhandled_fault_hook
    if hook is package._own_fault_hook:
        monarchs = monarch_api().get("unhandled_fault_hook")
        if callable(monarchs) and not (getattr(monarchs, "__module__", None) or "").startswith("monarch."):
            return monarchs
    return hook


def handle_fault(failure: MeshFailure) -> None:
    """Calls the hook. If it raises, the main thread gets a ``KeyboardInterrupt``, as with Monarch.

    An interactive session goes on: a notebook's kernel should not lose its state.
    """
    try:
        fault_hook()(failure)
    except SystemExit:
        _program.interrupt()
    except BaseException:
        log.exception("meshgate.unhandled_fault_hook failed")
        _program.interrupt()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Faults do not interrupt the main thread inside this block, which ends a job or handles the faults itself."""
    _program.start_ending()
    try:
        yield
    finally:
        _program.stop_ending()


class _Program:
    """Interrupts the main thread, at most once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may end the job, too
        self._endings = 0
        self._is_ending = threading.Event()
        self._interrupted = False

    def start_ending(self) -> None:
        with self._lock:
            self._endings += 1
            self._is_ending.set()

    def stop_ending(self) -> None:
        with self._lock:
            self._endings -= 1
            if not self._endings:
                self._is_ending.clear()

    def interrupt(self) -> None:
        """Does nothing if the program begins to end within ``LEAVE_TIMEOUT``, as after a call that failed."""
        if self._interrupted or is_interactive() or self._is_ending.wait(LEAVE_TIMEOUT):
            return
        self._interrupted = True
        # A shell starts background programs with SIGINT ignored. Unlike _thread.interrupt_main(), a signal ends waits.
        number = signal.SIGINT if callable(signal.getsignal(signal.SIGINT)) else signal.SIGTERM
        main = threading.main_thread().ident
        if main is not None:
            note_no_waits()
            signal.pthread_kill(main, number)


_program = _Program()

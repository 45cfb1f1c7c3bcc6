"""Warnings, tracebacks and reports of Ctrl-C that show what the program did, not the lines of this package."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from opcode import opmap
from types import FrameType, TracebackType
from typing import Any

_notes_waits = True

OURS = frozenset({"meshgate", "meshgate_sync"})  # packages whose errors say what the program did
TRACEBACK = "MESHGATE_TRACEBACK"  # "full": tracebacks show the frames of this package


def is_ours(frame: FrameType) -> bool:
    """Whether the frame runs code of this package, or of meshgate_sync, which refuses trees."""
    return _package(frame) in OURS


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def is_interactive() -> bool:
    """Whether this is a prompt or a notebook, which neither a fault nor Ctrl-C ends."""
    return hasattr(sys, "ps1")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as ``warnings.warn`` does, at the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def theirs(error: BaseException, errors: type[BaseException]) -> TracebackType | None:
    """The traceback of ``error`` without the frames of this package, if it is one of ``errors`` or this package has
    raised it on purpose. Its causes lose theirs as well: those that were raised inside this package, all of it."""
    if os.environ.get(TRACEBACK) == "full" or not (isinstance(error, errors) or _on_purpose(error)):
        return error.__traceback__
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        raised_here = cause.__traceback__ is not None and is_ours(cause.__traceback__.tb_frame)
        cause.__traceback__ = None if raised_here else _without_ours(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return _without_ours(error.__traceback__)


def _on_purpose(error: BaseException) -> bool:
    """Whether the innermost line of its traceback is a ``raise`` statement of this package, which speaks of what the
    program did. What Python, a library or a function of the program raises while this package runs is not, and neither
    is a failed ``assert``: those need the frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, Exception) or isinstance(error, AssertionError):
        return False
    return is_ours(trace.tb_frame) and trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _without_ours(trace.tb_next)
    hidden = _package(trace.tb_frame) in {*OURS, "cloudpickle"}  # which asks this package about each object
    return rest if hidden else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def ipython_traceback(error: BaseException) -> list[str]:
    """For the method ``_render_traceback_``, by which IPython shows an exception: its own text, without the frames of
    this package."""
    shell = sys.modules["IPython"].get_ipython()
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, theirs(error, type(error)))
    return lines


def note_no_waits() -> None:
    """From now on, waits are not noted: a fault, which has been reported, interrupts the program, not Ctrl-C."""
    global _notes_waits  # noqa: PLW0603 - as there is one main thread
    _notes_waits = False


def note_wait(interrupt: KeyboardInterrupt, waited_for: str) -> None:
    """Ctrl-C ended a wait in this package: a line with ``waited_for``, such as "while waiting for …", will take the
    place of a traceback."""
    if _notes_waits:
        vars(interrupt).setdefault("_meshgate_waited_for", waited_for)
        vars(interrupt)["_render_traceback_"] = functools.partial(ipython_traceback, interrupt)


def report_interrupt(interrupt: BaseException, consequence: str, *, also: bool = False) -> bool:
    """Writes to stderr what a noted wait was for, once, and ``consequence``; after that, another consequence only if it
    comes ``also``. Returns whether a wait was noted."""
    noted = vars(interrupt)
    if "_meshgate_waited_for" not in noted:
        return False
    again = bool(noted.get("_meshgate_reported"))
    if sys.stderr is not None and (also or not again):
        waited = "meshgate: " if again else f"\nmeshgate: interrupted {noted['_meshgate_waited_for']}. "
        sys.stderr.write(f"{waited}{consequence}\n")
        sys.stderr.flush()
    noted["_meshgate_reported"] = True
    return True


def hide_own_frames(errors: type[BaseException]) -> None:
    """From now on, ``errors`` and what this package raises on purpose are printed without its frames if they end the
    program or a cell of a notebook, and Ctrl-C in a wait of this package as a line.

    A hook that the program or another library has set stays.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        full = os.environ.get(TRACEBACK) == "full"
        ends = "The program ends, and its sessions unless detached"
        if isinstance(error, KeyboardInterrupt) and not full and report_interrupt(error, ends):
            return
        error.__traceback__ = theirs(error.with_traceback(trace), errors)  # which is what is printed
        sys.__excepthook__(kind, error, error.__traceback__)

    def show(shell: Any, kind: type[Exception], error: Exception, trace: TracebackType, tb_offset: int | None) -> None:
        shown = theirs(error.with_traceback(trace), errors)
        shell.showtraceback((kind, error, shown), tb_offset=tb_offset, running_compiled_code=True)

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = running() if running is not None else None
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), show)

"""Warnings and tracebacks that show the lines of the program that called meshgate, not those of this package."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType, TracebackType

__all__ = ["hide_own_frames", "is_ours", "theirs", "warn_caller"]

TRACEBACK = "MESHGATE_TRACEBACK"  # "full": tracebacks show the frames of this package


def is_ours(frame: FrameType) -> bool:
    """Whether the frame runs code of this package."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "meshgate"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as ``warnings.warn`` does, at the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def theirs(error: BaseException, errors: type[BaseException]) -> TracebackType | None:
    """The traceback of ``error`` without the frames of this package, if it is one of ``errors``. Its causes lose theirs
    as well: those that were raised inside this package, all of it."""
    if os.environ.get(TRACEBACK) == "full" or not isinstance(error, errors):
        return error.__traceback__
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        raised_here = cause.__traceback__ is not None and is_ours(cause.__traceback__.tb_frame)
        cause.__traceback__ = None if raised_here else _without_ours(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return _without_ours(error.__traceback__)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _without_ours(trace.tb_next)
    return rest if is_ours(trace.tb_frame) else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def hide_own_frames(errors: type[BaseException]) -> None:
    """From now on, one of ``errors`` that ends the program is printed without the frames of this package.

    A hook that the program or another library has set stays.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = theirs(error.with_traceback(trace), errors)  # which is what is printed
        sys.__excepthook__(kind, error, error.__traceback__)

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook

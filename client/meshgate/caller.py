"""Warnings that name the line of the program that called meshgate, however deep inside the package they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["is_ours", "warn_caller"]


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

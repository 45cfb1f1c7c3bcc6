"""What a job shows on stderr while it waits: ``MESHGATE_PROGRESS`` is ``auto`` (the default), ``plain`` or ``off``."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, TextIO

from typing_extensions import Self

__all__ = ["Block", "progress_mode"]


def progress_mode(stream: TextIO) -> Literal["live", "plain", "off"]:
    """What the variable and the terminal ask for. Raises ValueError on another value of the variable."""
    mode = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
    if mode not in ("auto", "plain", "off"):
        raise ValueError(f"MESHGATE_PROGRESS={mode!r}: expected auto, plain or off")
    if mode == "off":
        return "off"
    return "plain" if mode == "plain" or not stream.isatty() else "live"


class Block:
    """A ``with`` block around waiting, in which nothing is set up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

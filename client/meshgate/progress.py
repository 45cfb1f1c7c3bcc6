"""What is shown on stderr while a job starts or files are copied.

``MESHGATE_PROGRESS`` is ``auto`` (the default), ``plain`` or ``off``.
"""

from __future__ import annotations

import importlib.util
import os
from types import TracebackType
from typing import Literal, TextIO, TypeAlias

from rich.console import Console
from typing_extensions import Self

Mode: TypeAlias = Literal["live", "plain", "off"]


def progress_mode(stream: TextIO) -> Mode:
    """What the variable and the terminal, or notebook, ask for. Raises ValueError on another value of the variable."""
    mode = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
    if mode not in ("auto", "plain", "off"):
        raise ValueError(f"MESHGATE_PROGRESS={mode!r}: expected auto, plain or off")
    if mode == "off":
        return "off"
    return "live" if mode == "auto" and (stream.isatty() or _shows_widgets()) else "plain"


def _shows_widgets() -> bool:
    """Whether this is a notebook with ipywidgets, where rich replaces what it has shown in the cell."""
    return Console().is_jupyter and importlib.util.find_spec("ipywidgets") is not None


class Block:
    """A ``with`` block around waiting, in which nothing is set up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

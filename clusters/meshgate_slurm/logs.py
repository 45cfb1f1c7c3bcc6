"""The ends of log files, for the messages that explain why a job or a worker ended."""

from __future__ import annotations

import os

TAIL_BYTES = 8192
TAIL_LINES = 12
MAX_TAIL = 2000


def read_end(path: str | os.PathLike[str]) -> str:
    """The end of a file; "" if it cannot be read, such as one that is not written yet, or only on another machine."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str, whose: str) -> str:
    """``text``'s last lines below a title, to be added to a message; "" if there are none."""
    lines = text.strip()[-MAX_TAIL:].splitlines()[-TAIL_LINES:]
    return "".join([f"\nThe last lines of {whose}:", *(f"\n  {line}" for line in lines)]) if lines else ""

"""Fits texts and names that user code and Monarch produce into a message.

The models of ``messages.py`` shorten what a sender puts into them, so that an answer is never lost because it is too
long. They do not shorten what they parse: a receiver rejects it.
"""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import ValidationInfo

MAX_SENT = 65_536  # characters; JSON takes up to six bytes for one, and a header of 1 MiB holds two such texts
MAX_SENT_NAMES = 131_072  # bytes of JSON
NOTICE = 40  # characters; at least the length of the notice in place of what was cut
V = TypeVar("V")


def shorten(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters: a longer one loses its middle. Characters that UTF-8 cannot encode
    become question marks."""
    if len(text) > limit:
        kept = max(limit - NOTICE, 0)
        head, tail = text[: kept // 2], text[len(text) - (kept - kept // 2) :]
        text = f"{head}\n[{len(text) - kept} characters cut]\n{tail}"
    return text if text.isascii() else text.encode(errors="replace").decode()


def shorten_sent_text(text: V, info: ValidationInfo) -> V | str:
    """A pydantic validator that runs before the check of the length."""
    return shorten(text, MAX_SENT) if isinstance(text, str) and info.mode == "python" else text


def shorten_sent_names(names: V, info: ValidationInfo) -> V | dict[object, object]:
    """A pydantic validator for names by rank: keeps the first ones that fit."""
    if not isinstance(names, dict) or info.mode != "python":
        return names
    size = 0
    for count, name in enumerate(names.values()):
        size += len(json.dumps(name)) + 24  # the rank and the punctuation
        if size > MAX_SENT_NAMES:
            return dict(list(names.items())[:count])
    return names

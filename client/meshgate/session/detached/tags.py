"""Tags of calls, by which a program that takes over a session recognizes them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

MAX_TAG = 256  # characters

_tag: contextvars.ContextVar[str] = contextvars.ContextVar("meshgate_tag", default="")
current_tag = _tag.get


@contextlib.contextmanager
def tag(text: str) -> Iterator[None]:
    """Marks the calls made in a ``with`` block, as in ``with meshgate.tag("step-12")``.

    After ``job.attach()`` each call has its tag. The innermost block counts. Raises TypeError or ValueError if ``text``
    is not a string of 1 to 256 characters.
    """
    if not isinstance(text, str):
        raise TypeError(f"a tag must be a string, not {text!r}")
    if not text or len(text) > MAX_TAG or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"a tag must be valid text of 1 to {MAX_TAG} characters, not {text[:300]!r}")
    token = _tag.set(text)
    try:
        yield
    finally:
        _tag.reset(token)

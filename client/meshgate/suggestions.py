"""What a wrong name may stand for, as the end of an error message.

Errors are formatted when someone tries a name that does not exist, which libraries do with every object: special and
private names (``__len__``, ``_repr_svg_``) must never come here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

SIMILAR = 0.65  # below it, names of this size share no more than some letters
MOST_NAMES = 20
MOST_CHARACTERS = 100  # of a name: comparing long ones takes long


def closest(name: str, known: Iterable[str]) -> str:
    """The public name of ``known`` that is most similar to ``name``, whatever their case; "" if none is."""
    from difflib import get_close_matches  # noqa: PLC0415 - keeps the import of meshgate cheap

    folded = {each.lower(): each for each in sorted(known) if not each.startswith("_")}
    found = get_close_matches(name.lower(), folded, 1, SIMILAR) if len(name) <= MOST_CHARACTERS else []
    return folded[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``. Did you mean 'step'?``, or "" if no name is similar."""
    found = closest(name, known)
    return f". Did you mean {found!r}?" if found else ""


def names_text(names: Iterable[str]) -> str:
    """``step, evaluate and 3 more``"""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(listed[:MOST_NAMES]) + more


def wrong_arguments(
    error: TypeError, signature: inspect.Signature, kwargs: Mapping[str, Any], placeholders: int = 1
) -> str:
    """The message of ``error``, and for keywords that are not parameters, what they may stand for.

    Python names a missing argument first, which a misspelt one is as well. ``placeholders``: the number of leading
    parameters that the caller does not pass.
    """
    parameters = list(signature.parameters.values())[placeholders:]
    names = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    unknown = [name for name in kwargs if name not in names]
    if not unknown or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return str(error)
    listed = ", ".join(map(repr, unknown))
    text = str(error)
    if listed not in text:
        text += f". {listed} {'is not a parameter' if len(unknown) == 1 else 'are not parameters'}"
    meant = did_you_mean(unknown[0], (name for name in names if name not in kwargs)) if len(unknown) == 1 else ""
    return text + (meant or f". The parameters: {names_text(names) or 'none'}")

"""Expands quotes and variables as Docker does: on the laptop when a Dockerfile is checked, on hosts when it runs."""

from __future__ import annotations

import re
from collections.abc import Callable

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")


def expand(word: str, lookup: Callable[[str], str | None]) -> str:
    """Removes quotes and substitutes ``$A``, ``${A}``, ``${A:-b}`` and ``${A:+b}``.

    A variable for which ``lookup`` returns None is empty. Raises ValueError on an unclosed quote and on other forms
    with braces.
    """
    out: list[str] = []
    position, quote = 0, ""
    while position < len(word):
        character = word[position]
        if quote == "'":
            if character == "'":
                quote = ""
            else:
                out.append(character)
            position += 1
        elif character == "\\" and position + 1 < len(word):
            following = word[position + 1]
            out.append(following if not quote or following in '"$\\' else character + following)
            position += 2
        elif character in "\"'" and quote in ("", character):
            quote = "" if quote else character
            position += 1
        elif character == "$" and (reference := REFERENCE.match(word, position)):
            out.append(_value(reference, lookup))
            position = reference.end()
        elif word.startswith("${", position):
            raise ValueError(f"{word[position:]} is not supported: use ${{A}}, ${{A:-b}} or ${{A:+b}}")
        else:
            out.append(character)
            position += 1
    if quote:
        raise ValueError(f"unclosed quote: {word}")
    return "".join(out)


def _value(reference: re.Match[str], lookup: Callable[[str], str | None]) -> str:
    bare, braced, operator, other = reference.groups()
    value = lookup(bare or braced) or ""
    if operator == "-":
        return value or expand(other, lookup)
    if operator == "+":
        return expand(other, lookup) if value else ""
    return value

"""Words of a Dockerfile, read as Docker reads them: here when it is checked, and on the hosts when it is run."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["REFERENCE", "expand"]

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")


def expand(word: str, lookup: Callable[[str], str | None]) -> str:
    """A word of a Dockerfile as Docker reads it: quotes taken off, ``$A``, ``${A}``, ``${A:-b}``, ``${A:+b}`` put in.

    A variable that ``lookup`` does not know is empty. Raises ValueError on a quote that does not
    end, and on other forms with braces.
    """
    out: list[str] = []
    place, quote = 0, ""
    while place < len(word):
        character = word[place]
        if quote == "'":
            if character == "'":
                quote = ""
            else:
                out.append(character)
            place += 1
        elif character == "\\" and place + 1 < len(word):
            following = word[place + 1]
            out.append(following if not quote or following in '"$\\' else character + following)
            place += 2
        elif character in "\"'" and quote in ("", character):
            quote = "" if quote else character
            place += 1
        elif character == "$" and (found := REFERENCE.match(word, place)):
            out.append(_value(found, lookup))
            place = found.end()
        elif word.startswith("${", place):
            raise ValueError(
                f"{word[place:]} is not supported: of the forms with braces ${{A}}, ${{A:-b}}, ${{A:+b}} are"
            )
        else:
            out.append(character)
            place += 1
    if quote:
        raise ValueError(f"a quote does not end: {word}")
    return "".join(out)


def _value(found: re.Match[str], lookup: Callable[[str], str | None]) -> str:
    plain, braced, operator, other = found.groups()
    value = lookup(plain or braced) or ""
    if operator == "-":
        return value or expand(other, lookup)
    if operator == "+":
        return expand(other, lookup) if value else ""
    return value

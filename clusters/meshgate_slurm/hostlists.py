"""Slurm's lists of nodes: ``n[1-3,07],login`` as names."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_NODES = 65_536
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """The names in ``text``, in order. Raises ValueError if it is malformed or names too many nodes."""
    found: list[str] = []
    for item in _split(text):
        for name in _expand_item(item):
            found.append(name)
            if len(found) > MAX_NODES:
                raise ValueError(f"the list {text[:80]!r} names more than {MAX_NODES} nodes")
    return tuple(found)


def _split(text: str) -> Iterator[str]:
    """The items between the commas that are not in brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth != 0:
        raise ValueError(f"unbalanced brackets in {text[:80]!r}")
    if text[start:]:
        yield text[start:]


def _expand_item(item: str) -> Iterator[str]:
    found = _BRACKETS.search(item)
    if found is None:
        yield item
        return
    before, after = item[: found.start()], item[found.end() :]
    for part in found[1].split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a number or a range of numbers")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand_item(after):
                yield f"{before}{number:0{len(first)}d}{rest}"

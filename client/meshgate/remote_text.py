"""Texts of workers, for people: tracebacks that begin in the reader's code, with files named as in the project.

A traceback of a worker begins in Monarch and in what meshgate runs there, and its files are those of the snapshot of a
version, ``…/snapshots/<digest>/pkg/model.py``, which hosts of one machine have in places of their own. What is left
says ``pkg/model.py``.
"""

from __future__ import annotations

import re

__all__ = ["for_people", "in_project"]

_SNAPSHOT = re.compile(r'File "[^"\n]*/snapshots/[0-9a-f]{64}/')
_OURS = "|".join(
    (
        r'[^"\n]*/monarch/_src/actor/',
        r'[^"\n]*/meshgate_gateway/engine/',
        r"<_meshgate_sync_",
        r"<frozen importlib",
        r'[^"\n]*/importlib/__init__\.py',
    )
)
_OUR_FRAME = rf'File "(?:{_OURS})[^\n]*\n(?:(?P=indent)  [^\n]*\n)*'  # with the code lines below it
# A traceback's first line, and the frames of ours that it begins with.
_BEGIN = re.compile(
    rf"^(?P<head>[^\n]*Traceback [^\n]*\n)(?P<indent> *){_OUR_FRAME}(?:(?P=indent){_OUR_FRAME})*"
    r"(?P<more>(?P=indent)File )?",
    re.MULTILINE,
)
_POISONED = "Cannot spawn new actors on mesh with supervision events"


def in_project(text: str) -> str:
    """``text`` with the files of snapshots named by their place in the project."""
    return _SNAPSHOT.sub('File "', text)


def for_people(text: str) -> str:
    """``text`` with the tracebacks in it from where its reader's code begins. One that has none of that stays whole,
    unless it only says how another was told."""
    several = text.count("Traceback ") > 1

    def begin(found: re.Match[str]) -> str:
        if found["more"]:
            return found["head"] + found["more"]
        return "" if several and found["head"].lstrip().startswith("Traceback ") else found[0]

    told = in_project(_BEGIN.sub(begin, text))
    if _POISONED in text:
        told += "\nActors failed in these processes before, and Monarch spawns no others in them: spawn new processes"
    return told

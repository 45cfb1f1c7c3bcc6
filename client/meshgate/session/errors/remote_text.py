"""Makes workers' tracebacks readable: they start in the user's code and name files relative to the project.

A worker's traceback starts with frames of Monarch and meshgate, and its files are those of a snapshot,
``…/snapshots/<digest>/pkg/model.py``, whose path differs from host to host. What remains says ``pkg/model.py``.
"""

from __future__ import annotations

import re

_SNAPSHOT = re.compile(r'File "[^"\n]*/snapshots/[0-9a-f]{64}/')
_INTERNAL_FILES = "|".join(
    (
        r'[^"\n]*/monarch/_src/actor/',
        r'[^"\n]*/meshgate_gateway/engine/',
        r"<_meshgate_sync_",
        r"<frozen importlib",
        r'[^"\n]*/importlib/__init__\.py',
    )
)
_INTERNAL_FRAME = rf'File "(?:{_INTERNAL_FILES})[^\n]*\n(?:(?P=indent)  [^\n]*\n)*'  # with the code lines below it
# The first line of a traceback, and the internal frames that follow it. Those of an exception group begin with "  | ".
_TRACEBACK_START = re.compile(
    rf"^(?P<head>[^\n]*Traceback [^\n]*\n)(?P<indent>(?: *\|)? *){_INTERNAL_FRAME}(?:(?P=indent){_INTERNAL_FRAME})*"
    r"(?P<more>(?P=indent)File )?",
    re.MULTILINE,
)
_BEFORE_EXCEPTION = re.compile(r"^(?:  (?:\|   )?File |Traceback).*$", re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:  \| )?(?P<line>[^\s|+].*)$", re.MULTILINE)
_PICKLES_RESULT = re.compile(r'Traceback [^\n]*\n *File "[^"\n]*/cloudpickle/')
_POISONED = "Cannot spawn new actors on mesh with supervision events"


def without_snapshot_paths(text: str) -> str:
    """``text`` with the files of snapshots named relative to the project."""
    return _SNAPSHOT.sub('File "', text)


def readable_report(text: str) -> str:
    """``text`` with the leading internal frames of each traceback removed.

    A traceback of internal frames only is kept, or dropped if ``text`` has another.
    """
    several = text.count("Traceback ") > 1

    def shorten(found: re.Match[str]) -> str:
        if found["more"]:
            return found["head"] + found["more"]
        return "" if several and found["head"].lstrip().startswith("Traceback ") else found[0]

    report = without_snapshot_paths(_TRACEBACK_START.sub(shorten, text))
    if _POISONED in text:
        report += "\nAn actor failed in these processes, so Monarch spawns no others in them: spawn new processes"
    return report


def exception_line(formatted: str) -> str:
    """The line of a formatted exception that has its type and the first line of its message; "" if there is none."""
    start = max((before.end() for before in _BEFORE_EXCEPTION.finditer(formatted)), default=0)
    found = _EXCEPTION.search(formatted, start)
    return found["line"] if found is not None else ""


def result_unpicklable(report: str) -> bool:
    """Whether a ``readable_report`` is of an endpoint that returned, with a value that cannot be pickled."""
    return _PICKLES_RESULT.search(report) is not None

"""Detects source files that were saved after this program loaded them.

Workers import classes by name from the code that was synced last. But a class of the script itself is pickled by value,
as this process has it, and the endpoints and signatures of any class are those that this process imported. When such a
file changes, only a restart or a reload brings this process up to date, so warnings and errors say so.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import threading
import time
from types import ModuleType

_START_TIME = time.time()
_PARSING = threading.Lock()


def parse_source(text: str, filename: str = "<unknown>", version: tuple[int, int] | None = None) -> ast.Module:
    """``ast.parse``, by one thread at a time: before Python 3.11.8, another thread that parses can make it raise
    ``SystemError: AST constructor recursion depth mismatch`` (CPython issue 106905)."""
    with _PARSING:
        return ast.parse(text, filename, feature_version=version)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _script() -> tuple[str, str | None]:
    """The path and text of this program's script; "" and None at a prompt or in a notebook."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    path = os.path.abspath(path) if isinstance(path, str) else ""
    return path, _read(path) if path else None


_SCRIPT, _SCRIPT_TEXT = _script()  # read at import, when the script has hardly started


def source_text(filename: str) -> str:
    """The source of code compiled from ``filename``; for the script, as it was when the program started."""
    if _SCRIPT_TEXT is not None and os.path.abspath(filename) == _SCRIPT:
        return _SCRIPT_TEXT
    return "".join(linecache.getlines(filename))


def changed_script(Class: type) -> str | None:
    """The script's path, if it defines ``Class`` and has changed since the program started."""
    if Class.__module__ != "__main__" or _SCRIPT_TEXT is None or _read(_SCRIPT) == _SCRIPT_TEXT:
        return None
    return _SCRIPT


def current_class(Class: type) -> type:
    """The class that its module has under this name now, which differs from ``Class`` after a reload."""
    found: object = sys.modules.get(Class.__module__)
    for part in Class.__qualname__.split("."):
        found = getattr(found, part, None)
    same = isinstance(found, type) and (found.__module__, found.__qualname__) == (Class.__module__, Class.__qualname__)
    return found if isinstance(found, type) and same else Class


def restart_hint(Class: type) -> str:
    """What to do, to be appended to an error, if the file of ``Class`` changed since it was imported; else empty."""
    module = sys.modules.get(Class.__module__)
    path = _SCRIPT if Class.__module__ == "__main__" else getattr(module, "__file__", None)
    try:
        if not isinstance(path, str) or os.stat(path).st_mtime <= _START_TIME:
            return ""
    except OSError:
        return ""
    reload = f"call importlib.reload({Class.__module__}) or " if Class.__module__ != "__main__" else ""
    return f". {path} was saved after this program started: {reload}restart the program"


def source_defines(Class: type, name: str) -> bool:
    """Whether the saved source of ``Class`` defines ``name`` in it."""
    module: ModuleType | None = sys.modules.get(Class.__module__)
    text = _read(str(getattr(module, "__file__", "")))
    try:
        nodes: list[ast.AST] = [parse_source(text or "")]
    except SyntaxError:
        return False
    for part in (*Class.__qualname__.split("."), name):
        nodes = [child for node in nodes for child in getattr(node, "body", ()) if getattr(child, "name", "") == part]
    return bool(nodes)

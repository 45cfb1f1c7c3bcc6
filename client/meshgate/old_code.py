"""What this program runs itself and was saved since: nothing brings that up to date but to start it again.

What travels by name is looked up on the workers, in what was synced last. But a class of the script travels as the code
that this process has, and the endpoints of a class, with their parameters, are those of the class that it has imported.
So whoever saved such a file is told.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import time
from types import ModuleType

__all__ = ["advice", "has_now", "of_script", "renewed", "text_of"]

_BEGUN = time.time()


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _script() -> tuple[str, str | None]:
    """Where the script of this program is, and what it says; "" and None at a prompt or in a notebook."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    path = os.path.abspath(path) if isinstance(path, str) else ""
    return path, _read(path) if path else None


_SCRIPT, _TEXT = _script()  # as soon as this is imported: the script has hardly begun


def text_of(filename: str) -> str:
    """The source of code that was compiled from ``filename``; the script's as it was when it was started."""
    if _TEXT is not None and os.path.abspath(filename) == _SCRIPT:
        return _TEXT
    return "".join(linecache.getlines(filename))


def of_script(Class: type) -> str | None:
    """The script's path, where ``Class`` is defined in it and it is another now than when it was started."""
    if Class.__module__ != "__main__" or _TEXT is None or _read(_SCRIPT) == _TEXT:
        return None
    return _SCRIPT


def renewed(Class: type) -> type:
    """The class that has the name of ``Class`` now, where its module was reloaded here; otherwise ``Class``."""
    found: object = sys.modules.get(Class.__module__)
    for part in Class.__qualname__.split("."):
        found = getattr(found, part, None)
    same = isinstance(found, type) and (found.__module__, found.__qualname__) == (Class.__module__, Class.__qualname__)
    return found if isinstance(found, type) and same else Class


def advice(Class: type) -> str:
    """What to do where the file of ``Class`` was saved since it was imported; otherwise empty."""
    module = sys.modules.get(Class.__module__)
    path = _SCRIPT if Class.__module__ == "__main__" else getattr(module, "__file__", None)
    try:
        if not isinstance(path, str) or os.stat(path).st_mtime <= _BEGUN:
            return ""
    except OSError:
        return ""
    reload = f"importlib.reload({Class.__module__}), or " if Class.__module__ != "__main__" else ""
    return f". {path} was saved after this program began: {reload}start the program again"


def has_now(Class: type, name: str) -> bool:
    """Whether the file of ``Class`` says by now that it has ``name``."""
    module: ModuleType | None = sys.modules.get(Class.__module__)
    text = _read(str(getattr(module, "__file__", "")))
    try:
        nodes: list[ast.AST] = [ast.parse(text or "")]
    except SyntaxError:
        return False
    for part in (*Class.__qualname__.split("."), name):
        nodes = [below for node in nodes for below in getattr(node, "body", ()) if getattr(below, "name", "") == part]
    return bool(nodes)

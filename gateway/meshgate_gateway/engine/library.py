"""The modules of ``meshgate_sync`` that hosts run, as source text: they go to workers that do not have them.

The list is what the entry points import, followed through the sources; a test holds every module in it to the
standard library.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

PACKAGE = "meshgate_sync"
OF_HOSTS = ("agent", "plan")
OF_PROCESSES = ("home", "reload")


@functools.cache
def library(entry_points: tuple[str, ...]) -> dict[str, str]:
    """``entry_points`` and all that they import: module name (within the package) to source."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    found: dict[str, str] = {}
    pending = list(entry_points)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = (folder / f"{name}.py").read_text()
            pending += siblings(found[name])
    return found


def siblings(source: str) -> list[str]:
    """The modules of its own package that ``source`` imports, as ``from .name import …``."""
    return [
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    ]

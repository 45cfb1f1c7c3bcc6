"""Source texts of the ``meshgate_sync`` modules that run on workers, which may have nothing but torchmonarch.

``worker_sources`` starts from entry points and follows their imports. A test ensures that each of these modules imports
the standard library only.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

PACKAGE = "meshgate_sync"
AGENT_MODULES = ("distribution.agent", "relay.plan")
PROCESS_MODULES = ("store.home", "reload.reload")


@functools.cache
def worker_sources(entry_points: tuple[str, ...]) -> dict[str, str]:
    """The sources of ``entry_points`` and of all that they import, by module name within the package."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    found: dict[str, str] = {}
    pending = list(entry_points)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = (folder / f"{name.replace('.', '/')}.py").read_text()
            pending += imported_modules(name, found[name])
    return found


def imported_modules(name: str, source: str) -> list[str]:
    """The modules of the package that module ``name`` imports as ``from .module import …``."""
    return [
        ".".join([*name.split(".")[: -node.level], node.module])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    ]

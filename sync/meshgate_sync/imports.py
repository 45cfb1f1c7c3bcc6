"""Which modules of a process use which, read from their files and from what they hold. Nothing is imported.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Mapping
from types import ModuleType

__all__ = ["affected", "assigned", "users"]


def affected(modules: Mapping[str, ModuleType], changed: Iterable[str]) -> list[str]:
    """Of ``modules`` (in the order in which they were loaded) those in ``changed``, and all that use them, in the order
    in which they are to be imported again: that in which they were loaded. Of those that use each other the one
    that was complete last goes first, for it is the one that imported the others."""
    uses = {name: users(module, modules) for name, module in modules.items()}
    wanted = set(changed)
    while more := {name for name, used in uses.items() if used & wanted} - wanted:
        wanted |= more
    order = [name for name in modules if name in wanted]
    reached = {name: _reached(name, uses, wanted) for name in order}
    entries = []
    for name in order:
        ring = [other for other in order if name in reached[other] and other in reached[name]]
        entries.append(ring[-1] if ring else name)
    return list(dict.fromkeys([each for pair in zip(entries, order, strict=True) for each in pair]))


def _reached(start: str, uses: Mapping[str, set[str]], within: set[str]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        more = (uses[pending.pop()] & within) - found
        found |= more
        pending += more
    return found


def users(module: ModuleType, modules: Mapping[str, ModuleType]) -> set[str]:
    """Which of ``modules`` the module uses: what its file imports, and what it refers to by other ways."""
    by_object = {id(other): name for name, other in modules.items()}
    found = _imported(module, modules)
    for attribute, value in list(vars(module).items()):
        if not isinstance(value, ModuleType):
            name = getattr(value, "__module__", None)
        else:
            name = by_object.get(id(value))
            if name == f"{module.__name__}.{attribute}":
                continue  # a package holds its parts, whoever imported them; where it did, its file says so
        if isinstance(name, str) and name in modules:
            found.add(name)
    return found - {module.__name__}


def _imported(module: ModuleType, modules: Mapping[str, ModuleType]) -> set[str]:
    """Which of ``modules`` the module's file imports, or takes something from."""
    try:
        with open(str(module.__file__), "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return set()  # its file is no longer there to be read: what it refers to says the rest
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                names.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            parts_of = {f"{base}.{alias.name}" for alias in node.names}
            names.update(name if name in modules else base for name in parts_of)
    return names & modules.keys()


def assigned(path: str) -> set[str]:
    """What the module in this file gives a name to at its top level, as far as its text says."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        table = symtable.symtable(text.decode(), path, "exec")
    except (SyntaxError, ValueError):
        return set()  # in another encoding, or broken since: nothing is known to be gone
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}

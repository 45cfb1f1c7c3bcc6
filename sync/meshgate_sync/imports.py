"""Which modules of a process use which, read from their files and from what they hold. Nothing is imported.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

__all__ = ["affected", "assigned", "imports_in"]


def affected(modules: Mapping[str, ModuleType], changed: Iterable[str]) -> list[str]:
    """Of ``modules`` (in the order in which they were loaded) those in ``changed``, and all that use them, in the order
    in which they are to be imported again: that in which they were loaded. Of those that use each other the one
    that was complete last goes first, for it is the one that imported the others."""
    by_object = {id(module): name for name, module in modules.items()}
    uses = {name: _users(module, modules, by_object) for name, module in modules.items()}
    wanted = set(changed)
    while more := {name for name, used in uses.items() if used & wanted} - wanted:
        wanted |= more
    order = [name for name in modules if name in wanted]
    circular = _circular(wanted, uses)
    reached = {name: _reached(name, uses, circular) for name in circular}
    entries = []
    for name in order:
        ring = (
            [other for other in order if other in reached[name] and name in reached[other]] if name in circular else []
        )
        entries.append(ring[-1] if ring else name)
    return list(dict.fromkeys([each for pair in zip(entries, order, strict=True) for each in pair]))


def _circular(names: set[str], uses: Mapping[str, set[str]]) -> set[str]:
    """Those of ``names`` that use each other, and those that use such: mostly none."""
    left = set(names)
    while leaves := {name for name in left if not uses[name] & left}:
        left -= leaves
    return left


def _reached(start: str, uses: Mapping[str, set[str]], within: set[str]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        more = (uses[pending.pop()] & within) - found
        found |= more
        pending += more
    return found


def _users(module: ModuleType, modules: Mapping[str, ModuleType], by_object: Mapping[int, str]) -> set[str]:
    """Which of ``modules`` the module uses: what its file imports, and what it refers to by other ways."""
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
        with open(str(module.__file__), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return set()  # its file is no longer there to be read: what it refers to says the rest
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    names: set[str] = set()
    for node in imports_in(text):
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


# An import, wherever a statement may begin, with the lines that it goes on in. To parse whole files takes a hundred
# times as long, and every reload looks at all of a project.
_GOES_ON = r"\\\r?\n"
_IN_PARENTHESES = r"\((?:#[^\n]*|[^)#])*\)"
_IMPORT = re.compile(
    rf"(?:^|[;:])[ \t]*(?P<statement>(?:import\b|from\b(?:[^\n;#\"'\\]|{_GOES_ON})*?\bimport\b)"
    rf"(?:[^\n\\(;#]|{_GOES_ON}|{_IN_PARENTHESES})*)",
    re.MULTILINE,
)


def imports_in(text: str) -> Iterator[ast.stmt]:
    """The imports in ``text``; also what looks like one in a string, for one too many does no harm."""
    for found in _IMPORT.finditer(text):
        try:
            yield from ast.parse(found["statement"]).body
        except (SyntaxError, ValueError):
            continue


def assigned(path: str) -> set[str]:
    """What the module in this file gives a name to at its top level, as far as its text says."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        table = symtable.symtable(text.decode(), path, "exec")
    except (SyntaxError, ValueError):
        return set()  # in another encoding, or broken since: nothing is known to be gone
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}

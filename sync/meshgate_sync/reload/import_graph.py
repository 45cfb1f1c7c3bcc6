"""The import graph of loaded modules, read from their files and from what they refer to. Imports nothing.

A reload of everything would need no graph, but executes each module again: 1.5 ms a module of 50 lines, where a change
to one module at the end of the graph takes a tenth of that; and modules that have nothing to do with the change would
lose their state. ``python -m benchmarks --only mechanisms`` measures both.

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
    """The modules in ``changed``, those that import them, directly or not, and those that import modules by computed
    names, in the order to import them again. ``modules`` are in the order in which they were loaded.

    That order is kept, except that of modules which import each other the one that was complete last comes first: it
    imported the others.
    """
    by_object = {id(module): name for name, module in modules.items()}
    sources = {name: _source(module) for name, module in modules.items()}
    uses = {name: _users(module, sources[name], modules, by_object) for name, module in modules.items()}
    wanted = set(changed)
    if wanted:
        wanted |= {name for name, source in sources.items() if _COMPUTED.search(source)}
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
    """The ``names`` on import cycles, and those that import such; usually none."""
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


def _users(
    module: ModuleType, source: str, modules: Mapping[str, ModuleType], by_object: Mapping[int, str]
) -> set[str]:
    """Which of ``modules`` the module uses: those its source imports, and those it refers to."""
    found = _imported(module, source, modules)
    for attribute, value in list(vars(module).items()):
        if not isinstance(value, ModuleType):
            name = getattr(value, "__module__", None)
        else:
            name = by_object.get(id(value))
            if name == f"{module.__name__}.{attribute}":
                continue  # a package refers to its submodules in any case
        if isinstance(name, str) and name in modules:
            found.add(name)
    return found - {module.__name__}


def _source(module: ModuleType) -> str:
    try:
        with open(str(module.__file__), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # the file is gone; what the module refers to remains


def _imported(module: ModuleType, source: str, modules: Mapping[str, ModuleType]) -> set[str]:
    """Which of ``modules`` the import statements of ``source`` name."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    names: set[str] = set()
    for node in imports_in(source):
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


# An import by a name that is computed when it runs: which module it imports cannot be read from the source.
_COMPUTED = re.compile(r"\b(?:import_module|__import__|spec_from_file_location|iter_modules|entry_points|runpy)\b")

# An import statement, wherever one may begin, with its continuation lines. Parsing whole files takes a hundred times as
# long, and every reload looks at all of a project.
_GOES_ON = r"\\\r?\n"
_IN_PARENTHESES = r"\((?:#[^\n]*|[^)#])*\)"
_IMPORT = re.compile(
    rf"(?:^|[;:])[ \t]*(?P<statement>(?:import\b|from\b(?:[^\n;#\"'\\]|{_GOES_ON})*?\bimport\b)"
    rf"(?:[^\n\\(;#]|{_GOES_ON}|{_IN_PARENTHESES})*)",
    re.MULTILINE,
)


def imports_in(text: str) -> Iterator[ast.stmt]:
    """The import statements in ``text``, and what looks like one in a string: an extra one does no harm."""
    for found in _IMPORT.finditer(text):
        try:
            yield from ast.parse(found["statement"]).body
        except (SyntaxError, ValueError):
            continue


def assigned(path: str) -> set[str]:
    """The names that the module in this file binds at its top level."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        table = symtable.symtable(text.decode(), path, "exec")
    except (SyntaxError, ValueError):
        return set()  # in another encoding, or invalid by now: no name is known to be gone
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}

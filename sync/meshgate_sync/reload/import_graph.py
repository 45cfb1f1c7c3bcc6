"""The import graph of loaded modules, read from their files and from what they refer to. Imports nothing.

A reload of everything would need no graph, but executes each module again: 1.5 ms a module of 50 lines, where a change
to one module at the end of the graph takes a tenth of that; and modules that have nothing to do with the change would
lose their state. ``python -m benchmarks --only mechanisms`` measures both.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import functools
import re
import symtable
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any


def affected(modules: Mapping[str, ModuleType], changed: Iterable[str]) -> list[str]:
    """The modules in ``changed``, those that import them, directly or not, and those that import modules by computed
    names, in the order to import them again. ``modules`` are in the order in which they were loaded.

    That order is kept, except that of modules which import each other the one that was complete last comes first: it
    imported the others.
    """
    graph = _Graph(modules)
    wanted = set(changed)
    if wanted:
        wanted |= graph.computed
    while more := graph.users(wanted) - wanted:
        wanted |= more
    order = [name for name in modules if name in wanted]
    uses = {name: graph.used_by(name) for name in order}
    circular = _circular(set(order), uses)
    reached = {name: _reached(name, uses, circular) for name in circular}
    entries = []
    for name in order:
        ring = (
            [other for other in order if other in reached[name] and name in reached[other]] if name in circular else []
        )
        entries.append(ring[-1] if ring else name)
    return list(dict.fromkeys([each for pair in zip(entries, order, strict=True) for each in pair]))


class _Graph:
    """Which modules each module uses. Parsing a file takes twenty times as long as reading its words, so only files
    are parsed that have a word of the name of a module in question."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        by_object = {id(module): name for name, module in modules.items()}
        self._modules = modules
        self._sources = {name: _source(module) for name, module in modules.items()}
        self._words = {name: set(_WORD.findall(source)) for name, source in self._sources.items()}
        self._refers = {name: _referred(module, modules, by_object) for name, module in modules.items()}
        self._parsed: dict[str, set[str]] = {}
        self.computed = {name for name, words in self._words.items() if words & _COMPUTED}

    def users(self, used: set[str]) -> set[str]:
        """The modules that use any of the modules ``used``."""
        words = {name.rpartition(".")[2] for name in used}
        found = set()
        for name in self._modules:
            # ``from . import x`` has no word of the package that it imports.
            named = words & self._words[name] or not used.isdisjoint(_packages_of(name))
            if self._refers[name] & used or (named and self._imported(name) & used):
                found.add(name)
        return found

    def used_by(self, name: str) -> set[str]:
        return (self._imported(name) | self._refers[name]) - {name}

    def _imported(self, name: str) -> set[str]:
        if name not in self._parsed:
            self._parsed[name] = _imported(self._modules[name], self._sources[name], self._modules)
        return self._parsed[name]


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


def _packages_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _referred(module: ModuleType, modules: Mapping[str, ModuleType], by_object: Mapping[int, str]) -> set[str]:
    """Which of ``modules`` the module refers to, or has an object of."""
    found = set()
    for attribute, value in list(vars(module).items()):
        if not issubclass(type(value), ModuleType):
            name = read_attribute(value, "__module__")
        else:
            name = by_object.get(id(value))
            if name == f"{module.__name__}.{attribute}":
                continue  # a package refers to its submodules in any case
        if issubclass(type(name), str) and name in modules:
            found.add(name)
    return found - {module.__name__}


def read_attribute(thing: object, name: str) -> Any:
    """The attribute of a user's object; None if it has none, or raises instead, as those of lazy proxies do."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - user code: whatever it raises, it refers to nothing
        return None


def _source(module: ModuleType) -> str:
    try:
        with open(str(module.__file__), encoding="utf-8-sig", errors="replace") as file:  # a BOM is no syntax error
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


_WORD = re.compile(r"\w+")

# An import by a name that is computed when it runs: which module it imports cannot be read from the source.
_COMPUTED = frozenset(
    {"import_module", "__import__", "spec_from_file_location", "iter_modules", "entry_points", "runpy"}
)


@functools.lru_cache(maxsize=4096)  # most files are the same in the next reload
def imports_in(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements in ``text``; none if Python cannot parse it, or it is nested too deeply for that."""
    try:
        pending: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        else:  # only these have statements in them; expressions, which are most of a tree, have none
            for block in ("finalbody", "orelse", "handlers", "cases", "body"):
                inner = getattr(node, block, None)
                pending += reversed(inner) if isinstance(inner, list) else ()
    return tuple(found)


def assigned(path: str) -> set[str]:
    """The names that the module in this file binds at its top level."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        table = symtable.symtable(text.decode(), path, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # in another encoding, or invalid by now: no name is known to be gone
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}

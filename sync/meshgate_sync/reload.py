"""Brings a running process to another version: reloads the modules that changed, and those that import them.

A module is reloaded when its file differs between the two snapshots, or when it uses a module that is. What is reloaded
comes after what it uses. Every file is compiled before anything is changed, so that a syntax error leaves the process
as it was.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import filecmp
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Plan", "Reloaded", "moved_modules", "one_at_a_time", "plan_reload", "reload_order", "still_old", "users"]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """``modules`` in the order in which they were reloaded; ``vanished``: their files are no longer there;
    ``old_classes``: actor classes of which objects live that still run the code from before."""

    modules: tuple[str, ...]
    vanished: tuple[str, ...]
    old_classes: tuple[str, ...]


one_at_a_time = threading.Lock()
"""Held while this process is brought to another version."""

_unfinished: set[str] = set()
"""Modules that were to be reloaded when one of them failed; wherever they say they are from, they are to be again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A reload that can be carried out: what is in ``order`` compiles. ``here``: the modules that came from another
    version, with its directory and their file below it."""

    path: str
    here: Mapping[str, tuple[str, str]]
    order: Sequence[str]
    vanished: Sequence[str]

    def carry_out(self, actor: type) -> Reloaded:
        """Once the version is on ``sys.path``. ``actor`` is the base of actor classes.

        What a reloaded module raises passes through, with the modules before it reloaded; the next reload, to whatever
        version, begins with all of them again.
        """
        for name, (directory, _) in self.here.items():
            _move_search_path(sys.modules[name], directory, self.path)
        importlib.invalidate_caches()
        _unfinished.update(self.order)
        for name in self.order:
            importlib.reload(sys.modules[name])
        _unfinished.clear()
        return Reloaded(tuple(self.order), tuple(self.vanished), still_old(actor, self.order))


def plan_reload(before: Sequence[str], path: str) -> Plan:
    """What moves this process from the snapshots ``before`` to the one at ``path``. Changes nothing.

    Raises SyntaxError where a file that would be reloaded has one.
    """
    path = os.path.realpath(path)
    found = moved_modules(sys.modules, [*before, path])
    here = {name: place for name, place in found.items() if place[0] != path or name in _unfinished}
    changed, vanished = [], []
    for name, (directory, relative) in here.items():
        new = os.path.join(path, relative)
        if not os.path.exists(new):
            vanished.append(name)
        elif name in _unfinished or not filecmp.cmp(os.path.join(directory, relative), new, shallow=False):
            changed.append(name)
    modules = {name: sys.modules[name] for name in here}
    order = [name for name in reload_order(modules, changed) if name not in vanished]
    for name in order:
        _compile(os.path.join(path, here[name][1]))
    return Plan(path, here, order, vanished)


def moved_modules(modules: Mapping[str, ModuleType], before: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Which of ``modules`` came from one of the directories ``before``: the directory, and the file below it."""
    directories = [os.path.realpath(directory) for directory in before]
    found = {}
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or name == "__main__":
            continue
        real = os.path.realpath(file)
        for directory in directories:
            if real.startswith(directory + os.sep):
                found[name] = (directory, os.path.relpath(real, directory))
    return found


def reload_order(modules: Mapping[str, ModuleType], changed: Iterable[str]) -> list[str]:
    """``changed`` and all that use them, each after what it uses; among those that use each other, by name."""
    uses = {name: users(module, modules) for name, module in modules.items()}
    wanted = set(changed)
    grown = True
    while grown:
        more = {name for name, used in uses.items() if used & wanted} - wanted
        wanted |= more
        grown = bool(more)
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for used in sorted(uses[name] & wanted):
            visit(used)
        order.append(name)

    for name in sorted(wanted):
        visit(name)
    return order


def users(module: ModuleType, modules: Mapping[str, ModuleType]) -> set[str]:
    """Which of ``modules`` the module uses: what its file imports, and what it refers to by other ways."""
    by_object = {id(other): name for name, other in modules.items()}
    found = {name for name in _imported(module) if name in modules}
    for value in list(vars(module).values()):
        name = by_object.get(id(value)) if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in modules:
            found.add(name)
    return found - {module.__name__, module.__name__.rpartition(".")[0]}  # a package is not reloaded for its parts


def _imported(module: ModuleType) -> set[str]:
    """The names of modules that the module's file imports, and of those that what it imports from might be."""
    try:
        with open(str(module.__file__), "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return set()  # its file is no longer there to be read: what it refers to says the rest
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def still_old(actor: type, reloaded: Iterable[str]) -> tuple[str, ...]:
    """The actor classes of reloaded modules of which objects live that were made from the class before."""
    names = set(reloaded)
    old = set()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, actor) and kind.__module__ in names:
            current: object = sys.modules[kind.__module__]
            for part in kind.__qualname__.split("."):
                current = getattr(current, part, None)
            if current is not kind:
                old.add(f"{kind.__module__}.{kind.__qualname__}")
    return tuple(sorted(old))


def _compile(path: str) -> None:
    with open(path, "rb") as file:
        compile(file.read(), path, "exec", dont_inherit=True)


def _move_search_path(module: ModuleType, before: str, path: str) -> None:
    """A package finds its parts in the new snapshot, whether or not it is reloaded itself."""
    search = getattr(module, "__path__", None)
    if isinstance(search, list):
        search[:] = [
            path + os.path.realpath(place)[len(before) :] if os.path.realpath(place).startswith(before) else place
            for place in search
        ]

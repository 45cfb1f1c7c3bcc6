"""Brings a running process to another version: reloads the modules that changed, and those that import them.

A module is reloaded when its file differs between the two snapshots, or when it uses a module that is. It is executed
again in the module object that it is, as ``importlib.reload`` does, so that what live objects call in it is new. But it
is imported again to that end, with all the others: each is executed when the first of them asks for it, as in a new
process, and what none of them can have there they cannot have here.

Either all is reloaded or nothing: every file is compiled before anything is changed, and where a module raises, all of
them are again as they were.

Imports nothing but the standard library.
"""

from __future__ import annotations

import filecmp
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from .errors import CannotReload
from .imports import affected, assigned

__all__ = ["Plan", "Reloaded", "moved_modules", "one_at_a_time", "plan_reload", "still_old"]

EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """``modules`` in the order in which they were reloaded; ``vanished``: their files are no longer there, and they can
    no longer be imported; ``old_classes``: actor classes of which objects live that still run the code from before."""

    modules: tuple[str, ...]
    vanished: tuple[str, ...]
    old_classes: tuple[str, ...]


one_at_a_time = threading.Lock()
"""Held while this process is brought to another version."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A reload to the snapshot ``path`` that can be carried out: what is in ``again`` compiles. ``here``: the modules
    that came from another version, with their file there; ``new``: those of them that are in this one, with their file.
    """

    path: str
    here: Mapping[str, str]
    new: Mapping[str, str]
    again: Sequence[str]
    vanished: Sequence[str]

    def carry_out(self, actor: type) -> Reloaded:
        """Once the version is on ``sys.path``. ``actor`` is the base of actor classes.

        What a reloaded module raises passes through, with all modules as they were.
        """
        importlib.invalidate_caches()
        kinds = [kind for kind in set(map(type, gc.get_objects())) if issubclass(kind, actor)]
        gone = {name: self._gone_names(name) for name in self.again}
        anew = _Anew({name: sys.modules[name] for name in self.again}, self.new)
        change = _Change(set(sys.modules), self.path)
        try:
            for name, file in self.new.items():
                change.move(sys.modules[name], self.here[name], file)
            for name in self.vanished:
                change.drop(name)
            for name in self.again:
                change.clear(name, gone[name])
            anew.carry_out(self.again)
        except BaseException:
            change.take_back()
            raise
        old = still_old(kinds, (*self.again, *self.vanished))
        if old:
            change.give_back(gone)
        return Reloaded(tuple(anew.done), tuple(self.vanished), old)

    def _gone_names(self, name: str) -> set[str]:
        """What the module's file gave a name to and no longer does."""
        return assigned(self.here[name]) - assigned(self.new[name])


def plan_reload(before: Sequence[str], path: str) -> Plan:
    """What moves this process from the snapshots ``before`` to the one at ``path``. Changes nothing.

    Raises SyntaxError where a file that would be reloaded has one, and CannotReload where a compiled module changed.
    """
    path = os.path.realpath(path)
    here, new = {}, {}
    for name, (directory, relative) in moved_modules(sys.modules, before).items():
        if directory != path:
            here[name] = os.path.join(directory, relative)
            if (file := _file_in(path, relative)) is not None:
                new[name] = file
    differ = [name for name, file in new.items() if not _same(here[name], file)]
    if compiled := [name for name in differ if here[name].endswith(EXTENSIONS)]:
        raise CannotReload(compiled)
    vanished = [name for name in here if name not in new]
    parts = [name for name in new if name.rpartition(".")[0] in vanished]
    modules = {name: sys.modules[name] for name in here if not here[name].endswith(EXTENSIONS)}
    again = [name for name in affected(modules, [*differ, *parts, *vanished]) if name in new]
    for name in again:
        importlib.machinery.SourceFileLoader(name, new[name]).get_code(name)  # compiled once, for all processes here
    return Plan(path, here, new, again, vanished)


def moved_modules(modules: Mapping[str, ModuleType], before: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Which of ``modules`` came from one of the directories ``before``: the directory, and the file below it."""
    directories = [os.path.realpath(directory) for directory in before]
    found = {}
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", *EXTENSIONS)) or name == "__main__":
            continue
        real = os.path.realpath(file)
        for directory in directories:
            if real.startswith(directory + os.sep):
                found[name] = (directory, os.path.relpath(real, directory))
    return found


def still_old(kinds: Iterable[type], reloaded: Iterable[str]) -> tuple[str, ...]:
    """Which of the classes are no longer what reloaded modules have under their names, or hold what no longer is."""
    names = set(reloaded)
    old = {kind for kind in kinds if _replaced(kind, names) or any(_replaced(held, names) for held in _held(kind))}
    return tuple(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in old))


def _replaced(thing: Any, names: set[str]) -> bool:
    """Whether a class or function of one of these modules is not what has its name there now."""
    if not isinstance(thing, (type, FunctionType)) or thing.__module__ not in names:
        return False
    current: object = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        current = getattr(current, part, None)
    return current is not thing


def _held(kind: type) -> list[object]:
    """What the methods of a class that travelled as code name from outside: it is in no module that is reloaded."""
    if kind.__module__ in sys.modules and kind.__module__ != "__main__":
        return []
    methods = [getattr(value, "_method", value) for value in vars(kind).values()]
    return [held for method in methods if isinstance(method, FunctionType) for held in method.__globals__.values()]


class _Anew(importlib.abc.MetaPathFinder):
    """Has modules that are imported again executed in the objects that they are. ``done``: which were, in order."""

    def __init__(self, modules: Mapping[str, ModuleType], files: Mapping[str, str]) -> None:
        self._modules, self._files = modules, files
        self.done: list[str] = []

    def carry_out(self, names: Iterable[str]) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None:  # it was loaded by its file, and got its name otherwise than by the search path
            spec = importlib.util.spec_from_file_location(fullname, self._files[fullname])
        if spec is not None and spec.loader is not None:
            spec.loader = _InPlace(spec.loader, self._modules[fullname], self.done)
        return spec


class _InPlace(importlib.abc.Loader):
    """Loads into a module that is there."""

    def __init__(self, loader: Any, module: ModuleType, done: list[str]) -> None:
        self._loader, self._module, self._done = loader, module, done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        module.__file__, module.__cached__ = spec.origin, spec.cached  # type: ignore[attr-defined]
        module.__package__ = spec.parent
        if spec.submodule_search_locations is None:
            vars(module).pop("__path__", None)
        else:
            module.__path__ = spec.submodule_search_locations
        self._loader.exec_module(module)
        self._done.append(module.__name__)


@dataclass(slots=True)
class _Change:
    """What is changed of the modules, so that it can be taken back. ``loaded``: what was there; ``path``: the snapshot
    that what came since is from."""

    loaded: set[str]
    path: str
    _dropped: dict[str, ModuleType] = field(default_factory=dict)
    _before: list[tuple[ModuleType, dict[str, Any]]] = field(default_factory=list)
    _moved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def move(self, module: ModuleType, before: str, file: str) -> None:
        """The module finds what lies beside it in the new snapshot, whether or not it is reloaded itself."""
        if before.endswith(EXTENSIONS):
            return
        spec = module.__spec__
        for thing, name in ((module, "__file__"), (spec, "origin"), (getattr(spec, "loader", None), "path")):
            if isinstance(getattr(thing, name, None), str):
                self._set(thing, name, file)
        search = getattr(module, "__path__", None)
        if isinstance(search, list):
            old, new = os.path.dirname(before), os.path.dirname(file)
            moved = [new if os.path.realpath(place) == old else place for place in search]
            self._set(module, "__path__", moved)
            if spec is not None:
                self._set(spec, "submodule_search_locations", moved)

    def drop(self, name: str) -> None:
        """The module can no longer be imported, nor found in its package."""
        module = self._dropped[name] = sys.modules.pop(name)
        above, _, last = name.rpartition(".")
        package = sys.modules.get(above)
        if package is not None and vars(package).get(last) is module:
            self._set(package, last, module)
            delattr(package, last)

    def clear(self, name: str, gone: Iterable[str]) -> None:
        """Takes from a module that will be reloaded the names that it will not have."""
        module = self._dropped[name] = sys.modules[name]
        self._before.append((module, dict(vars(module))))
        for each in gone:
            if vars(module).get(each) is not sys.modules.get(f"{name}.{each}", module):
                vars(module).pop(each, None)

    def give_back(self, gone: Mapping[str, Iterable[str]]) -> None:
        """The code of live objects may still need the names that the new code does not have."""
        for module, before in self._before:
            for each in gone[module.__name__]:
                if each in before:
                    vars(module).setdefault(each, before[each])

    def take_back(self) -> None:
        for name, module in list(sys.modules.items()):
            if name not in self.loaded and str(getattr(module, "__file__", "")).startswith(self.path + os.sep):
                del sys.modules[name]
        sys.modules.update(self._dropped)
        for module, before in self._before:
            names = vars(module)
            names.update(before)
            for name in names.keys() - before.keys():
                del names[name]
        for thing, name, value in reversed(self._moved):
            setattr(thing, name, value)

    def _set(self, thing: Any, name: str, value: Any) -> None:
        self._moved.append((thing, name, getattr(thing, name)))
        setattr(thing, name, value)


def _file_in(path: str, relative: str) -> str | None:
    """Where the snapshot ``path`` has the module that was in ``relative``; one may have become a package, or ceased to
    be one."""
    stem, suffix = os.path.splitext(relative)
    package = os.path.basename(stem) == "__init__"
    other = os.path.dirname(relative) + ".py" if package else os.path.join(stem, "__init__.py")
    for candidate in (relative, other) if suffix == ".py" else (relative,):
        if os.path.isfile(file := os.path.join(path, candidate)):
            return file
    return None


def _same(before: str, after: str) -> bool:
    return os.path.samefile(before, after) or filecmp.cmp(before, after, shallow=False)

"""Moves a running process to another version: reloads the modules that changed, and those that import them.

A module is reloaded if its file differs between the two snapshots, or if it uses a module that is reloaded. Like
``importlib.reload``, this executes it again in the existing module object, so that live objects call its new functions.
Unlike there, all modules to reload are imported together: each is executed when the first of the others imports
it, as in a new process.

A reload takes place as a whole or not at all: every file is compiled before anything changes, and if a module raises,
all modules are restored.

Imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import contextlib
import filecmp
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import symtable
import sys
import sysconfig
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from .errors import CannotReload

EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


# The import graph of loaded modules, read from their files and from what they refer to. Imports nothing.
#
# A reload of everything would need no graph, but executes each module again: 1.5 ms a module of 50 lines, where a
# change to one module at the end of the graph takes a tenth of that; and modules that have nothing to do with the
# change would lose their state. ``python -m benchmarks --only mechanisms`` measures both.


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
        path = str(read_attribute(module, "__file__"))
        with open(path, encoding="utf-8-sig", errors="replace") as file:  # a BOM is no syntax error
            return file.read()
    except OSError:
        return ""  # the file is gone, or there is none; what the module refers to remains


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
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return set()  # a process without a version may have loaded a file that is gone by now
    try:
        table = symtable.symtable(text.decode(), path, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # in another encoding, or invalid by now: no name is known to be gone
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


@dataclass(frozen=True, slots=True)
class Reloaded:
    """``modules`` in the order in which they were reloaded. ``vanished``: modules that can no longer be imported
    because the new version does not have their files, or no import path leads to their package. ``old_classes``: actor
    classes with live objects that still run old code."""

    modules: tuple[str, ...]
    vanished: tuple[str, ...]
    old_classes: tuple[str, ...]


RELOAD_LOCK = threading.Lock()
"""Held while this process is moved to another version."""


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """A reload to the snapshot ``path``. ``current``: the modules loaded from other versions, with their files there.
    ``new``: those that this version has, with their files here. ``to_reload`` have been compiled."""

    path: str
    current: Mapping[str, str]
    new: Mapping[str, str]
    to_reload: Sequence[str]
    vanished: Sequence[str]

    def execute(self, actor: type) -> Reloaded:
        """Reloads, once the version is on ``sys.path``. ``actor`` is the base of actor classes. Raises what a reloaded
        module raises; all modules are restored then."""
        importlib.invalidate_caches()
        # By id: a metaclass may define __eq__ without __hash__.
        classes = {id(kind): kind for kind in map(type, gc.get_objects())}
        kinds = [kind for kind in classes.values() if issubclass(kind, actor)]
        gone = {name: self._gone_names(name) for name in self.to_reload}
        finder = _ReloadFinder({name: sys.modules[name] for name in self.to_reload}, self.new, self.path)
        change = _Transaction(set(sys.modules), self.path)
        try:
            for name, file in self.new.items():
                change.move(sys.modules[name], self.current[name], file)
            for name in self.vanished:
                change.drop(name)
            for name in self.to_reload:
                change.clear(name, gone[name])
            finder.execute(self.to_reload, self.vanished)
            for name in self._without_package():
                change.drop(name)
            self._bind_compiled_parts()
        except BaseException:
            change.roll_back()
            raise
        old = old_classes(kinds, (*self.to_reload, *self.vanished))
        # A package whose __init__.py is gone has been imported again as a namespace package, for its parts; or no
        # import path leads to it any more, and its parts are gone with it.
        vanished = [name for name in self.current if name not in sys.modules]
        change.restore_names(gone if old else {name: gone[name] for name in vanished if name in gone})
        return Reloaded(tuple(finder.done), tuple(vanished), old)

    def _without_package(self) -> list[str]:
        """The source modules that did not change but are in a package that is gone with this reload."""
        return [
            name
            for name, file in self.new.items()
            if name in sys.modules and not file.endswith(EXTENSIONS)
            if any(each in self.current and each not in sys.modules for each in _packages_of(name))
        ]

    def _bind_compiled_parts(self) -> None:
        """Binds compiled modules, which are not imported again, in packages that have become namespace packages."""
        for name, file in self.new.items():
            package, _, last = name.rpartition(".")
            if package in self.vanished and file.endswith(EXTENSIONS):
                with contextlib.suppress(ModuleNotFoundError):  # no import path leads to the package any more
                    setattr(importlib.import_module(package), last, sys.modules[name])

    def _gone_names(self, name: str) -> set[str]:
        """The names that the module's old file binds and its new file does not."""
        return assigned(self.current[name]) - assigned(self.new[name])


def plan_reload(before: Sequence[str], path: str, paths: Sequence[str] = ("",)) -> ReloadPlan:
    """Plans the move of this process from the snapshots ``before`` to the one at ``path``. Changes nothing.

    A process that was started before the first sync has no snapshots: its modules are those that the version has in
    ``paths`` under the same names. Which code they were loaded from is not known, so all of them are reloaded.

    Raises SyntaxError if a file to reload is invalid, and CannotReload if a compiled module has changed.
    """
    path = os.path.realpath(path)
    current, new = _by_version(sys.modules, path, before) if before else _by_name(sys.modules, path, paths)
    flat = {name for name, file in new.items() if _is_package(current[name]) and not _is_package(file)}
    for name, file in _files(sys.modules).items() if flat else ():
        if not flat.isdisjoint(_packages_of(name)):
            current[name] = file  # its package becomes a module, which has no parts
            new.pop(name, None)
    unknown = {name for name in new if not before and not current[name].endswith(EXTENSIONS)}
    differ = [name for name, file in new.items() if name in unknown or not _same(current[name], file)]
    if compiled := [name for name in differ if current[name].endswith(EXTENSIONS) or new[name].endswith(EXTENSIONS)]:
        raise CannotReload(compiled)
    vanished = [name for name in current if name not in new]
    parts = [name for name in new if name.rpartition(".")[0] in vanished]
    source = {name for name, file in current.items() if not file.endswith(EXTENSIONS)}
    modules = {name: module for name, module in list(sys.modules.items()) if name in source}
    to_reload = [name for name in affected(modules, [*differ, *parts, *vanished]) if name in new]
    for name in to_reload:
        importlib.machinery.SourceFileLoader(name, new[name]).get_code(name)  # cached for all processes of the host
    return ReloadPlan(path, current, new, to_reload, vanished)


def modules_from(modules: Mapping[str, ModuleType], before: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The ``modules`` that were loaded from the directories ``before``: the directory and the file relative to it."""
    directories = [os.path.realpath(directory) for directory in before]
    found = {}
    for name, file in _files(modules).items():
        for directory in directories:
            if file.startswith(directory + os.sep):
                found[name] = (directory, os.path.relpath(file, directory))
    return found


def _by_version(
    modules: Mapping[str, ModuleType], path: str, before: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The files of the ``modules`` that were loaded from the snapshots ``before``, and those of them that ``path`` has.
    Namespace packages that stay such are left out: they follow ``sys.path`` by themselves."""
    current: dict[str, str] = {}
    new: dict[str, str] = {}
    for name, (directory, relative) in sorted(modules_from(modules, before).items()):  # packages before their parts
        if directory == path:
            continue
        if (file := _file_in(path, name, relative, directory)) is not None:
            new[name] = file
        elif _remains(name, [_moved(place, before, path) for place in _namespace(modules[name])], current, new):
            continue
        current[name] = os.path.join(directory, relative)
    return current, new


def _by_name(
    modules: Mapping[str, ModuleType], path: str, paths: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The files of the ``modules`` that the snapshot ``path`` has in ``paths``, and those there, except for modules of
    Python and of installed packages: processes have such before they enter a version, too.

    The first also has the files that are gone, of modules from a directory of ``sys.path`` from which modules of the
    version were imported. Modules that were generated, or come from an archive, do not need a file.
    """
    schemes = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(os.path.realpath(sysconfig.get_path(scheme)) + os.sep for scheme in schemes)
    found, new = {}, {}
    for name, file in _files(modules).items():
        *package, last = name.split(".")
        base = os.path.basename(file)
        relative = os.path.join(*package, last, base) if base == "__init__.py" else os.path.join(*package, base)
        if base != "__init__.py" and base.partition(".")[0] != last:
            continue  # no import by this name finds that file
        if file.endswith(os.sep + relative) and not file.startswith(installed):
            found[name] = (file.removesuffix(relative), relative)
            here = next(filter(None, (_file_in(os.path.join(path, each), name, relative) for each in paths)), None)
            if here is not None:
                new[name] = here
    roots = {found[name][0] for name in new if _has_source(modules[name])}
    current: dict[str, str] = {}
    for name, (root, relative) in sorted(found.items()):  # packages before their parts
        file, module = root + relative, modules[name]
        imported = root in roots and (_has_source(module) or _namespace(module))
        gone = imported and not os.path.isfile(file) and not _remains(name, _namespace(module), current, new)
        if name in new or gone:
            current[name] = file
    return current, new


def _remains(name: str, places: Iterable[str], current: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether a namespace package that has ``places`` has a directory, and the package that it is in is not removed."""
    above = name.rpartition(".")[0]
    removed = above in current and above not in new
    return not removed and any(map(os.path.isdir, places))


def _moved(place: str, before: Iterable[str], path: str) -> str:
    """The directory of the snapshot ``path`` that corresponds to ``place``, if that is in one of ``before``."""
    real = os.path.realpath(place)
    for directory in map(os.path.realpath, before):
        if real.startswith(directory + os.sep):
            return os.path.join(path, os.path.relpath(real, directory))
    return place


def _has_source(module: ModuleType) -> bool:
    loader = read_attribute(read_attribute(module, "__spec__"), "loader")
    return isinstance(loader, importlib.machinery.SourceFileLoader)


def _files(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """The real files of the modules that have one, except for the program's own. Of a namespace package it is the
    ``__init__.py`` that its first directory does not have."""
    found = {}
    for name, module in list(modules.items()):
        file = read_attribute(module, "__file__")  # ``sys.modules`` may have any object
        if isinstance(file, str) and file.endswith((".py", *EXTENSIONS)) and name != "__main__":
            found[name] = os.path.realpath(file)
        elif places := _namespace(module):
            found[name] = os.path.join(os.path.realpath(places[0]), "__init__.py")
    return found


def _namespace(module: ModuleType) -> list[str]:
    """The directories of a namespace package, which has no ``__init__.py``; none of another module."""
    spec = read_attribute(module, "__spec__")
    if not isinstance(spec, importlib.machinery.ModuleSpec) or spec.origin is not None:
        return []
    try:
        return list(spec.submodule_search_locations or ())
    except Exception:  # noqa: BLE001 - it asks the package that it is in, which may be gone or any object
        return []


def old_classes(kinds: Iterable[type], reloaded: Iterable[str]) -> tuple[str, ...]:
    """The classes that reloaded modules have replaced, and those whose methods use such a class or function."""
    names = set(reloaded)
    old = [
        kind for kind in kinds if _replaced(kind, names) or any(_replaced(held, names) for held in _globals_of(kind))
    ]
    return tuple(sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in old}))


def _replaced(thing: Any, names: set[str]) -> bool:
    """Whether a class or function of one of these modules is no longer the one of that name."""
    if not issubclass(type(thing), (type, FunctionType)):
        return False
    module = read_attribute(thing, "__module__")
    if not isinstance(module, str) or module not in names:
        return False
    current: object = sys.modules.get(module)
    for part in thing.__qualname__.split("."):
        current = read_attribute(current, part)
    return current is not thing


def _globals_of(kind: type) -> list[object]:
    """The globals of a class that was pickled by value, which no reload of a module replaces."""
    module = read_attribute(kind, "__module__")
    if isinstance(module, str) and module in sys.modules and module != "__main__":
        return []
    values = vars(kind).values()
    methods = [method for value in values for method in (value, read_attribute(value, "_method"))]
    functions = [method for method in methods if issubclass(type(method), FunctionType)]
    return [held for function in functions for held in function.__globals__.values()]


class _ReloadFinder(importlib.abc.MetaPathFinder):
    """Executes modules that are imported again in their existing module objects, from the snapshot ``path``. ``done``:
    these modules, in order."""

    def __init__(self, modules: Mapping[str, ModuleType], files: Mapping[str, str], path: str) -> None:
        self._modules, self._files, self._path = modules, files, path
        self.done: list[str] = []

    def execute(self, names: Sequence[str], removed: Container[str]) -> None:
        """Imports the modules ``names``, and the packages of ``removed`` that they are in, except for those to which no
        import path leads any more."""
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)
        try:
            for name in (*names, *names):  # twice: a module may add the import path of one before it
                packages = _packages_of(name)
                try:
                    # A namespace package that is still loaded does not import the package that it is in.
                    for each in (*packages, name):
                        if each in self._modules or each in removed:
                            importlib.import_module(each)
                except ModuleNotFoundError as error:
                    if error.name not in packages or error.name not in removed:  # an import of its own failed
                        raise
        finally:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # It was loaded from its file, under a name that is not on the search path; or its package has made itself a
        # ``__path__`` that still leads to an old snapshot.
        if spec is None or not os.path.realpath(spec.origin or "").startswith(self._path + os.sep):
            spec = importlib.util.spec_from_file_location(fullname, self._files[fullname])
        if spec is not None and spec.loader is not None:
            spec.loader = _InPlaceLoader(spec.loader, self._modules[fullname], self.done)
        return spec


class _InPlaceLoader(importlib.abc.Loader):
    """Loads into an existing module."""

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
class _Transaction:
    """Changes modules so that they can be restored. ``loaded``: the modules loaded before; ``path``: the new
    snapshot."""

    loaded: set[str]
    path: str
    _dropped: dict[str, ModuleType] = field(default_factory=dict)
    _before: list[tuple[ModuleType, dict[str, Any]]] = field(default_factory=list)
    _moved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def move(self, module: ModuleType, before: str, file: str) -> None:
        """Makes the module find the files beside it in the new snapshot, whether or not it is reloaded."""
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
        """Removes the module from ``sys.modules`` and its package."""
        module = self._dropped[name] = sys.modules.pop(name)
        above, _, last = name.rpartition(".")
        package = sys.modules.get(above)
        if package is not None and vars(package).get(last) is module:
            self._set(package, last, module)
            delattr(package, last)

    def clear(self, name: str, gone: Iterable[str]) -> None:
        """Removes the names that a module will no longer have after its reload."""
        module = self._dropped[name] = sys.modules[name]
        self._before.append((module, dict(vars(module))))
        for each in gone:
            if vars(module).get(each) is not sys.modules.get(f"{name}.{each}", module):
                vars(module).pop(each, None)

    def restore_names(self, gone: Mapping[str, Iterable[str]]) -> None:
        """Restores removed names that the code of live objects may still use."""
        for module, before in self._before:
            for each in gone.get(module.__name__, ()):
                if each in before:
                    vars(module).setdefault(each, before[each])

    def roll_back(self) -> None:
        sys.modules.update(self._dropped)
        # All before the first is deleted: a namespace package looks for its places in the package that it is in.
        for name in [name for name in sys.modules.keys() - self.loaded if self._is_of_version(sys.modules[name])]:
            del sys.modules[name]
        for module, before in self._before:
            names = vars(module)
            names.update(before)
            for name in names.keys() - before.keys():
                del names[name]
        for thing, name, value in reversed(self._moved):
            setattr(thing, name, value)

    def _is_of_version(self, module: ModuleType) -> bool:
        file = read_attribute(module, "__file__")
        places = [file] if isinstance(file, str) else _namespace(module)
        # The entry of ``sys.path`` that it was found in may lead through a link.
        return any(os.path.realpath(place).startswith(self.path + os.sep) for place in places)

    def _set(self, thing: Any, name: str, value: Any) -> None:
        self._moved.append((thing, name, getattr(thing, name)))
        setattr(thing, name, value)


def _file_in(path: str, name: str, relative: str, before: str | None = None) -> str | None:
    """The file in the snapshot ``path`` of the module ``name`` that was in ``relative``, of the snapshot ``before`` if
    of any. A module may become a package or be compiled, or the reverse.

    Python prefers a package to a module of that name, and compiled files to others. But a module that has another name,
    or was loaded beside a file that Python prefers, was loaded by its file.
    """
    stem, suffix = os.path.splitext(relative)
    if suffix != ".py":
        candidates = [relative]
    else:
        stem = os.path.dirname(relative) if _is_package(relative) else stem
        places = (os.path.join(stem, "__init__"), stem)
        candidates = [place + ending for place in places for ending in (*EXTENSIONS, ".py")]
        beside = before is not None and _first_in(before, candidates) != os.path.join(before, relative)
        if beside or name.rpartition(".")[2] != os.path.basename(stem):
            candidates.insert(0, relative)
    return _first_in(path, candidates)


def _first_in(path: str, candidates: Iterable[str]) -> str | None:
    """The first of the files that the snapshot ``path`` has."""
    return next(filter(os.path.isfile, (os.path.join(path, each) for each in candidates)), None)


def _is_package(file: str) -> bool:
    return os.path.basename(file) == "__init__.py"


def _same(before: str, after: str) -> bool:
    if _is_package(before) != _is_package(after) or not os.path.isfile(before):
        return False
    return os.path.samefile(before, after) or filecmp.cmp(before, after, shallow=False)

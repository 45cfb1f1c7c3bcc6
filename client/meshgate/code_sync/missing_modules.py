"""Finds modules that this program uses but the sync does not send."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from meshgate.code_sync.import_paths import driver_import_paths, is_installed, loaded_files
from meshgate.code_sync.project import Tree

_OWN_PACKAGES = frozenset({"__main__", "meshgate"}) | {
    f"meshgate_{part}" for part in ("kubernetes", "processes", "slurm", "sync", "wire")
}


def directories_outside(tree: Tree) -> list[str]:
    """The import paths outside of ``tree`` from which this program has loaded modules."""
    outside = [path for path in driver_import_paths() if not Path(path).resolve().is_relative_to(tree.top)]
    directories = [
        os.path.dirname(os.path.realpath(file))
        for name, file in loaded_files()
        if name.partition(".")[0] not in _OWN_PACKAGES and not is_installed(file)
    ]
    # The working directory may be above the tree.
    directories = [directory for directory in directories if not Path(directory).is_relative_to(tree.top)]
    return [path for path in outside if any(Path(each).is_relative_to(os.path.realpath(path)) for each in directories)]


def modules_beside(directory: str) -> list[str]:
    """The top-level modules that this program has loaded from files and packages in ``directory``."""
    found: dict[str, None] = {}
    for name, file in loaded_files():
        first = name.partition(".")[0]
        source = os.path.join(os.path.realpath(directory), first)
        if first not in _OWN_PACKAGES and os.path.realpath(file).startswith((source + ".", source + os.sep)):
            found[first] = None
    return sorted(found)


def ignored_modules(tree: Tree, is_ignored: Callable[[str], bool]) -> list[tuple[str, str]]:
    """The loaded modules in ``tree`` whose files are ignored, each with its path below the top.

    Empty if the tree has parts: the user chose what to leave out.
    """
    if tree.parts:
        return []
    found = []
    for name, file in loaded_files():
        path = Path(os.path.realpath(file))
        if name == "__main__" or not path.is_relative_to(tree.top) or is_installed(file):
            continue
        if is_ignored(str(path)):
            found.append((name, str(path.relative_to(tree.top))))
    return found


def including_rules(tree: Tree, paths: Iterable[str], is_ignored: Callable[[str], bool]) -> list[str]:
    """The lines of ``.meshgateignore`` that include ``paths`` (below the top) and nothing else.

    No rule includes a file in an ignored directory, so these rules include the directory and ignore its other entries.
    """
    rules: dict[str, None] = {}  # in order, each once
    for path in paths:
        names = path.split("/")
        inside = False
        for end in range(1, len(names)):
            directory = "/".join(names[:end])
            inside = inside or is_ignored(str(tree.top / directory))
            if inside:
                rules |= {f"!/{_escaped(directory)}/": None, f"/{_escaped(directory)}/*": None}
        rules[f"!/{_escaped(path)}"] = None
    return list(rules)


def _escaped(path: str) -> str:
    return re.sub(r"[*?\[\\]|\s$", r"\\\g<0>", path)

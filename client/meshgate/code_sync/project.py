"""Finds the directory tree that holds the driver's code, its import paths, and modules that the sync does not send.

Workers on the same machine run the same interpreter, so they already have its standard library and installed packages.
What they lack is specific to the driver: the directory of its script, its working directory, PYTHONPATH, and what the
program added to ``sys.path``.
"""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshgate.errors import JobError

RUN_PROJECT = "MESHGATE_RUN_PROJECT"
"""In a program that was submitted: its copy of the project."""
_OWN_PACKAGES = frozenset({"__main__", "meshgate"}) | {
    f"meshgate_{part}" for part in ("kubernetes", "processes", "slurm", "sync", "wire")
}


@dataclass(frozen=True, slots=True)
class Tree:
    """What is synced: the directory ``top``, or only its subdirectories ``parts`` (relative paths). ``paths``, relative
    to ``top``, come first on the workers' ``sys.path``. With ``everything``, ignore rules do not apply, links may leave
    the tree, and it may be as large as data is."""

    top: Path
    parts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("",)
    everything: bool = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.roots))

    @property
    def roots(self) -> list[Path]:
        """The directories that are synced whole."""
        return [self.top / part for part in self.parts] or [self.top]

    def has(self, path: str | Path) -> bool:
        """Whether what is at the real path ``path`` is synced, unless it is ignored."""
        return any(Path(path).is_relative_to(root) for root in self.roots)

    def place(self, directory: Path) -> str | None:
        """The real path ``directory`` relative to ``top``; None if workers do not have it. They have directories above
        parts, too."""
        is_above = directory.is_relative_to(self.top) and any(directory in root.parents for root in self.roots)
        return relative_to(directory, self.top) if self.has(directory) or is_above else None


def driver_tree(sync_dirs: Sequence[str] | None = None) -> Tree:
    """The tree that this program syncs. Raises ValueError if there is no project directory."""
    return find_tree(sync_dirs, driver_import_paths(), driver_script())


def find_tree(
    sync_dirs: Sequence[str | os.PathLike[str]] | None, search_path: Sequence[str], script: str | None = None
) -> Tree:
    """The tree of ``sync_dirs``, or of the driver's project if that is None.

    Candidates for the project are the git roots around the working directory and the ``script``, then the directory of
    the script and the working directory themselves; the first that contains the earliest entry of ``search_path`` (the
    driver's own import paths) is chosen. Raises ValueError if that or one of ``sync_dirs`` is the root or home
    directory, or if ``sync_dirs`` is invalid. These may have any common parent, because nothing else below it is read.
    """
    directories = [_find_project(search_path, script)] if sync_dirs is None else _outermost(sync_dirs)
    for directory in directories:
        shared = sync_dirs is None and directory == Path(tempfile.gettempdir()).resolve()
        if shared or _is_root_or_home(directory):
            kind = "temporary" if shared else "root" if directory == Path(directory.anchor) else "home"
            raise ValueError(
                f"cannot sync {directory}: it is the {kind} directory, not a project directory. Move the program and "
                "its modules to a directory of their own, run it in a git repository, or name the directories to sync "
                "with sync_dirs=[…]"
            )
    top = Path(os.path.commonpath(directories))
    parts = tuple(str(directory.relative_to(top)) for directory in directories) if len(directories) > 1 else ()
    return Tree(top, parts, paths_below(top, search_path))


def _outermost(sync_dirs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The directories ``sync_dirs``, each once and without those below another one, which come with it."""
    directories = dict.fromkeys(Path(directory).expanduser().resolve() for directory in sync_dirs)
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"sync_dirs: {directory} is not a directory")
    if not directories:
        raise ValueError("sync_dirs is empty: name a directory, or omit sync_dirs to sync the project")
    return [directory for directory in directories if directories.keys().isdisjoint(directory.parents)]


def paths_below(top: Path, search_path: Sequence[str]) -> tuple[str, ...]:
    """The entries of ``search_path`` inside ``top``, relative to it; ``top`` itself if there are none."""
    resolved = [Path(path).resolve() for path in search_path]
    return tuple(relative_to(path, top) for path in resolved if path.is_relative_to(top)) or ("",)


def relative_to(path: Path, top: Path) -> str:
    """``path``, inside ``top``, relative to it: "" for ``top`` itself, where pathlib has "."."""
    return "" if path == top else str(path.relative_to(top))


def _find_project(search_path: Sequence[str], script: str | None) -> Path:
    from meshgate_sync.tree.scan import git_root  # noqa: PLC0415 - local jobs import this module, and scan no tree

    here = working_directory()
    directories = [here, os.path.dirname(script)] if script is not None else [here]
    roots = [Path(root).resolve() for root in map(git_root, directories) if root is not None]
    # A repository of the home directory, such as one of dotfiles, does not make that a project.
    candidates = [root for root in roots if not _is_root_or_home(root)]
    if RUN_PROJECT in os.environ:  # a synced project has no repository
        candidates.insert(0, Path(os.environ[RUN_PROJECT]).resolve())
    # Without git, the directory of the program: the working directory may hold anything.
    candidates += [Path(directory).resolve() for directory in reversed(directories)]
    for entry in search_path:
        for top in candidates:
            if Path(entry).resolve().is_relative_to(top):
                return top
    return candidates[0]


def _is_root_or_home(top: Path) -> bool:
    return top in (Path(top.anchor), Path.home().resolve())


def driver_import_paths(search_path: Sequence[str] | None = None, cwd: str | None = None) -> list[str]:
    """The driver's own entries of ``search_path``, absolute and without duplicates, then the working directory.

    With the default ``search_path``, ``sys.path``, this includes the directories of modules that were found by other
    finders, as in some editable installs.
    """
    cwd = working_directory() if cwd is None else cwd
    interpreter_paths = _interpreter_paths()
    paths: dict[str, None] = {}
    entries = sys.path if search_path is None else search_path
    for entry in [*entries, cwd, *(_paths_of_other_finders() if search_path is None else ())]:
        path = os.path.abspath(os.path.join(cwd, entry))
        if os.path.exists(path) and os.path.realpath(path) not in interpreter_paths and os.pathsep not in path:
            paths.setdefault(path)
    return list(paths)


def working_directory() -> str:
    """The working directory of this program. Raises JobError if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise JobError(
            "the working directory of this program has been deleted: change to one that exists. If another has taken "
            "its name, as after git checkout, change to that"
        ) from None


def driver_script() -> str | None:
    """The file of the running program if it is the user's own; None for pytest, IPython or an interactive prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    user_scripts = sysconfig.get_path("scripts", f"{os.name}_user")
    script_directories = {os.path.realpath(path) for path in (sysconfig.get_path("scripts"), user_scripts)}
    return None if _is_within(path, _interpreter_paths() | script_directories) else os.path.abspath(path)


def _paths_of_other_finders() -> list[str]:
    """Directories of top-level modules that were not found through ``sys.path``."""
    directories: dict[str, None] = {}
    for name, file in loaded_files():
        if "." in name or not file.endswith(".py"):
            continue
        directory, last = os.path.split(os.path.abspath(file))
        if last == "__init__.py":
            directory, last = os.path.split(directory)
        if os.path.splitext(last)[0] == name:
            directories[directory] = None
    return [directory for directory in directories if not is_installed(directory)]


def loaded_files() -> list[tuple[str, str]]:
    """The name and file of each loaded module that has a file."""
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [(name, file) for name, file in files if isinstance(file, str)]


def is_installed(path: str) -> bool:
    """Whether a file came with the interpreter or was installed into it."""
    return _is_within(path, _interpreter_paths())


def _is_within(path: str, directories: Iterable[str]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(os.path.join(directory, "")) for directory in directories)


@functools.cache
def _interpreter_paths() -> frozenset[str]:
    """The directories that every process of this interpreter searches."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # a virtual environment has no stdlib of its own
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    paths = [*standard, *(str(Path(path) / "lib-dynload") for path in standard)]
    paths += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return frozenset(os.path.realpath(path) for path in paths)


def directories_outside(tree: Tree) -> list[str]:
    """The import paths outside of ``tree`` from which this program has loaded modules."""
    outside = [path for path in driver_import_paths() if not tree.has(Path(path).resolve())]
    directories = [
        os.path.dirname(os.path.realpath(file))
        for name, file in loaded_files()
        if name.partition(".")[0] not in _OWN_PACKAGES and not is_installed(file)
    ]
    # The working directory may be above the tree.
    directories = [directory for directory in directories if not tree.has(directory)]
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

"""The directories that the driver imports its own modules from, so that workers can import them by the same names.

Workers on the same machine run the same interpreter, so they already have its standard library and installed packages.
What they lack is specific to the driver: the directory of its script, its working directory, PYTHONPATH, and what the
program added to ``sys.path``.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path


def driver_import_paths(search_path: Sequence[str] | None = None, cwd: str | None = None) -> list[str]:
    """The driver's own entries of ``search_path``, absolute and without duplicates, then the working directory.

    With the default ``search_path``, ``sys.path``, this includes the directories of modules that were found by other
    finders, as in some editable installs.
    """
    cwd = os.getcwd() if cwd is None else cwd
    interpreter_paths = _interpreter_paths()
    paths: dict[str, None] = {}
    entries = sys.path if search_path is None else search_path
    for entry in [*entries, cwd, *(_paths_of_other_finders() if search_path is None else ())]:
        path = os.path.abspath(os.path.join(cwd, entry))
        if os.path.exists(path) and os.path.realpath(path) not in interpreter_paths and os.pathsep not in path:
            paths.setdefault(path)
    return list(paths)


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

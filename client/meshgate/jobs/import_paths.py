"""Where the driver imports its own modules from, so that workers on the same machine find them by name.

Workers run the same interpreter, so they have its standard library and its installed packages already. What
they lack is what this driver was started with: the directory of its script, its working directory, PYTHONPATH
and what the program put on ``sys.path``. Those are carried, in the driver's order, as PYTHONPATH.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["driver_import_paths", "driver_script", "is_installed", "loaded_files"]


def driver_import_paths(search_path: Sequence[str] | None = None, cwd: str | None = None) -> list[str]:
    """The driver's own entries of ``search_path`` (``sys.path``), absolute, each once, then the working directory. Of
    ``sys.path`` also where modules are from that were found otherwise, as those of some editable installs are."""
    here = os.getcwd() if cwd is None else cwd
    everyone = _interpreter_paths()
    found: dict[str, None] = {}
    searched = sys.path if search_path is None else search_path
    for entry in [*searched, here, *(_found_otherwise() if search_path is None else ())]:
        path = os.path.abspath(os.path.join(here, entry))
        if os.path.exists(path) and os.path.realpath(path) not in everyone and os.pathsep not in path:
            found.setdefault(path)
    return list(found)


def driver_script() -> str | None:
    """The file of the program that runs, where it is the user's own: not pytest, not IPython, not a prompt."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    user = sysconfig.get_path("scripts", f"{os.name}_user")
    programs = {os.path.realpath(place) for place in (sysconfig.get_path("scripts"), user)}
    return None if _is_within(path, _interpreter_paths() | programs) else os.path.abspath(path)


def _found_otherwise() -> list[str]:
    """Directories of top-level modules whose finder was not the one that looks along ``sys.path``."""
    places: dict[str, None] = {}
    for name, file in loaded_files():
        if "." in name or not file.endswith(".py"):
            continue
        above, last = os.path.split(os.path.abspath(file))
        if last == "__init__.py":
            above, last = os.path.split(above)
        if os.path.splitext(last)[0] == name:
            places[above] = None
    return [place for place in places if not is_installed(place)]


def loaded_files() -> list[tuple[str, str]]:
    """The modules of this program that have a file, each with it."""
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [(name, file) for name, file in files if isinstance(file, str)]


def is_installed(path: str) -> bool:
    """Whether a file came with the interpreter or was installed into it."""
    return _is_within(path, _interpreter_paths())


def _is_within(path: str, places: Iterable[str]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(os.path.join(place, "")) for place in places)


@functools.cache
def _interpreter_paths() -> frozenset[str]:
    """What every process of this interpreter searches anyway."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # a virtual environment has no stdlib of its own
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    paths = [*standard, *(str(Path(path) / "lib-dynload") for path in standard)]
    paths += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return frozenset(os.path.realpath(path) for path in paths)

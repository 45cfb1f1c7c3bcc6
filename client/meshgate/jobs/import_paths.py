"""Where the driver imports its own modules from, so that workers on the same machine find them by name.

Workers run the same interpreter, so they have its standard library and its installed packages already. What
they lack is what this driver was started with: the directory of its script, its working directory, PYTHONPATH
and what the program put on ``sys.path``. Those are carried, in the driver's order, as PYTHONPATH.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["driver_import_paths"]


def driver_import_paths(search_path: Sequence[str] | None = None, cwd: str | None = None) -> list[str]:
    """The driver's own entries of ``search_path`` (``sys.path``), absolute, each once, then the working directory."""
    here = os.getcwd() if cwd is None else cwd
    everyone = _interpreter_paths()
    found: dict[str, None] = {}
    for entry in [*(sys.path if search_path is None else search_path), here]:
        path = os.path.abspath(os.path.join(here, entry))
        if os.path.exists(path) and os.path.realpath(path) not in everyone and os.pathsep not in path:
            found.setdefault(path)
    return list(found)


def _interpreter_paths() -> set[str]:
    """What every process of this interpreter searches anyway."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # a virtual environment has no stdlib of its own
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    paths = [*standard, *(str(Path(path) / "lib-dynload") for path in standard)]
    paths += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return {os.path.realpath(path) for path in paths}

"""Finds the directory tree that holds the driver's code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshgate.code_sync.import_paths import driver_import_paths, driver_script
from meshgate_sync.tree.scan import git_root


@dataclass(frozen=True, slots=True)
class Tree:
    """What is synced: the directory ``top``, or only its subdirectories ``parts`` (relative paths). ``paths``, relative
    to ``top``, come first on the workers' ``sys.path``. With ``everything``, ignore rules do not apply, links may leave
    the tree, and it may be as large as data is."""

    top: Path
    parts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("",)
    everything: bool = False


def driver_tree(sync_dirs: Sequence[str] | None = None) -> Tree:
    """The tree that this program syncs. Raises ValueError if there is no project directory."""
    return find_tree(sync_dirs, driver_import_paths(), driver_script())


def find_tree(
    sync_dirs: Sequence[str | os.PathLike[str]] | None, search_path: Sequence[str], script: str | None = None
) -> Tree:
    """The tree of ``sync_dirs``, or of the driver's project if that is None.

    Candidates for the project are the git roots around the working directory and the ``script``, then the directory of
    the script and the working directory themselves; the first that contains the earliest entry of ``search_path`` (the
    driver's own import paths) is chosen. Raises ValueError if that is the root or home directory, or if ``sync_dirs``
    is invalid.
    """
    if sync_dirs is not None:
        directories = [Path(directory).expanduser().resolve() for directory in sync_dirs]
        for directory in directories:
            if not directory.is_dir():
                raise ValueError(f"sync_dirs: {directory} is not a directory")
        if not directories:
            raise ValueError("sync_dirs is empty: name a directory, or omit sync_dirs to sync the project")
        top = Path(os.path.commonpath(directories))
        parts = tuple(str(directory.relative_to(top)) for directory in directories) if len(directories) > 1 else ()
    else:
        top, parts = _find_project(search_path, script), ()
    shared = sync_dirs is None and top == Path(tempfile.gettempdir()).resolve()
    if shared or _is_root_or_home(top):
        kind = "temporary" if shared else "root" if top == Path(top.anchor) else "home"
        raise ValueError(
            f"cannot sync {top}: it is the {kind} directory, not a project directory. Move the program and its modules "
            "to a directory of their own, run it in a git repository, or name the directories to sync with "
            "sync_dirs=[…]"
        )
    return Tree(top, parts, paths_below(top, search_path))


def paths_below(top: Path, search_path: Sequence[str]) -> tuple[str, ...]:
    """The entries of ``search_path`` inside ``top``, relative to it; ``top`` itself if there are none."""
    resolved = [Path(path).resolve() for path in search_path]
    paths = [str(path.relative_to(top)) for path in resolved if path.is_relative_to(top)]
    return tuple("" if path == "." else path for path in paths) or ("",)


def _find_project(search_path: Sequence[str], script: str | None) -> Path:
    directories = [os.getcwd(), os.path.dirname(script)] if script is not None else [os.getcwd()]
    roots = [Path(root).resolve() for root in map(git_root, directories) if root is not None]
    # A repository of the home directory, such as one of dotfiles, does not make that a project.
    candidates = [root for root in roots if not _is_root_or_home(root)]
    # Without git, the directory of the program: the working directory may hold anything.
    candidates += [Path(directory).resolve() for directory in reversed(directories)]
    for entry in search_path:
        for top in candidates:
            if Path(entry).resolve().is_relative_to(top):
                return top
    return candidates[0]


def _is_root_or_home(top: Path) -> bool:
    return top in (Path(top.anchor), Path.home().resolve())

"""Which tree a driver means by its code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshgate_sync.scan import git_root

__all__ = ["Tree", "paths_below", "tree_of"]


@dataclass(frozen=True, slots=True)
class Tree:
    """What is synced: the directory ``top``, or of it only ``parts`` (relative paths). ``paths`` of it come first on
    the workers' ``sys.path``."""

    top: Path
    parts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("",)


def tree_of(
    sync_dirs: Sequence[str | os.PathLike[str]] | None, search_path: Sequence[str], script: str | None = None
) -> Tree:
    """The tree of this driver: ``sync_dirs``, or else its project.

    That is the git root around the working directory or around the ``script``, or one of these directories: the first
    that holds what comes first in ``search_path``, where the driver imports its own modules from. Raises ValueError
    where no tree is meant.
    """
    if sync_dirs is not None:
        given = [Path(directory).expanduser().resolve() for directory in sync_dirs]
        for directory in given:
            if not directory.is_dir():
                raise ValueError(f"sync_dirs: {directory} is not a directory")
        if not given:
            raise ValueError("sync_dirs is empty: name a directory, or leave it out for the git root")
        top = Path(os.path.commonpath(given))
        parts = tuple(str(directory.relative_to(top)) for directory in given) if len(given) > 1 else ()
    else:
        top, parts = _project(search_path, script), ()
    if _is_no_project(top):
        raise ValueError(f"{top} is no project: run in a git repository, or name what to sync with sync_dirs=[…]")
    return Tree(top, parts, paths_below(top, search_path))


def paths_below(top: Path, search_path: Sequence[str]) -> tuple[str, ...]:
    """The places of ``search_path`` that are in the tree, relative to its top; at least the top."""
    below = [Path(place).resolve() for place in search_path]
    paths = [str(place.relative_to(top)) for place in below if place.is_relative_to(top)]
    return tuple("" if path == "." else path for path in paths) or ("",)


def _project(search_path: Sequence[str], script: str | None) -> Path:
    places = [os.getcwd(), os.path.dirname(script)] if script is not None else [os.getcwd()]
    candidates = [Path(top).resolve() for top in (*map(git_root, places), *places) if top is not None]
    reasonable = [top for top in candidates if not _is_no_project(top)]
    for entry in search_path:
        for top in reasonable:
            if Path(entry).resolve().is_relative_to(top):
                return top
    return candidates[0]


def _is_no_project(top: Path) -> bool:
    return top in (Path(top.anchor), Path.home().resolve())

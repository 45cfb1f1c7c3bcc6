"""Which entries of a tree are not synced.

Three sources, the first that has an opinion decides: ``.meshgateignore`` files (nearest directory first),
``.gitignore`` files (the same) with git's own ``info/exclude`` behind them, and the defaults below. All are read as git
reads them, negation included; so ``!.venv/`` in ``.meshgateignore`` brings back what a default excludes. As in git,
nothing can be brought back from inside a directory that is itself excluded. Unlike git, a tracked file that a rule
names is left out, for nothing here looks into git's index.

A directory that holds ``pyvenv.cfg`` is a virtual environment, whatever its name, and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pathspec import GitIgnoreSpec

from .digest import piece_digest

__all__ = ["DEFAULTS", "GIT_IGNORE", "IGNORE_FILES", "OWN_IGNORE", "VENV_MARK", "Rules"]

GIT_IGNORE = b".gitignore"
OWN_IGNORE = b".meshgateignore"
IGNORE_FILES = (GIT_IGNORE, OWN_IGNORE)
VENV_MARK = b"pyvenv.cfg"

DEFAULTS = (
    ".git", ".hg", ".svn",
    ".venv/", "venv/", ".tox/", ".nox/", ".direnv/", "node_modules/",
    "__pycache__/", "*.pyc", "*.pyo",
    ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".cache/", ".ipynb_checkpoints/",
    ".coverage", ".coverage.*",
    ".monarch/",
    ".idea/", ".vscode/", ".DS_Store", "*.swp", "*~", ".#*", "4913", "*___jb_???___",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layer:
    """The rules of one file: ``prefix`` is its directory below the root, empty or ending in ``/``."""

    prefix: str
    spec: GitIgnoreSpec

    def opinion(self, path: str) -> bool | None:
        if not path.startswith(self.prefix):  # pragma: no cover - layers are inherited downwards only
            return None
        here = path[len(self.prefix) :]
        for pattern in reversed(self.spec.patterns):
            if pattern.include is not None and _names(pattern, here):
                return bool(pattern.include)
        return None


class Rules:
    """The rules that hold in one directory. ``key`` names them: decisions made under one key may be kept."""

    __slots__ = ("_git", "_own", "key")

    def __init__(self, own: tuple[_Layer, ...], git: tuple[_Layer, ...], key: bytes) -> None:
        self._own = own
        self._git = git
        self.key = key

    @classmethod
    def base(cls, excludes: bytes = b"") -> Rules:
        """The defaults, and ``excludes``: what git reads from ``info/exclude``."""
        layers = [_Layer("", GitIgnoreSpec.from_lines(DEFAULTS))]
        if excludes:
            layers.insert(0, _Layer("", _parse(excludes)))
        return cls((), tuple(layers), piece_digest(repr(DEFAULTS).encode() + excludes))

    def below(self, prefix: bytes, texts: Mapping[bytes, bytes]) -> Rules:
        """These rules and those of the ignore files (name to content) in the directory ``prefix``."""
        if not texts:
            return self
        at = os.fsdecode(prefix)
        own, git = self._own, self._git
        if OWN_IGNORE in texts:
            own = (_Layer(at, _parse(texts[OWN_IGNORE])), *own)
        if GIT_IGNORE in texts:
            git = (_Layer(at, _parse(texts[GIT_IGNORE])), *git)
        said = b"\0".join(part for name in sorted(texts) for part in (name, piece_digest(texts[name])))
        return Rules(own, git, piece_digest(self.key + prefix + b"\0" + said))

    def ignores(self, path: bytes, *, directory: bool) -> bool:
        text = os.fsdecode(path) + ("/" if directory else "")
        for layer in (*self._own, *self._git):
            opinion = layer.opinion(text)
            if opinion is not None:
                return opinion
        return False


def _names(pattern: Any, path: str) -> bool:
    """Whether the pattern names ``path`` itself. pathspec takes what lies in a directory for named with it, which git
    leaves to the walk: ``!d/`` brings back the directory, not what another rule leaves out in it."""
    found = pattern.regex.match(path)
    if found is None:
        return False
    mark = found.start("ps_d") if "ps_d" in found.re.groupindex else -1
    return mark in (-1, len(path) - 1)


def _parse(text: bytes) -> GitIgnoreSpec:
    # "d/**" means what lies in d, yet pathspec takes it for d itself as well, when asked about a directory.
    lines = [line.rstrip(" ") + "/*" if line.rstrip(" ").endswith("/**") else line for line in _lines(text)]
    return GitIgnoreSpec.from_lines(lines)


def _lines(text: bytes) -> list[str]:
    return os.fsdecode(text).replace("\r\n", "\n").split("\n")

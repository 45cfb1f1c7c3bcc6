"""Which entries of a tree are not synced.

The first source with a matching rule decides: ``.meshgateignore`` files (nearest directory first), the exclusion of
version control directories, ``.gitignore`` files (nearest directory first), git's ``info/exclude``, and the defaults
below. All use git's syntax, negation included: ``!.vscode/`` in ``.meshgateignore`` includes what a default excludes.
As in git, nothing inside an excluded directory can be included again.

Unlike git:

- A tracked file that matches a rule is excluded too: git's index is not read.
- Rules outside the tree (``core.excludesFile``, ``.gitignore`` files above it) do not apply.
- The ``.gitignore`` files of submodules and nested repositories apply to them as to any directory, and so do those
  above; their own ``info/exclude`` does not.
- A ``.gitignore`` that is a symbolic link is followed.
- Patterns are case-sensitive, and ``a**/b`` does not match ``ab``, as in git 2.52 and later.
- A directory that contains ``pyvenv.cfg`` is a virtual environment, whatever its name, and is always excluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .digest import piece_digest
from .wildmatch import compile_wildmatch

GIT_IGNORE = b".gitignore"
OWN_IGNORE = b".meshgateignore"
IGNORE_FILES = (GIT_IGNORE, OWN_IGNORE)
VENV_MARK = b"pyvenv.cfg"

_VERSION = b"2"  # part of every key: decisions that another version of this module made are not reused
_VERSION_CONTROL = (".git", ".hg", ".svn")

DEFAULTS = (
    *_VERSION_CONTROL,
    ".venv/", "venv/", ".tox/", ".nox/", ".direnv/", "node_modules/",
    "__pycache__/", "*.pyc", "*.pyo",
    ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".cache/", ".ipynb_checkpoints/",
    ".coverage", ".coverage.*",
    ".monarch/",
    ".idea/", ".vscode/", ".DS_Store", "*.swp", "*~", ".#*", "4913", "*___jb_???___",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One line of an ignore file. ``by_name``: it matches the last name of a path, in any directory below the file."""

    regex: re.Pattern[bytes]
    includes: bool
    directories_only: bool
    by_name: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    """The rules of one ignore file, the last line first. ``prefix``: its directory below the root, empty or ending in
    ``/``."""

    prefix: bytes
    patterns: tuple[_Pattern, ...]

    def decide(self, path: bytes, *, directory: bool) -> bool | None:
        below = path[len(self.prefix) :]
        name = below.rpartition(b"/")[2]
        for pattern in self.patterns:
            if pattern.directories_only and not directory:
                continue
            if pattern.regex.fullmatch(name if pattern.by_name else below):
                return not pattern.includes
        return None


class Rules:
    """The rules that apply in one directory. ``key`` identifies them: decisions made under the same key can be
    reused."""

    __slots__ = ("_git", "_own", "key")

    def __init__(self, own: tuple[_Layer, ...], git: tuple[_Layer, ...], key: bytes) -> None:
        self._own = own
        self._git = git
        self.key = key

    @classmethod
    def base(cls, excludes: bytes = b"") -> Rules:
        """The defaults and ``excludes``, the content of git's ``info/exclude``."""
        layers = (_layer(b"", _lines(excludes)), _DEFAULT_LAYER)
        return cls((), layers, piece_digest(_VERSION + repr(DEFAULTS).encode() + excludes))

    def below(self, prefix: bytes, texts: Mapping[bytes, bytes]) -> Rules:
        """These rules and those of the ignore files (name to content) in the directory ``prefix``."""
        if not texts:
            return self
        own, git = self._own, self._git
        if OWN_IGNORE in texts:
            own = (_layer(prefix, _lines(texts[OWN_IGNORE])), *own)
        if GIT_IGNORE in texts:
            git = (_layer(prefix, _lines(texts[GIT_IGNORE])), *git)
        contents = b"\0".join(part for name in sorted(texts) for part in (name, piece_digest(texts[name])))
        return Rules(own, git, piece_digest(self.key + prefix + b"\0" + contents))

    def ignores(self, path: bytes, *, directory: bool) -> bool:
        for layer in (*self._own, _VERSION_CONTROL_LAYER, *self._git):
            ignored = layer.decide(path, directory=directory)
            if ignored is not None:
                return ignored
        return False


EVERYTHING = Rules((), (), b"everything")
"""The key of trees of which nothing is ignored; ignore files in them are not read."""


def _layer(prefix: bytes, lines: Iterable[bytes]) -> _Layer:
    patterns = [pattern for line in lines if (pattern := _pattern(line)) is not None]
    return _Layer(prefix, tuple(reversed(patterns)))


def _pattern(line: bytes) -> _Pattern | None:
    """None for a comment and for a line that matches nothing."""
    if line.startswith(b"#"):
        return None
    line = _without_trailing_spaces(line)
    includes = line.startswith(b"!")
    text = line[includes:]
    directories_only = text.endswith(b"/")
    if directories_only:
        text = text[:-1]
    by_name = b"/" not in text
    regex = compile_wildmatch(text.removeprefix(b"/")) if text else None
    return None if regex is None else _Pattern(regex, includes, directories_only, by_name)


def _lines(text: bytes) -> Iterable[bytes]:
    for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        yield line.removesuffix(b"\r").partition(b"\0")[0]  # to git, a NUL byte ends the line


def _without_trailing_spaces(line: bytes) -> bytes:
    """A space after a backslash is kept."""
    stripped = line.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    return stripped + b" " if backslashes % 2 and stripped != line else stripped


_DEFAULT_LAYER = _layer(b"", (line.encode() for line in DEFAULTS))
_VERSION_CONTROL_LAYER = _layer(b"", (line.encode() for line in _VERSION_CONTROL))

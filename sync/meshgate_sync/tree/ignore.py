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
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .tree import piece_digest

GIT_IGNORE = b".gitignore"
OWN_IGNORE = b".meshgateignore"
IGNORE_FILES = (GIT_IGNORE, OWN_IGNORE)
VENV_MARK = b"pyvenv.cfg"

_VERSION = b"2"  # part of every key: decisions that another version of this module made are not reused
_VERSION_CONTROL = (".git", ".hg", ".svn")

DEFAULTS = (
    *_VERSION_CONTROL,
    ".venv", "venv", ".tox/", ".nox/", ".direnv/", "node_modules",  # also links to shared ones
    "__pycache__/", "*.pyc", "*.pyo",
    ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".cache/", ".ipynb_checkpoints/",
    ".coverage", ".coverage.*",
    ".monarch/",
    ".idea/", ".vscode/", ".DS_Store", "*.swp", "*~", ".#*", "4913", "*___jb_???___",
)  # fmt: skip

_SLASH = ord("/")
_SPACE = b"\t\n\r "  # git's, without vertical tab and form feed
_PRINTABLE = bytes(range(0x20, 0x7F))
_CLASSES = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b"\t ",
    b"cntrl": bytes([*range(0x20), 0x7F]),
    b"digit": string.digits.encode(),
    b"graph": _PRINTABLE.strip(b" "),
    b"lower": string.ascii_lowercase.encode(),
    b"print": _PRINTABLE,
    b"punct": string.punctuation.encode(),
    b"space": _SPACE,
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}


# Translates the patterns of git's ignore files into regular expressions, as gitignore(5) and git's wildmatch.c read
# them.
#
# Patterns and paths are bytes, as in git: ``?`` matches one byte. Matching is case-sensitive on every platform,
# although git's depends on ``core.ignorecase``: the hosts are case-sensitive.


def compile_wildmatch(pattern: bytes) -> re.Pattern[bytes] | None:
    """The expression whose ``fullmatch`` accepts the paths that ``pattern`` matches; None if it cannot match any, such
    as one with an unclosed bracket."""
    parts: list[bytes] = []
    at = 0
    while at < len(pattern):
        start, byte = at, pattern[at : at + 1]
        at += 1
        if byte == b"*":
            while pattern[at : at + 1] == b"*":
                at += 1
            at += _add_stars(parts, pattern, start, at)
        elif byte == b"?":
            parts.append(b"[^/]")
        elif byte == b"[":
            bracket = _bracket(pattern, at)
            if bracket is None:
                return None
            accepted, at = bracket
            parts.append(b"[" + b"".join(b"\\x%02x" % each for each in sorted(accepted)) + b"]")
        elif byte == b"\\":
            if at == len(pattern):
                return None
            parts.append(re.escape(pattern[at : at + 1]))
            at += 1
        else:
            parts.append(re.escape(byte))
    return re.compile(b"".join(parts), re.DOTALL)


def _add_stars(parts: list[bytes], pattern: bytes, start: int, end: int) -> int:
    """Adds what the asterisks in ``pattern[start:end]`` match; returns how many bytes after them are consumed."""
    after = pattern[end:]
    between_slashes = (start == 0 or pattern[start - 1] == _SLASH) and (not after or after.startswith((b"/", b"\\/")))
    if end - start == 1 or not between_slashes:
        parts.append(b"[^/]*")
        return 0
    if after.startswith(b"/"):
        parts.append(b"(?:.*/)?")
        return 1
    parts.append(b".*")
    return 0


def _bracket(pattern: bytes, at: int) -> tuple[set[int], int] | None:
    """The bytes that the bracket expression whose content begins at ``at`` accepts, and where the pattern continues;
    None if it is malformed. It never accepts a slash."""
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    previous = 0  # the start of a range that "-" would complete
    first = True
    while first or pattern[at : at + 1] != b"]":
        first = False
        name = _class_name(pattern, at)
        if name is not None:
            if name not in _CLASSES:
                return None
            members.update(_CLASSES[name])
            at += len(name) + 4
            previous = 0
            continue
        is_range = previous and pattern[at : at + 1] == b"-" and pattern[at + 1 : at + 2] not in (b"]", b"")
        at += bool(is_range)
        at += pattern[at : at + 1] == b"\\"
        if at >= len(pattern):
            return None
        members.update(range(previous, pattern[at] + 1) if is_range else (pattern[at],))
        previous = 0 if is_range else pattern[at]
        at += 1
    accepted = set(range(256)) - members if negated else members
    accepted.discard(_SLASH)
    return (accepted, at + 1) if accepted else None


def _class_name(pattern: bytes, at: int) -> bytes | None:
    """``digit`` if ``[:digit:]`` is at ``at``; None if no character class is there."""
    if not pattern.startswith(b"[:", at):
        return None
    end = pattern.find(b"]", at + 2)
    if end < at + 3 or pattern[end - 1 : end] != b":":
        return None
    return pattern[at + 2 : end - 1]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One line of an ignore file. ``by_name``: it matches the last name of a path, in any directory below the file."""

    regex: re.Pattern[bytes]
    includes: bool
    directories_only: bool
    by_name: bool


@dataclass(frozen=True, slots=True)
class Patterns:
    """The rules of one ignore file, the last line first. ``prefix``: its directory below the root, empty or ending in
    ``/``."""

    prefix: bytes
    patterns: tuple[_Pattern, ...]

    @classmethod
    def of(cls, lines: Iterable[bytes], prefix: bytes = b"") -> Patterns:
        patterns = [pattern for line in lines if (pattern := _pattern(line)) is not None]
        return cls(prefix, tuple(reversed(patterns)))

    @property
    def include(self) -> bool:
        """Whether any of them includes what others ignore, so that ``cover`` may accept what is in an ignored
        directory."""
        return any(pattern.includes for pattern in self.patterns)

    def decide(self, path: bytes, *, directory: bool) -> bool | None:
        below = path[len(self.prefix) :]
        name = below.rpartition(b"/")[2]
        for pattern in self.patterns:
            if pattern.directories_only and not directory:
                continue
            if pattern.regex.fullmatch(name if pattern.by_name else below):
                return not pattern.includes
        return None

    def cover(self, path: bytes, *, directory: bool) -> bool:
        """Whether the last line that matches ``path`` or a directory above it ignores them. As Docker reads its file,
        and unlike git, this includes again what is in an ignored directory."""
        names = path.split(b"/")
        above = [b"/".join(names[:count]) for count in range(1, len(names))]
        each = [(path, directory), *((parent, True) for parent in above)]
        for pattern in self.patterns:
            single = Patterns(self.prefix, (pattern,))
            if any(single.decide(entry, directory=kind) is not None for entry, kind in each):
                return not pattern.includes
        return False


class Rules:
    """The rules that apply in one directory. ``key`` identifies them: decisions made under the same key can be
    reused."""

    __slots__ = ("_git", "_own", "key")

    def __init__(self, own: tuple[Patterns, ...], git: tuple[Patterns, ...], key: bytes) -> None:
        self._own = own
        self._git = git
        self.key = key

    @classmethod
    def base(cls, excludes: bytes = b"") -> Rules:
        """The defaults and ``excludes``, the content of git's ``info/exclude``."""
        layers = (Patterns.of(_lines(excludes)), _DEFAULT_LAYER)
        return cls((), layers, piece_digest(_VERSION + repr(DEFAULTS).encode() + excludes))

    def below(self, prefix: bytes, texts: Mapping[bytes, bytes]) -> Rules:
        """These rules and those of the ignore files (name to content) in the directory ``prefix``."""
        if not texts:
            return self
        own, git = self._own, self._git
        if OWN_IGNORE in texts:
            own = (Patterns.of(_lines(texts[OWN_IGNORE]), prefix), *own)
        if GIT_IGNORE in texts:
            git = (Patterns.of(_lines(texts[GIT_IGNORE]), prefix), *git)
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


_DEFAULT_LAYER = Patterns.of(line.encode() for line in DEFAULTS)
_VERSION_CONTROL_LAYER = Patterns.of(line.encode() for line in _VERSION_CONTROL)

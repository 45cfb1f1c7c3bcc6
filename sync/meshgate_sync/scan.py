"""Reads a tree from disk into a version (``tree.Directory``), reading only what changed since the last time.

A scan first walks and counts, so that an unreasonable tree is refused before a byte of it is read; then it reads the
files that the stat cache does not vouch for; then it names directories by their content, from the leaves
up, taking over those in which nothing changed.
"""

from __future__ import annotations

import os
import stat as modes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import chunks
from .errors import LinkLeavesTree, TreeError, UnstableFile
from .ignore import IGNORE_FILES, VENV_MARK, Rules
from .oversize import Limits, Sizes
from .stat_cache import DirectoryRecord, FileRecord, Stat, StatCache
from .tree import Directory, File, Link

__all__ = ["Limits", "Scan", "Scanner", "git_root"]

_ATTEMPTS = 5
_MAX_IGNORE_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Scan:
    """``tree`` is the version; ``read`` the paths of the files that had to be read for it."""

    tree: Directory
    read: tuple[bytes, ...]
    seconds: float


@dataclass(slots=True)
class _Draft:
    """A directory being scanned. ``entries`` lacks the files that are still to be read."""

    path: bytes
    record: DirectoryRecord
    entries: dict[bytes, File | Link | Directory | _Draft] = field(default_factory=dict)
    fresh: DirectoryRecord = field(default_factory=DirectoryRecord)


class Scanner:
    """Scans one tree, again and again. Not for several threads at once.

    ``clock`` gives nanoseconds since the epoch, by the clock that stamps the files.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        cache: StatCache | None = None,
        limits: Limits | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.root = os.fsencode(os.path.abspath(root))
        self.cache = cache or StatCache()
        self._limits = limits or Limits()
        self._clock = clock
        self._rules: dict[bytes, Rules] = {}  # of each directory

    def scan(self, changed: Iterable[str | os.PathLike[str]] | None = None) -> Scan:
        """The tree as it is now.

        With ``changed``, as it would be if nothing but those paths (absolute, or below the root; and what lies below
        them) had changed since the last scan: what a file watcher reported. Raises TreeTooLarge, LinkLeavesTree,
        UnstableFile, and TreeError when there is no such directory.
        """
        started = time.perf_counter()
        walk = _Walk(self.root, self.cache, Sizes(os.fsdecode(self.root), self._limits), self._touched(changed))
        draft = walk.walk(b"", Rules.base(self._info_exclude()))
        walk.sizes.check()
        if walk.leaving:
            raise LinkLeavesTree([(os.fsdecode(path), os.fsdecode(target)) for path, target in walk.leaving])
        for directory, name, path in walk.unread:
            record = self._read(path)
            if record is not None:
                directory.entries[name] = record.file
                directory.fresh.files[name] = record
        kept: dict[bytes, DirectoryRecord] = {}
        tree = _build(draft, kept)
        walk.keep_untouched(kept)
        self.cache.directories = kept
        self._rules = walk.rules if walk.full else {**self._rules, **walk.rules}
        read = tuple(path for _, _, path in walk.unread)
        return Scan(tree, read, time.perf_counter() - started)

    def ignores(self, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` (absolute, or below the root) is outside, or is left out by the rules of the last scan, or
        lies in what is. Reads no file: what is in directories that are new since then counts as not left out."""
        relative = os.path.relpath(os.path.join(self.root, os.fsencode(path)), self.root)
        if relative == b".." or relative.startswith(b"../"):
            return True
        names, known, above = relative.split(b"/"), self._rules, b""
        for place, name in enumerate(names):
            rules, below = known.get(above), above + b"/" + name if above else name
            if rules is None:
                return False
            if below not in known:
                last = place == len(names) - 1
                full = os.path.join(self.root, below)
                directory = not last or (os.path.isdir(full) and not os.path.islink(full))
                if last and name in IGNORE_FILES:
                    return False
                if _left_out(rules, below, full, directory=directory):
                    return True
            above = below
        return False

    def _read(self, path: bytes) -> FileRecord | None:
        """The file as it is; None when it is gone since it was listed: then the tree is as if listed a moment later."""
        full = os.path.join(self.root, path)
        for _ in range(_ATTEMPTS):
            read_at = self._clock()
            try:
                handle = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            except OSError as problem:
                raise TreeError(f"{os.fsdecode(path)} cannot be read: {problem.strerror}") from problem
            try:
                before = stat_of(os.fstat(handle))
                pieces, count = chunks.cut(lambda n: os.read(handle, n), before[0])  # noqa: B023 - used at once
                after = stat_of(os.fstat(handle))
            finally:
                os.close(handle)
            if before == after and count == after[0]:
                return FileRecord(after, read_at, File(pieces, bool(after[4] & 0o100)))
        raise UnstableFile(os.fsdecode(path), _ATTEMPTS)

    def _info_exclude(self) -> bytes:
        return _text(os.path.join(self.root, b".git", b"info", b"exclude"))

    def _touched(self, changed: Iterable[str | os.PathLike[str]] | None) -> _Touched | None:
        if changed is None or not self.cache.directories or self.cache.directories[b""].tree is None:
            return None
        touched = _Touched(set(), [])
        for path in changed:
            relative = os.path.relpath(os.path.join(self.root, os.fsencode(path)), self.root)
            if relative == b"." or relative.startswith(b"..") or os.path.basename(relative) in IGNORE_FILES:
                return None
            touched.subtrees.append(relative + b"/")
            while relative:
                relative = os.path.dirname(relative)
                touched.directories.add(relative)
        return touched


@dataclass(frozen=True, slots=True)
class _Touched:
    directories: set[bytes]
    subtrees: list[bytes]

    def __contains__(self, path: bytes) -> bool:
        return path in self.directories or any((path + b"/").startswith(subtree) for subtree in self.subtrees)


class _Walk:
    """One walk: what there is, what of it must be read, and what cannot be synced."""

    def __init__(self, root: bytes, cache: StatCache, sizes: Sizes, touched: _Touched | None) -> None:
        self.sizes = sizes
        self.unread: list[tuple[_Draft, bytes, bytes]] = []
        self.leaving: list[tuple[bytes, bytes]] = []
        self._root = root
        self._known = cache.directories
        self.full = touched is None
        self.rules: dict[bytes, Rules] = {}  # of each directory that was walked
        self._touched = touched
        self._untouched: list[bytes] = []

    def walk(self, path: bytes, rules: Rules) -> _Draft:
        draft = _Draft(path, self._known.get(path) or DirectoryRecord())
        prefix = path + b"/" if path else b""
        full = os.path.join(self._root, path) if path else self._root
        found: dict[bytes, os.DirEntry[bytes]] = {}
        try:
            with os.scandir(full) as listing:
                found = {entry.name: entry for entry in listing}
        except OSError as problem:
            if path and isinstance(problem, FileNotFoundError):
                return draft  # gone since it was listed; the watcher, or the next scan, sees its parent change
            raise TreeError(f"{os.fsdecode(full)} cannot be read: {problem.strerror}") from problem
        texts = {name: _text(os.path.join(full, name)) for name in IGNORE_FILES if name in found}
        rules = self.rules[path] = rules.below(prefix, texts)
        ignored = self._ignored(draft, prefix, found, rules)
        draft.fresh = DirectoryRecord(
            rules.key, frozenset(name for name in ignored if not found[name].is_dir(follow_symlinks=False))
        )
        for name, entry in found.items():
            if name not in ignored:
                self._visit(draft, name, entry, prefix + name, rules)
        return draft

    def _ignored(
        self, draft: _Draft, prefix: bytes, found: dict[bytes, os.DirEntry[bytes]], rules: Rules
    ) -> frozenset[bytes]:
        """The names left out. Decisions made under the same rules for the same names are taken over."""
        record = draft.record
        known = record.rules == rules.key
        ignored = set()
        for name, entry in found.items():
            directory = entry.is_dir(follow_symlinks=False)
            if known and not directory:
                if name in record.files:
                    continue
                if name in record.ignored:
                    ignored.add(name)
                    continue
            if _left_out(rules, prefix + name, entry.path, directory=directory):
                ignored.add(name)
        return frozenset(ignored)

    def _visit(self, draft: _Draft, name: bytes, entry: os.DirEntry[bytes], path: bytes, rules: Rules) -> None:
        if entry.is_dir(follow_symlinks=False):
            before = self._known.get(path)
            if self._touched is not None and before is not None and before.tree and path not in self._touched:
                draft.entries[name] = before.tree
                self._untouched.append(path)
                self.sizes.add(path, before.tree.size, before.tree.files)
            else:
                draft.entries[name] = self.walk(path, rules)
            return
        try:
            if entry.is_symlink():
                self._visit_link(draft, name, path, os.readlink(entry.path))
                return
            stat = stat_of(entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            return  # gone since it was listed
        if not modes.S_ISREG(stat[4]):
            return  # sockets, pipes and devices mean nothing on another host
        self.sizes.add(path, stat[0], 1)
        record = draft.record.files.get(name)
        if record is not None and record.trusts(stat):
            draft.entries[name] = record.file
            draft.fresh.files[name] = record
        else:
            self.unread.append((draft, name, path))

    def _visit_link(self, draft: _Draft, name: bytes, path: bytes, target: bytes) -> None:
        landed = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if os.path.isabs(target) or landed == b".." or landed.startswith(b"../"):
            self.leaving.append((path, target))
        self.sizes.add(path, 0, 1)
        draft.entries[name] = Link(target)

    def keep_untouched(self, kept: dict[bytes, DirectoryRecord]) -> None:
        """Copies the records of the subtrees that were not walked."""
        for path in self._untouched:
            prefix = path + b"/"
            kept[path] = self._known[path]
            kept.update((below, record) for below, record in self._known.items() if below.startswith(prefix))


def _left_out(rules: Rules, path: bytes, full: bytes, *, directory: bool) -> bool:
    return rules.ignores(path, directory=directory) or (directory and os.path.lexists(os.path.join(full, VENV_MARK)))


def _build(draft: _Draft, kept: dict[bytes, DirectoryRecord]) -> Directory:
    """The directory, named; the one of the last scan where all entries are the same."""
    entries = {name: _build(node, kept) if isinstance(node, _Draft) else node for name, node in draft.entries.items()}
    before = draft.record.tree
    tree = before if before is not None and before.entries == entries else Directory(entries)
    draft.fresh.tree = tree
    kept[draft.path] = draft.fresh
    return tree


def stat_of(status: os.stat_result) -> Stat:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode


def _text(path: bytes) -> bytes:
    """The start of a rules file, empty where there is none."""
    try:
        with open(path, "rb") as rules:
            return rules.read(_MAX_IGNORE_FILE)
    except OSError:
        return b""


def git_root(start: str | os.PathLike[str]) -> str | None:
    """The nearest directory at or above ``start`` that holds ``.git``; None when there is none."""
    path = os.path.abspath(start)
    while True:
        if os.path.lexists(os.path.join(path, ".git")):
            return path
        parent = os.path.dirname(path)
        if parent == path:
            return None
        path = parent

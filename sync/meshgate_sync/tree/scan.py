"""Scans a tree on disk into a version (``tree.Directory``), reading only files that changed since the last scan.

A scan first walks and counts, so that a tree that is too large is rejected before any file is read; then it reads the
files that the stat cache does not know to be unchanged; then it computes the digests of directories from the leaves up,
reusing those in which nothing changed.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import stat as modes
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from ..errors import LinkLeavesTree, TreeError, TreeTooLarge, UnstableFile, readable
from . import chunks
from .ignore import EVERYTHING, IGNORE_FILES, VENV_MARK, Rules
from .tree import DIGEST_SIZE, Directory, File, Piece, Symlink, piece_digest

_ATTEMPTS = 5
_MAX_IGNORE_FILE = 1 << 20
_MAGIC = b"meshgate-stat-1\n"
_TICK_NS = 50_000_000
_COARSE_NS = 2_000_000_000

Stat = tuple[int, int, int, int, int]
"""Size, mtime and ctime in nanoseconds, inode, mode."""
_LARGEST = 10
_DEPTH = 3
_DOMINANT_SHARE = 0.8
_GIVE_UP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    bytes: int = 1_000_000_000
    files: int = 200_000


class Sizes:
    """The size of a tree, added up while it is walked.

    ``check`` raises TreeTooLarge; so does ``add`` once the tree is so large that walking the rest is a waste of time.
    """

    def __init__(self, root: str, limits: Limits) -> None:
        self.bytes = 0
        self.files = 0
        self._root = root
        self._limits = limits
        self._entries: list[tuple[bytes, int, int]] = []

    def add(self, path: bytes, size: int, files: int) -> None:
        self.bytes += size
        self.files += files
        self._entries.append((path, size, files))
        if self.files > _GIVE_UP_FACTOR * self._limits.files:
            self.check()

    def check(self) -> None:
        limits = self._limits
        if self.bytes > limits.bytes:
            reason = f"it has {self.bytes / 1e6:,.0f} MB, the limit is {limits.bytes / 1e6:,.0f} MB"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=True))
        if self.files > limits.files:
            reason = f"it has {self.files:,} files, the limit is {limits.files:,}"
            raise TreeTooLarge(self._root, reason, self._largest(by_size=False))

    def _largest(self, *, by_size: bool) -> list[tuple[str, int, int]]:
        """The largest directories near the top and files anywhere, except directories that are large only because of
        one entry in the list."""
        totals: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        for path, size, files in self._entries:
            names = path.split(b"/")
            ends = {*range(1, min(len(names), _DEPTH + 1)), len(names)}
            for end in ends:
                total = totals[b"/".join(names[:end])]
                total[0] += size
                total[1] += files
        unit = 0 if by_size else 1
        largest_below: dict[bytes, int] = defaultdict(int)  # size of the largest entry below a directory
        for path, total in totals.items():
            above = path.rpartition(b"/")[0]
            while above:
                largest_below[above] = max(largest_below[above], total[unit])
                above = above.rpartition(b"/")[0]
        candidates = [path for path in totals if largest_below[path] < _DOMINANT_SHARE * totals[path][unit]]
        chosen = sorted(candidates, key=lambda path: (-totals[path][unit], path))[:_LARGEST]
        return [(readable(path), totals[path][0], totals[path][1]) for path in chosen]


# The results of the last scan, so that the next one reads only what changed.
#
# A file counts as unchanged if its size, times and inode are what they were when it was read, and if its change time is
# clearly before that: a file that was written in the same clock tick in which it was read may have changed afterwards
# unnoticed, so it is read again. Git's index has the same rule.
#
# The cache only saves time: one that is missing, damaged or of another format counts as empty.


@dataclass(frozen=True, slots=True)
class FileRecord:
    stat: Stat
    read_at: int  # nanoseconds since the epoch, before the file was opened
    file: File

    def trusts(self, stat: Stat) -> bool:
        if stat != self.stat:
            return False
        latest = max(stat[1], stat[2])
        return latest + (_TICK_NS if latest % 1_000_000_000 else _COARSE_NS) < self.read_at


@dataclass(slots=True)
class DirectoryRecord:
    """One directory: its files, and the names that were ignored under the rules with the key ``rules``."""

    rules: bytes = b""
    ignored: frozenset[bytes] = frozenset()
    files: dict[bytes, FileRecord] = field(default_factory=dict)
    tree: Directory | None = None  # of the last scan; not saved


class StatCache:
    """Directories by path below the root (bytes, ``/`` between names, empty for the root itself)."""

    def __init__(self) -> None:
        self.directories: dict[bytes, DirectoryRecord] = {}

    @classmethod
    def load(cls, path: str) -> StatCache:
        cache = cls()
        with contextlib.suppress(OSError, ValueError, TypeError, EOFError):
            with open(path, "rb") as stored:
                data = stored.read()
            body = data[len(_MAGIC) + DIGEST_SIZE :]
            if data.startswith(_MAGIC) and data[len(_MAGIC) : len(_MAGIC) + DIGEST_SIZE] == piece_digest(body):
                cache.directories = _load(marshal.loads(body))
        return cache

    def save(self, path: str) -> None:
        """Atomic: a reader sees the old cache or the new one."""
        body = marshal.dumps(_dump(self.directories))
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory)
        try:
            with open(handle, "wb") as out:
                out.write(_MAGIC + piece_digest(body) + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _dump(directories: dict[bytes, DirectoryRecord]) -> list[Any]:
    return [
        (path, record.rules, list(record.ignored), [_dump_file(name, file) for name, file in record.files.items()])
        for path, record in directories.items()
    ]


def _dump_file(name: bytes, record: FileRecord) -> tuple[Any, ...]:
    pieces = [(piece.digest, piece.size) for piece in record.file.pieces]
    return name, record.stat, record.read_at, record.file.executable, pieces


def _load(stored: list[Any]) -> dict[bytes, DirectoryRecord]:
    return {
        path: DirectoryRecord(rules, frozenset(ignored), {entry[0]: _load_file(*entry) for entry in entries})
        for path, rules, ignored, entries in stored
    }


def _load_file(_name: bytes, stat: Stat, read_at: int, executable: bool, pieces: list[tuple[bytes, int]]) -> FileRecord:
    return FileRecord(stat, read_at, File(tuple([Piece(digest, size) for digest, size in pieces]), executable))


@dataclass(frozen=True, slots=True)
class Scan:
    """``tree``: the version. ``read``: the paths of the files that had to be read."""

    tree: Directory
    read: tuple[bytes, ...]
    seconds: float


@dataclass(slots=True)
class _Draft:
    """A directory during a scan. Files that are still to be read are not in ``entries`` yet."""

    path: bytes
    record: DirectoryRecord
    entries: dict[bytes, File | Symlink | Directory | _Draft] = field(default_factory=dict)
    fresh: DirectoryRecord = field(default_factory=DirectoryRecord)


class Scanner:
    """Scans one tree repeatedly. Not thread-safe.

    With ``everything``, nothing is ignored, and links may leave the tree. ``clock`` returns nanoseconds since the
    epoch, from the clock of the file system.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        cache: StatCache | None = None,
        limits: Limits | None = None,
        everything: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.root = os.fsencode(os.path.abspath(root))
        self.cache = cache or StatCache()
        self._limits = limits or Limits()
        self._everything = everything
        self._clock = clock
        self._rules: dict[bytes, Rules] = {}  # by directory

    def scan(self, changed: Iterable[str | os.PathLike[str]] | None = None) -> Scan:
        """The tree as it is now.

        ``changed``: the only paths that may have changed since the last scan, such as a file watcher reports: absolute
        or relative to the root, with everything below them. Raises TreeTooLarge, LinkLeavesTree, UnstableFile, and
        TreeError if the directory or a file cannot be read.
        """
        started = time.perf_counter()
        walk = _Walk(self.root, self.cache, Sizes(readable(self.root), self._limits), self._changes(changed))
        try:
            draft = walk.walk(b"", EVERYTHING if self._everything else Rules.base(self._info_exclude()))
        except OSError as error:  # such as of the entries of a directory that can be listed and not entered
            raise _unreadable(os.path.relpath(os.fsencode(error.filename or self.root), self.root), error) from error
        walk.sizes.check()
        if walk.leaving_links and not self._everything:
            raise LinkLeavesTree([(readable(path), readable(target)) for path, target in walk.leaving_links])
        for directory, name, path in walk.unread:
            record = self._read(path)
            if record is not None:
                directory.entries[name] = record.file
                directory.fresh.files[name] = record
        records: dict[bytes, DirectoryRecord] = {}
        tree = _build(draft, records)
        walk.keep_unwalked(records)
        self.cache.directories = records
        self._rules = walk.rules if walk.full else {**self._rules, **walk.rules}
        read = tuple(path for _, _, path in walk.unread)
        return Scan(tree, read, time.perf_counter() - started)

    def ignores(self, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` (absolute, or relative to the root) is outside the tree, or ignored by the rules of the last
        scan, or in an ignored directory. Reads no file: nothing in a directory that is newer than the scan is
        ignored."""
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
                if _is_ignored(rules, below, full, directory=directory):
                    return True
            above = below
        return False

    def _read(self, path: bytes) -> FileRecord | None:
        """The file as it is now; None if it was removed after it was listed, or replaced by something else.

        A file that grows during every attempt, such as a log, is taken at the size it had when the last one began.
        """
        full = os.path.join(self.root, path)
        try:
            for attempt in range(_ATTEMPTS):
                read_at = self._clock()
                handle = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                if not modes.S_ISREG(os.fstat(handle).st_mode):
                    os.close(handle)
                    return None
                with os.fdopen(handle, "rb", buffering=0) as file:
                    before = stat_of(os.fstat(handle))
                    size = before[0]
                    last = attempt == _ATTEMPTS - 1
                    pieces, count = _cut_start(file, size) if last else chunks.cut(file.read, size)
                    after = stat_of(os.fstat(handle))
                    stable = before == after or (last and after[0] > size and _cut_start(file, size)[0] == pieces)
                if stable and count == size:
                    return FileRecord(before, read_at, File(pieces, bool(before[4] & 0o100)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link now
                return None
            raise _unreadable(path, error) from error
        raise UnstableFile(readable(path), _ATTEMPTS)

    def _info_exclude(self) -> bytes:
        git = os.path.join(self.root, b".git")
        if os.path.isfile(git):  # a worktree or a submodule: the file names its directory
            git = os.path.join(self.root, _text(git).removeprefix(b"gitdir:").strip())
            git = os.path.join(git, _text(os.path.join(git, b"commondir")).strip())
        return _text(os.path.join(git, b"info", b"exclude"))

    def _changes(self, changed: Iterable[str | os.PathLike[str]] | None) -> _Changes | None:
        if changed is None or not self.cache.directories or self.cache.directories[b""].tree is None:
            return None
        changes = _Changes(set(), [])
        for path in changed:
            relative = os.path.relpath(os.path.join(self.root, os.fsencode(path)), self.root)
            if relative == b"." or relative.startswith(b"..") or os.path.basename(relative) in IGNORE_FILES:
                return None
            changes.subtrees.append(relative + b"/")
            while relative:
                relative = os.path.dirname(relative)
                changes.directories.add(relative)
        return changes


@dataclass(frozen=True, slots=True)
class _Changes:
    directories: set[bytes]
    subtrees: list[bytes]

    def __contains__(self, path: bytes) -> bool:
        return path in self.directories or any((path + b"/").startswith(subtree) for subtree in self.subtrees)


class _Walk:
    """One walk of the tree: its entries, the files that must be read, and the links that leave it."""

    def __init__(self, root: bytes, cache: StatCache, sizes: Sizes, changes: _Changes | None) -> None:
        self.sizes = sizes
        self.unread: list[tuple[_Draft, bytes, bytes]] = []
        self.leaving_links: list[tuple[bytes, bytes]] = []
        self._root = root
        self._known = cache.directories
        self.full = changes is None
        self.rules: dict[bytes, Rules] = {}  # by directory that was walked
        self._changes = changes
        self._unwalked: list[bytes] = []

    def walk(self, path: bytes, rules: Rules) -> _Draft:
        draft = _Draft(path, self._known.get(path) or DirectoryRecord())
        prefix = path + b"/" if path else b""
        full = os.path.join(self._root, path) if path else self._root
        found: dict[bytes, os.DirEntry[bytes]] = {}
        try:
            with os.scandir(full) as listing:
                found = {entry.name: entry for entry in listing}
        except OSError as error:
            if path and isinstance(error, (FileNotFoundError, NotADirectoryError)):
                return draft  # removed or replaced after it was listed; the next scan sees that its parent changed
            raise TreeError(f"cannot read directory {readable(full)}: {error.strerror}") from error
        texts = {name: _text(os.path.join(full, name)) for name in IGNORE_FILES if name in found}
        rules = self.rules[path] = rules if rules is EVERYTHING else rules.below(prefix, texts)
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
        """The ignored names. Decisions of the last scan under the same rules are reused."""
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
            if _is_ignored(rules, prefix + name, entry.path, directory=directory):
                ignored.add(name)
        return frozenset(ignored)

    def _visit(self, draft: _Draft, name: bytes, entry: os.DirEntry[bytes], path: bytes, rules: Rules) -> None:
        if entry.is_dir(follow_symlinks=False):
            before = self._known.get(path)
            if self._changes is not None and before is not None and before.tree and path not in self._changes:
                draft.entries[name] = before.tree
                self._unwalked.append(path)
                self.sizes.add(path, before.tree.size, before.tree.files)
            else:
                draft.entries[name] = self.walk(path, rules)
            return
        try:
            if entry.is_symlink():
                self._visit_link(draft, name, path, os.readlink(entry.path))
                return
            stat = stat_of(entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return  # removed after it was listed
        if not modes.S_ISREG(stat[4]):
            return  # sockets, pipes and devices are not synced
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
            self.leaving_links.append((path, target))
        self.sizes.add(path, 0, 1)
        draft.entries[name] = Symlink(target)

    def keep_unwalked(self, records: dict[bytes, DirectoryRecord]) -> None:
        """Copies the records of the subtrees that were not walked."""
        for path in self._unwalked:
            prefix = path + b"/"
            records[path] = self._known[path]
            records.update((below, record) for below, record in self._known.items() if below.startswith(prefix))


def _is_ignored(rules: Rules, path: bytes, full: bytes, *, directory: bool) -> bool:
    if rules is EVERYTHING:
        return False
    return rules.ignores(path, directory=directory) or (directory and os.path.lexists(os.path.join(full, VENV_MARK)))


def _build(draft: _Draft, records: dict[bytes, DirectoryRecord]) -> Directory:
    """The directory with its digest; that of the last scan if all entries are the same."""
    items = draft.entries.items()
    entries = {name: _build(node, records) if isinstance(node, _Draft) else node for name, node in items}
    before = draft.record.tree
    tree = before if before is not None and before.entries == entries else Directory(entries)
    draft.fresh.tree = tree
    records[draft.path] = draft.fresh
    return tree


def _cut_start(file: FileIO, size: int) -> tuple[tuple[Piece, ...], int]:
    """The pieces of the first ``size`` bytes of ``file``, and how many bytes it has of them."""
    file.seek(0)
    return chunks.cut(lambda count: file.read(min(count, size - file.tell())), size)


def stat_of(status: os.stat_result) -> Stat:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode


def _unreadable(path: bytes, error: OSError) -> TreeError:
    hint = "Make it readable, or list it in .meshgateignore"
    return TreeError(f"cannot read {readable(path)}: {error.strerror}. {hint}")


def _text(path: bytes) -> bytes:
    """The first MiB of a file, empty if there is none."""
    try:
        with open(path, "rb") as rules:
            return rules.read(_MAX_IGNORE_FILE)
    except OSError:
        return b""


def git_root(start: str | os.PathLike[str]) -> str | None:
    """The nearest directory at or above ``start`` that contains ``.git``, or None."""
    path = os.path.abspath(start)
    while True:
        if os.path.lexists(os.path.join(path, ".git")):
            return path
        parent = os.path.dirname(path)
        if parent == path:
            return None
        path = parent

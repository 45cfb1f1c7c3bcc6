"""Files by content: what every snapshot of a host is linked from.

An object is a file named by its content and executable bit, read-only, with a modification time computed from its
content. So the same content has the same time in every snapshot and on every host, a changed file always has
another (compiled modules are told stale by it), and an object that a process wrote through a hard link is noticed by
a ``stat``. Its access time is when a version that is being brought together last had a use for it.

A large file is assembled beside the objects, piece by piece at its place, and becomes an object by a rename: a
crash loses nothing but the renames, and what is assembled is found again by its digests.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from .digest import piece_digest
from .tree import MAX_PIECE, File, Piece

__all__ = ["Assembly", "Objects", "modified_at"]

_EPOCH = 1_000_000_000
_COPY_BUFFER = 1024 * 1024
_RENEWED_AFTER = 60.0
_PARTIAL = "partial-"


def modified_at(file: File) -> int:
    """The modification time of every copy of ``file``: seconds, between 2001 and 2018."""
    return _EPOCH + (int.from_bytes(file.digest[:4], "big") >> 3)


class Objects:
    """The objects below ``directory``; ``work`` is a directory of this process alone on the same file system.

    Those below ``unread`` were there when the machine went down, perhaps before the disk had everything. Each is
    hashed before it is first relied on, by whichever process that is, and becomes an object like any other.
    """

    def __init__(self, directory: str, unread: str, work: str) -> None:
        self._directory = directory
        self._unread = unread
        self._work = work
        self._places: dict[bytes, tuple[str, int, int]] = {}
        self._placed: dict[str, list[bytes]] = {}
        self._files: dict[str, File] = {}
        self._assemblies: dict[str, Assembly] = {}
        self._serial = 0

    def path(self, file: File) -> str:
        key = file.key
        return os.path.join(self._directory, key[:2], key[2:])

    def holds(self, file: File) -> bool:
        """Whether the object is there, and as it was written; if not, whatever is there is removed. For one who
        has a use for it: it counts as written now."""
        path = self.path(file)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if not self._recover(file):
                return False
            status = os.stat(path)
        if status.st_size != file.size or status.st_mtime != modified_at(file):
            self.discard(file)
            return False
        now = time.time()
        if now - status.st_atime > _RENEWED_AFTER:
            os.utime(path, (now, modified_at(file)))
        if file.pieces and file.pieces[-1].digest not in self._places:
            self._learn(path, file)
        return True

    def sound(self, file: File, entry: str | bytes | None = None) -> bool:
        """Whether the object, or the file ``entry`` that was made of it, is there as it was written."""
        try:
            status = os.stat(self.path(file) if entry is None else entry, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_size == file.size and status.st_mtime == modified_at(file)

    def hashes(self, file: File) -> bool:
        """Whether every byte of the object is what its name says."""
        return _hashes(self.path(file), file)

    def distrust(self) -> None:
        """The machine went down: sets aside all objects, to be read before they are used. Under the store's lock; cut
        short, it is to be done again."""
        if not os.path.lexists(self._unread):
            os.rename(self._directory, self._unread)
            os.mkdir(self._directory)
            return
        for path, key in _walk(self._directory):
            aside = os.path.join(self._unread, key[:2], key[2:])
            os.makedirs(os.path.dirname(aside), exist_ok=True)
            os.rename(path, aside)

    def _recover(self, file: File) -> bool:
        """Takes the object back from among the unread, if it is there and has all its bytes."""
        aside = os.path.join(self._unread, file.key[:2], file.key[2:])
        if not os.path.lexists(aside):
            return False
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if not _hashes(aside, file):
                os.unlink(aside)
                return False
            os.chmod(aside, 0o555 if file.executable else 0o444)
            os.utime(aside, (time.time(), modified_at(file)))
            _rename_into(aside, self.path(file))
        return os.path.lexists(self.path(file))

    def paths(self) -> Iterator[tuple[str, str]]:
        """Every object there is, unread ones too, with its key."""
        yield from _walk(self._directory)
        yield from _walk(self._unread)

    def discard(self, file: File) -> None:
        path = self.path(file)
        self.lost(path)
        if os.path.lexists(path):
            os.unlink(path)

    def write(self, file: File, data: bytes) -> None:
        """Makes the object of a file in one piece, whose digest the caller has checked."""
        self._serial += 1
        temporary = os.path.join(self._work, f"object-{self._serial}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, data, 0)
            self.seal(handle, temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(handle)

    def assemble(self, file: File) -> Assembly:
        """A large file to be completed, with what an earlier attempt left of it; one and the same for all who ask."""
        assembly = self._assemblies.get(file.key)
        if assembly is None:
            assembly = Assembly(self, os.path.join(self._work, _PARTIAL + file.key), file)
            self._assemblies[file.key] = assembly
        return assembly

    def close_assemblies(self, *, but: Container[str] = ()) -> None:
        """Of files that nobody brings together any more: all but those with these keys. What is assembled stays for
        whoever asks for the file again, until ``drop_partials``."""
        for key in [key for key in self._assemblies if key not in but]:
            self._assemblies.pop(key).close()

    def drop_partials(self, before: float) -> int:
        """Removes what was last written to at the time ``before``, or earlier, of files that nobody brings together;
        returns how many bytes that was."""
        freed = 0
        for name in os.listdir(self._work):
            key = name.removeprefix(_PARTIAL)
            path = os.path.join(self._work, name)
            if key != name and key not in self._assemblies and (status := os.stat(path)).st_mtime <= before:
                self.lost(path)
                os.unlink(path)
                freed += status.st_blocks * 512
        return freed

    def read(self, digest: bytes) -> bytes | None:
        """A piece, verified; None when it is not held, or no longer as it was."""
        place = self._places.get(digest)
        if place is None:
            return None
        path, offset, size = place
        try:
            with open(path, "rb", buffering=0) as content:
                content.seek(offset)
                data = content.read(size)
        except FileNotFoundError:
            data = b""
        if piece_digest(data) == digest:
            return data
        self.lost(path)
        if path.startswith(self._directory) and os.path.lexists(path):
            os.unlink(path)
        return None

    def seal(self, handle: int, temporary: str, file: File) -> None:
        """Turns the open file ``temporary`` into the object of ``file``."""
        self._assemblies.pop(file.key, None)
        os.fchmod(handle, 0o555 if file.executable else 0o444)
        os.utime(handle, (time.time(), modified_at(file)))
        path = self.path(file)
        _rename_into(temporary, path)
        self.lost(temporary)
        self._learn(path, file)

    def place_of(self, digest: bytes) -> tuple[str, int] | None:
        """The file that holds a piece, and where in it."""
        place = self._places.get(digest)
        return place[:2] if place is not None else None

    def copy(self, path: str, start: int, size: int, handle: int, offset: int) -> bool:
        """Copies a stretch of an object, trusted as it is when snapshots are linked: by its size and time. Returns
        whether that was done; the pieces of other files are to be read and verified."""
        file = self._files.get(path)
        if file is None:
            return False
        try:
            source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(source)
            if status.st_size != file.size or status.st_mtime != modified_at(file):
                return False
            _copy(source, start, size, handle, offset)
        finally:
            os.close(source)
        return True

    def _learn(self, path: str, file: File) -> None:
        self._files[path] = file
        for offset, piece in file.offsets():
            self.place(path, offset, piece.digest, piece.size)

    def place(self, path: str, offset: int, digest: bytes, size: int) -> None:
        self._places[digest] = (path, offset, size)
        self._placed.setdefault(path, []).append(digest)

    def lost(self, path: str) -> None:
        """The file ``path`` is gone, or no longer what it was."""
        self._files.pop(path, None)
        for digest in self._placed.pop(path, ()):
            if digest in self._places and self._places[digest][0] == path:
                del self._places[digest]


@dataclass(slots=True)
class _Stretch:
    """Neighbouring pieces of a file that are neighbours in the file ``path`` too, from ``start`` there."""

    path: str
    start: int
    size: int
    pieces: list[tuple[int, Piece]]


class Assembly:
    """A file of several pieces while some of them are ``missing``."""

    def __init__(self, objects: Objects, path: str, file: File) -> None:
        self.file = file
        self.missing: dict[bytes, list[int]] = {}
        self._objects = objects
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fresh = os.fstat(self._handle).st_size != file.size
            if fresh:
                os.truncate(self._handle, 0)
                os.truncate(self._handle, file.size)
            for offset, piece in file.offsets():
                if fresh or not self._has(offset, piece):
                    self.missing.setdefault(piece.digest, []).append(offset)
        except BaseException:
            os.close(self._handle)
            raise

    def place(self, digest: bytes, data: bytes) -> None:
        """Writes a piece wherever the file still lacks it; with the last one the file becomes an object."""
        for offset in self.missing.get(digest, ()):
            _write_all(self._handle, data, offset)
            self._objects.place(self._path, offset, digest, len(data))
        self.missing.pop(digest, None)
        if not self.missing:
            self.seal()

    def take_over(self) -> None:
        """Copies what other objects hold, stretch by stretch: most of a file is what it was before."""
        stretch: _Stretch | None = None
        for offset, piece in self.file.offsets():
            place = self._objects.place_of(piece.digest) if offset in self.missing.get(piece.digest, ()) else None
            if stretch is not None and place == (stretch.path, stretch.start + stretch.size):
                stretch.size += piece.size
                stretch.pieces.append((offset, piece))
                continue
            self._copy(stretch)
            stretch = _Stretch(*place, piece.size, [(offset, piece)]) if place is not None else None
        self._copy(stretch)

    def _copy(self, stretch: _Stretch | None) -> None:
        if stretch is None:
            return
        if self._objects.copy(stretch.path, stretch.start, stretch.size, self._handle, stretch.pieces[0][0]):
            for offset, piece in stretch.pieces:
                self._objects.place(self._path, offset, piece.digest, piece.size)
                offsets = self.missing[piece.digest]
                offsets.remove(offset)
                if not offsets:
                    del self.missing[piece.digest]

    def seal(self) -> None:
        if self._handle >= 0:
            self._objects.seal(self._handle, self._path, self.file)
            self.close()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _has(self, offset: int, piece: Piece) -> bool:
        if piece_digest(os.pread(self._handle, min(piece.size, MAX_PIECE), offset)) != piece.digest:
            return False
        self._objects.place(self._path, offset, piece.digest, piece.size)
        return True


def _walk(top: str) -> Iterator[tuple[str, str]]:
    if os.path.lexists(top):
        for prefix in os.listdir(top):
            for name in os.listdir(os.path.join(top, prefix)):
                yield os.path.join(top, prefix, name), prefix + name


def _hashes(path: str, file: File) -> bool:
    try:
        with open(path, "rb") as content:
            sound = all(piece_digest(content.read(piece.size)) == piece.digest for piece in file.pieces)
            return sound and not content.read(1)
    except FileNotFoundError:
        return False


def _rename_into(temporary: str, path: str) -> None:
    try:
        os.rename(temporary, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(temporary, path)


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view = view[written:]
        offset += written


def _copy(source: int, start: int, size: int, handle: int, offset: int) -> None:
    """In the kernel where it can be, sharing the blocks where the file system can."""
    while size:
        try:
            copied = os.copy_file_range(source, handle, size, start, offset)
        except (AttributeError, OSError):
            copied = 0  # not on this system, or not between these files
        if not copied:
            data = os.pread(source, min(size, _COPY_BUFFER), start)
            if not data:
                raise OSError(errno.EIO, "an object ended while it was copied")
            _write_all(handle, data, offset)
            copied = len(data)
        size, start, offset = size - copied, start + copied, offset + copied


def distinct(files: Iterable[File]) -> list[File]:
    """Each object once; an empty file is none."""
    return list({file.key: file for file in files if file.pieces}.values())

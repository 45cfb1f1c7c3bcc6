"""Objects: files by content, which all snapshots of a host are linked from.

An object is a read-only file named by its content and executable bit, with a modification time computed from its
content. The same content has the same time in every snapshot and on every host, a changed file has another one (by
which Python notices that a compiled module is stale), and ``stat`` shows that a process modified an object through a
hard link. Not noticed is a change that keeps the size and restores the time. The access time is that of the last use by
a version that was being fetched.

A large file is written piece by piece beside the objects and becomes one by a rename. After a crash its pieces are
found again by their digests.

Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from ..tree.tree import MAX_PIECE, Directory, File, Piece, piece_digest

_EPOCH = 1_000_000_000
_COPY_BUFFER = 1024 * 1024
_RENEWED_AFTER = 60.0
_PARTIAL = "partial-"


def modified_at(file: File) -> int:
    """The modification time of every copy of ``file``, in seconds; between 2001 and 2018."""
    return _EPOCH + (int.from_bytes(file.digest[:4], "big") >> 3)


class Objects:
    """The objects below ``directory``. ``work``: a directory of this process alone, on the same file system."""

    def __init__(self, directory: str, work: str) -> None:
        self._directory = directory
        self._work = work
        self._places: dict[bytes, tuple[str, int, int]] = {}
        self._placed: dict[str, list[bytes]] = {}
        self._files: dict[str, File] = {}
        self._assemblies: dict[str, Assembly] = {}
        self._serial = 0

    def path(self, file: File) -> str:
        key = file.key
        return f"{self._directory}/{key[:2]}/{key[2:]}"

    def use(self, file: File) -> bool:
        """Whether the object exists as it was written; removes it if it was changed. For a caller that needs the
        object: it counts as written now."""
        path = self.path(file)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        if status.st_size != file.size or status.st_mtime != modified_at(file):
            self.discard(file)
            return False
        now = time.time()
        if now - status.st_atime > _RENEWED_AFTER:
            os.utime(path, (now, modified_at(file)))
        if path not in self._files or any(piece.digest not in self._places for piece in file.pieces):
            self._learn(path, file)
        return True

    def unwritten(self, file: File) -> int:
        """The bytes that ``file`` still needs on the disk, at most: an unfinished one has some of them."""
        try:
            return max(file.size - os.stat(self._partial(file)).st_blocks * 512, 0)
        except FileNotFoundError:
            return file.size

    def _partial(self, file: File) -> str:
        return os.path.join(self._work, _PARTIAL + file.key)

    def is_unchanged(self, file: File, entry: str | bytes | None = None, *, directory: int | None = None) -> bool:
        """Whether the object, or the file ``entry`` that was made of it, has the size and time it was written with.
        ``directory``: the open directory that ``entry`` is relative to."""
        try:
            status = os.stat(self.path(file) if entry is None else entry, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_size == file.size and status.st_mtime == modified_at(file)

    def verify(self, file: File) -> bool:
        """Whether the content of the object matches its digest."""
        return _hashes(self.path(file), file)

    def move_all_to_trash(self) -> str:
        """Removes all objects while the store is being opened, under its lock; returns the directory to delete."""
        trash = os.path.join(self._work, "trash-objects")
        os.rename(self._directory, trash)
        os.mkdir(self._directory)
        return trash

    def paths(self) -> Iterator[tuple[str, str]]:
        """Every object, with its key."""
        for prefix in os.listdir(self._directory):
            for name in os.listdir(os.path.join(self._directory, prefix)):
                yield os.path.join(self._directory, prefix, name), prefix + name

    def discard(self, file: File) -> None:
        path = self.path(file)
        self.lost(path)
        if os.path.lexists(path):
            os.unlink(path)

    def write(self, file: File, data: bytes) -> None:
        """Creates the object of a file in one piece, whose digest the caller has verified."""
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
        """The unfinished large file, with what an earlier attempt left of it. All versions that need it share it."""
        assembly = self._assemblies.get(file.key)
        if assembly is None:
            assembly = Assembly(self, self._partial(file), file)
            self._assemblies[file.key] = assembly
        return assembly

    def close_assemblies(self, *, but: Container[str] = ()) -> None:
        """Closes all unfinished files except those with these keys. They stay on disk, to be resumed, until
        ``remove_partials``."""
        for key in [key for key in self._assemblies if key not in but]:
            self._assemblies.pop(key).close()

    def remove_partials(self, before: float) -> int:
        """Removes unfinished files that no version needs and that were not written to after ``before``. Returns how
        many bytes were freed."""
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
        """A piece, verified; None if it is not here or is corrupt."""
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
        """Makes the open file ``temporary`` the object of ``file``."""
        self._assemblies.pop(file.key, None)
        os.fchmod(handle, 0o555 if file.executable else 0o444)
        os.utime(handle, (time.time(), modified_at(file)))
        path = self.path(file)
        _rename_into(temporary, path)
        self.lost(temporary)
        self._learn(path, file)

    def location_of(self, digest: bytes) -> tuple[str, int] | None:
        """The file that has a piece, and the offset in it."""
        place = self._places.get(digest)
        return place[:2] if place is not None else None

    def copy(self, path: str, start: int, size: int, handle: int, offset: int) -> bool:
        """Copies a range of an object, if its size and time show that it is unchanged, and returns whether it did. Read
        the pieces of other files and verify them instead."""
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
        self._placed.pop(path, None)
        for offset, piece in file.offsets():
            self.place(path, offset, piece.digest, piece.size)

    def place(self, path: str, offset: int, digest: bytes, size: int) -> None:
        self._places[digest] = (path, offset, size)
        self._placed.setdefault(path, []).append(digest)

    def lost(self, path: str) -> None:
        """The file ``path`` is gone or has changed."""
        self._files.pop(path, None)
        for digest in self._placed.pop(path, ()):
            if digest in self._places and self._places[digest][0] == path:
                del self._places[digest]


@dataclass(slots=True)
class _Range:
    """Consecutive pieces of a file that are also consecutive in the file ``path``, from offset ``start``."""

    path: str
    start: int
    size: int
    pieces: list[tuple[int, Piece]]


class Assembly:
    """An unfinished file of several pieces, some of which are ``missing``."""

    def __init__(self, objects: Objects, path: str, file: File) -> None:
        self.file = file
        self.missing: dict[bytes, dict[int, None]] = {}  # the offsets by digest; thousands may be of the same digest
        self._objects = objects
        self._path = path
        with contextlib.suppress(FileNotFoundError):
            os.chmod(path, 0o600)  # sealed by a process that ended before it could rename the file
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fresh = os.fstat(self._handle).st_size != file.size
            if fresh:
                os.truncate(self._handle, 0)
                os.truncate(self._handle, file.size)
            for offset, piece in file.offsets():
                if fresh or not self._has(offset, piece):
                    self.missing.setdefault(piece.digest, {})[offset] = None
        except BaseException:
            os.close(self._handle)
            raise

    def place(self, digest: bytes, data: bytes) -> None:
        """Writes a piece wherever the file lacks it. With the last piece, the file becomes an object."""
        for offset in self.missing.get(digest, ()):
            _write_all(self._handle, data, offset)
            self._objects.place(self._path, offset, digest, len(data))
        self.missing.pop(digest, None)
        if not self.missing:
            self.seal()

    def copy_known_pieces(self) -> None:
        """Copies what other objects hold, range_ by range_: most of a file is what it was before."""
        range_: _Range | None = None
        for offset, piece in self.file.offsets():
            place = self._objects.location_of(piece.digest) if offset in self.missing.get(piece.digest, ()) else None
            if range_ is not None and place == (range_.path, range_.start + range_.size):
                range_.size += piece.size
                range_.pieces.append((offset, piece))
                continue
            self._copy(range_)
            range_ = _Range(*place, piece.size, [(offset, piece)]) if place is not None else None
        self._copy(range_)

    def _copy(self, range_: _Range | None) -> None:
        if range_ is None:
            return
        if self._objects.copy(range_.path, range_.start, range_.size, self._handle, range_.pieces[0][0]):
            for offset, piece in range_.pieces:
                self._objects.place(self._path, offset, piece.digest, piece.size)
                offsets = self.missing[piece.digest]
                del offsets[offset]
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
    """Copies in the kernel if possible; some file systems then share the blocks."""
    while size:
        try:
            copied = os.copy_file_range(source, handle, size, start, offset)
        except (AttributeError, OSError):
            copied = 0  # not on this system, or not between these files
        if not copied:
            data = os.pread(source, min(size, _COPY_BUFFER), start)
            if not data:
                raise OSError(errno.EIO, "an object was truncated while it was copied")
            _write_all(handle, data, offset)
            copied = len(data)
        size, start, offset = size - copied, start + copied, offset + copied


def distinct_objects(files: Iterable[File]) -> list[File]:
    """Each object once. An empty file is not an object."""
    return list({file.key: file for file in files if file.pieces}.values())


class Fetch:
    """Collects the objects of one version.

    ``files``: those of ``tree`` that are not here yet, each object once. Pieces found in other objects are copied at
    once; the rest is ``missing``: digest to size.
    """

    def __init__(self, objects: Objects, tree: Directory, files: Iterable[File]) -> None:
        self.tree = tree
        self.missing: dict[bytes, int] = {}
        self._objects = objects
        self._single: dict[bytes, list[File]] = {}
        self._parts: dict[bytes, list[Assembly]] = {}
        for file in files:
            self._expect(file)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def assembling(self) -> Iterator[str]:
        """The keys of its unfinished files."""
        return (assembly.file.key for assemblies in self._parts.values() for assembly in assemblies)

    def add(self, digest: bytes, data: bytes) -> None:
        """Stores a piece, whose digest the caller has verified. Ignores one that is not missing."""
        if digest not in self.missing:
            return
        for file in self._single.get(digest, ()):
            self._objects.write(file, data)
        for assembly in self._parts.get(digest, ()):
            assembly.place(digest, data)
        del self.missing[digest]

    def _expect(self, file: File) -> None:
        if len(file.pieces) == 1:
            piece = file.pieces[0]
            data = self._objects.read(piece.digest)
            if data is not None:
                self._objects.write(file, data)
            else:
                self._single.setdefault(piece.digest, []).append(file)
                self.missing[piece.digest] = piece.size
            return
        assembly = self._objects.assemble(file)
        assembly.copy_known_pieces()
        sizes = {piece.digest: piece.size for piece in file.pieces}
        for digest in list(assembly.missing):
            data = self._objects.read(digest)
            if data is not None:
                assembly.place(digest, data)
            else:
                self._parts.setdefault(digest, []).append(assembly)
                self.missing[digest] = sizes[digest]
        if not assembly.missing:
            assembly.seal()  # an earlier attempt had it all but the rename

"""The difference between two versions: computed, applied, verified and encoded.

The cost of ``diff`` and ``patch`` is proportional to what changed. ``patch`` verifies a delta by its result: it
computes the root digest of the new tree and compares it with the one that the delta announces. A delta whose base is
NOTHING, a full delta, describes a whole tree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import DeltaMismatch, MalformedMessage
from .codec import Reader, Writer
from .tree import EMPTY, MAX_PIECE, NOTHING, Directory, File, Node, Piece, Symlink, lookup, short

MAX_PATH = 4096
MAX_DEPTH = 200
_MAGIC = b"MGD1"
_PIECE = struct.Struct(">32sI")
_MIN_OPERATION = 4


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes an entry with everything below it."""

    path: bytes


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """Makes an empty directory; others are made with their first entry."""

    path: bytes


@dataclass(frozen=True, slots=True)
class PutFile:
    path: bytes
    file: File


@dataclass(frozen=True, slots=True)
class PutSymlink:
    path: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class Splice:
    """A file with many pieces, as a change of the file that the base has at this path: the first ``head`` and the last
    ``tail`` pieces stay. If one byte of 100 MB changes, ``middle`` is one piece."""

    path: bytes
    executable: bool
    head: int
    tail: int
    middle: tuple[Piece, ...]


Operation = Remove | MakeDirectory | PutFile | PutSymlink | Splice


@dataclass(frozen=True, slots=True)
class Delta:
    """Operations in the order in which they apply. Putting a file or link replaces the file or link at its path; a
    directory is always removed explicitly."""

    base: bytes
    root: bytes
    operations: tuple[Operation, ...]


# --- computing --------------------------------------------------------------------------------------------


def diff(old: Directory, new: Directory) -> Delta:
    return Delta(old.digest if old.entries else NOTHING, new.digest, tuple(_changes(b"", old, new)))


def full_delta(tree: Directory) -> Delta:
    return Delta(NOTHING, tree.digest, tuple(_changes(b"", EMPTY, tree)))


def _changes(prefix: bytes, old: Directory, new: Directory) -> Iterator[Operation]:
    for name in old.entries:
        if name not in new.entries:
            yield Remove(prefix + name)
    for name, node in new.entries.items():
        before = old.entries.get(name)
        if before is node or before == node:  # comparing 10,000 files takes 3 ms
            continue
        path = prefix + name
        if isinstance(before, Directory) and not isinstance(node, Directory):
            yield Remove(path)
        if isinstance(node, File):
            yield _file_change(path, before, node)
        elif isinstance(node, Symlink):
            yield PutSymlink(path, node.target)
        elif isinstance(before, Directory):
            yield from _changes(path + b"/", before, node)
        else:
            if before is not None:
                yield Remove(path)
            if not node.entries:
                yield MakeDirectory(path)
            yield from _changes(path + b"/", EMPTY, node)


def _file_change(path: bytes, before: Node | None, file: File) -> PutFile | Splice:
    if not isinstance(before, File) or len(file.pieces) < 2:
        return PutFile(path, file)
    old, new = before.pieces, file.pieces
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    if not head and not tail:
        return PutFile(path, file)
    return Splice(path, file.executable, head, tail, new[head : len(new) - tail])


INLINE_LIMIT = 2 * 1024 * 1024
"""A delta that adds at most so many bytes travels with its announcement, to the gateway and down the tree."""


def transfer_size(delta: Delta) -> int:
    """The bytes of pieces that the delta adds. An upper bound of what must be sent: some may be known from other
    files."""
    total = 0
    for operation in delta.operations:
        if isinstance(operation, PutFile):
            total += operation.file.size
        elif isinstance(operation, Splice):
            total += sum([piece.size for piece in operation.middle])
    return total


def transferred_pieces(delta: Delta, tree: Directory) -> Iterator[tuple[bytes, int, Piece]]:
    """The pieces that ``delta``, which leads to ``tree``, adds: path, offset in the file, piece."""
    for operation in delta.operations:
        if isinstance(operation, PutFile):
            for offset, piece in operation.file.offsets():
                yield operation.path, offset, piece
        elif isinstance(operation, Splice):
            file = lookup(tree, operation.path)
            assert isinstance(file, File)
            for index, (offset, piece) in enumerate(file.offsets()):
                if operation.head <= index < len(file.pieces) - operation.tail:
                    yield operation.path, offset, piece


# --- applying ---------------------------------------------------------------------------------------------

_Draft = dict[bytes, "File | Symlink | Directory | _Draft"]


def patch(base: Directory, delta: Delta) -> Directory:
    """The version to which ``delta`` leads from ``base``. Raises DeltaMismatch unless it is the announced one."""
    draft: _Draft = dict(base.entries)
    for operation in delta.operations:
        _apply(draft, operation)
    tree = _freeze(draft)
    if tree.digest != delta.root:
        raise DeltaMismatch(f"delta announces version {short(delta.root)} but leads to {short(tree.digest)}")
    return tree


def _apply(draft: _Draft, operation: Operation) -> None:
    *parents, name = operation.path.split(b"/")
    for parent in parents:
        draft = _open(draft, parent, operation)
    before = draft.get(name)
    if isinstance(operation, Remove):
        if before is None:
            raise DeltaMismatch(f"delta removes {operation.path!r}, which the base does not have")
        del draft[name]
        return
    if isinstance(before, Directory | dict):
        raise DeltaMismatch(f"delta puts {operation.path!r} in place of a directory")
    if isinstance(operation, PutFile):
        draft[name] = operation.file
    elif isinstance(operation, PutSymlink):
        draft[name] = Symlink(operation.target)
    elif isinstance(operation, MakeDirectory):
        draft[name] = {}
    else:
        draft[name] = _splice(before, operation)


def _open(draft: _Draft, name: bytes, operation: Operation) -> _Draft:
    node = draft.get(name)
    if isinstance(node, dict):
        return node
    if node is None and not isinstance(operation, Remove | Splice):
        opened: _Draft = {}
    elif isinstance(node, Directory):
        opened = dict(node.entries)
    else:
        raise DeltaMismatch(f"delta changes {operation.path!r}, but {name!r} is not a directory")
    draft[name] = opened
    return opened


def _splice(before: Node | _Draft | None, operation: Splice) -> File:
    if not isinstance(before, File) or operation.head + operation.tail > len(before.pieces):
        raise DeltaMismatch(f"delta splices {operation.path!r} from a file that the base does not have")
    head = before.pieces[: operation.head]
    tail = before.pieces[len(before.pieces) - operation.tail :]
    return File(head + operation.middle + tail, operation.executable)


def _freeze(draft: _Draft) -> Directory:
    return Directory({name: _freeze(node) if isinstance(node, dict) else node for name, node in draft.items()})


# --- encoding ---------------------------------------------------------------------------------------------


def encode(delta: Delta) -> bytes:
    out = Writer()
    out.raw(_MAGIC)
    out.digest(delta.base)
    out.digest(delta.root)
    out.u32(len(delta.operations))
    for operation in delta.operations:
        _encode_operation(out, operation)
    return out.finish()


def _encode_operation(out: Writer, operation: Operation) -> None:
    kind = _KINDS.index(type(operation))
    out.u8(kind)
    out.short(operation.path)
    if isinstance(operation, PutFile):
        out.u8(operation.file.executable)
        _encode_pieces(out, operation.file.pieces)
    elif isinstance(operation, PutSymlink):
        out.short(operation.target)
    elif isinstance(operation, Splice):
        out.u8(operation.executable)
        out.u32(operation.head)
        out.u32(operation.tail)
        _encode_pieces(out, operation.middle)


def _encode_pieces(out: Writer, pieces: tuple[Piece, ...]) -> None:
    out.u32(len(pieces))
    out.raw(b"".join([_PIECE.pack(piece.digest, piece.size) for piece in pieces]))


_KINDS = (Remove, MakeDirectory, PutFile, PutSymlink, Splice)


def decode(data: bytes) -> Delta:
    """Raises MalformedMessage for anything that ``encode`` does not produce, such as paths that leave the tree."""
    reader = Reader(data)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise MalformedMessage("not a delta of this protocol version")
    base, root = reader.digest(), reader.digest()
    operations = tuple([_decode_operation(reader) for _ in range(reader.count(_MIN_OPERATION))])
    reader.finish()
    return Delta(base, root, operations)


def _decode_operation(reader: Reader) -> Operation:
    kind = reader.u8()
    path = _valid_path(reader.short())
    if kind == 0:
        return Remove(path)
    if kind == 1:
        return MakeDirectory(path)
    if kind == 2:
        executable = reader.u8() != 0
        return PutFile(path, File(_decode_pieces(reader), executable))
    if kind == 3:
        target = reader.short()
        if not target or len(target) > MAX_PATH or b"\0" in target:
            raise MalformedMessage(f"invalid target {target[:100]!r} of symbolic link {path!r}")
        return PutSymlink(path, target)
    if kind == 4:
        executable = reader.u8() != 0
        head, tail = reader.u32(), reader.u32()
        return Splice(path, executable, head, tail, _decode_pieces(reader))
    raise MalformedMessage(f"unknown delta operation {kind} for {path!r}")


def _decode_pieces(reader: Reader) -> tuple[Piece, ...]:
    data = reader.take(reader.count(_PIECE.size) * _PIECE.size)
    pieces = tuple([Piece(digest, size) for digest, size in _PIECE.iter_unpack(data)])
    if not all(0 < piece.size <= MAX_PIECE for piece in pieces):
        raise MalformedMessage(f"invalid piece size (1 to {MAX_PIECE} bytes allowed)")
    return pieces


def _valid_path(path: bytes) -> bytes:
    names = path.split(b"/")
    if len(path) > MAX_PATH or len(names) > MAX_DEPTH or b"\0" in path:
        raise MalformedMessage(f"invalid path {path[:100]!r}: too long, too deep, or with a null byte")
    if b"" in names or b"." in names or b".." in names:
        raise MalformedMessage(f"invalid path {path[:100]!r}: not a normalized relative path")
    return path

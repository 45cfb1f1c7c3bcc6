"""How one version becomes another: computed, applied, verified, and written as bytes.

``diff`` and ``patch`` cost as much as what changed. A delta is proven by its result: ``patch`` computes the root
digest of what it made and refuses any other than the delta announced. A delta whose base is NOTHING describes a
whole tree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .codec import Reader, Writer
from .digest import NOTHING, short
from .errors import DeltaMismatch, MalformedMessage
from .tree import EMPTY, MAX_PIECE, Directory, File, Link, Node, Piece, lookup

__all__ = [
    "Delta",
    "MakeDirectory",
    "Operation",
    "PutFile",
    "PutLink",
    "Remove",
    "Splice",
    "brings",
    "brought",
    "decode",
    "diff",
    "encode",
    "patch",
    "whole",
]

MAX_PATH = 4096
MAX_DEPTH = 200
_MAGIC = b"MGD1"
_PIECE = struct.Struct(">32sI")
_MIN_OPERATION = 4


@dataclass(frozen=True, slots=True)
class Remove:
    """The entry goes, with all below it."""

    path: bytes


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """An empty directory; those that hold something come into being with it."""

    path: bytes


@dataclass(frozen=True, slots=True)
class PutFile:
    path: bytes
    file: File


@dataclass(frozen=True, slots=True)
class PutLink:
    path: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class Splice:
    """A file cut into many pieces, told by what it shares with the file that the base has at this path:
    its first ``head`` and its last ``tail`` pieces. One byte changed in 100 MB is one piece in ``middle``."""

    path: bytes
    executable: bool
    head: int
    tail: int
    middle: tuple[Piece, ...]


Operation = Remove | MakeDirectory | PutFile | PutLink | Splice


@dataclass(frozen=True, slots=True)
class Delta:
    """Operations in the order they apply in; what a path held before is removed or replaced by the put itself,
    save that a directory is always removed by name."""

    base: bytes
    root: bytes
    operations: tuple[Operation, ...]


# --- computing --------------------------------------------------------------------------------------------


def diff(old: Directory, new: Directory) -> Delta:
    return Delta(old.digest if old.entries else NOTHING, new.digest, tuple(_changes(b"", old, new)))


def whole(tree: Directory) -> Delta:
    return Delta(NOTHING, tree.digest, tuple(_changes(b"", EMPTY, tree)))


def _changes(prefix: bytes, old: Directory, new: Directory) -> Iterator[Operation]:
    for name in old.entries:
        if name not in new.entries:
            yield Remove(prefix + name)
    for name, node in new.entries.items():
        before = old.entries.get(name)
        if before == node:
            continue
        path = prefix + name
        if isinstance(before, Directory) and not isinstance(node, Directory):
            yield Remove(path)
        if isinstance(node, File):
            yield _file_change(path, before, node)
        elif isinstance(node, Link):
            yield PutLink(path, node.target)
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


def brings(delta: Delta) -> int:
    """How many bytes of pieces a version brings, at most: some may be known from elsewhere."""
    total = 0
    for operation in delta.operations:
        if isinstance(operation, PutFile):
            total += operation.file.size
        elif isinstance(operation, Splice):
            total += sum([piece.size for piece in operation.middle])
    return total


def brought(delta: Delta, tree: Directory) -> Iterator[tuple[bytes, int, Piece]]:
    """The pieces that ``delta`` brings to make ``tree``: path, offset in the file, piece."""
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

_Draft = dict[bytes, "File | Link | Directory | _Draft"]


def patch(base: Directory, delta: Delta) -> Directory:
    """The version that ``delta`` makes of ``base``. Raises DeltaMismatch unless it is the one announced."""
    draft: _Draft = dict(base.entries)
    for operation in delta.operations:
        _apply(draft, operation)
    tree = _freeze(draft)
    if tree.digest != delta.root:
        raise DeltaMismatch(f"the delta announces {short(delta.root)} but leads to {short(tree.digest)}")
    return tree


def _apply(draft: _Draft, operation: Operation) -> None:
    *parents, name = operation.path.split(b"/")
    for parent in parents:
        draft = _open(draft, parent, operation)
    before = draft.get(name)
    if isinstance(operation, Remove):
        if before is None:
            raise DeltaMismatch(f"{operation.path!r} is removed but was not there")
        del draft[name]
        return
    if isinstance(before, Directory | dict):
        raise DeltaMismatch(f"{operation.path!r} is put where a directory is")
    if isinstance(operation, PutFile):
        draft[name] = operation.file
    elif isinstance(operation, PutLink):
        draft[name] = Link(operation.target)
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
        raise DeltaMismatch(f"{operation.path!r} lies below {name!r}, which is no directory")
    draft[name] = opened
    return opened


def _splice(before: Node | _Draft | None, operation: Splice) -> File:
    if not isinstance(before, File) or operation.head + operation.tail > len(before.pieces):
        raise DeltaMismatch(f"{operation.path!r} is spliced from a file that is not there")
    head = before.pieces[: operation.head]
    tail = before.pieces[len(before.pieces) - operation.tail :]
    return File(head + operation.middle + tail, operation.executable)


def _freeze(draft: _Draft) -> Directory:
    return Directory({name: _freeze(node) if isinstance(node, dict) else node for name, node in draft.items()})


# --- as bytes ---------------------------------------------------------------------------------------------


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
    elif isinstance(operation, PutLink):
        out.short(operation.target)
    elif isinstance(operation, Splice):
        out.u8(operation.executable)
        out.u32(operation.head)
        out.u32(operation.tail)
        _encode_pieces(out, operation.middle)


def _encode_pieces(out: Writer, pieces: tuple[Piece, ...]) -> None:
    out.u32(len(pieces))
    out.raw(b"".join([_PIECE.pack(piece.digest, piece.size) for piece in pieces]))


_KINDS = (Remove, MakeDirectory, PutFile, PutLink, Splice)


def decode(data: bytes) -> Delta:
    """Raises MalformedMessage on anything ``encode`` does not write, paths that leave the tree included."""
    reader = Reader(data)
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise MalformedMessage("not a delta of this version of the protocol")
    base, root = reader.digest(), reader.digest()
    operations = tuple([_decode_operation(reader) for _ in range(reader.count(_MIN_OPERATION))])
    reader.finish()
    return Delta(base, root, operations)


def _decode_operation(reader: Reader) -> Operation:
    kind = reader.u8()
    path = _checked(reader.short())
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
            raise MalformedMessage(f"{path!r} links to {target[:100]!r}, which no link can hold")
        return PutLink(path, target)
    if kind == 4:
        executable = reader.u8() != 0
        head, tail = reader.u32(), reader.u32()
        return Splice(path, executable, head, tail, _decode_pieces(reader))
    raise MalformedMessage(f"operation {kind} on {path!r} is not known")


def _decode_pieces(reader: Reader) -> tuple[Piece, ...]:
    data = reader.take(reader.count(_PIECE.size) * _PIECE.size)
    pieces = tuple([Piece(digest, size) for digest, size in _PIECE.iter_unpack(data)])
    if not all(0 < piece.size <= MAX_PIECE for piece in pieces):
        raise MalformedMessage(f"a piece is empty or larger than {MAX_PIECE} bytes")
    return pieces


def _checked(path: bytes) -> bytes:
    names = path.split(b"/")
    if len(path) > MAX_PATH or len(names) > MAX_DEPTH or b"\0" in path:
        raise MalformedMessage(f"path {path[:100]!r} is longer or deeper than any file system allows")
    if b"" in names or b"." in names or b".." in names:
        raise MalformedMessage(f"path {path[:100]!r} does not stay in the tree")
    return path

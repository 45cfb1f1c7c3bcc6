"""A version of a tree: immutable nodes named by the digest of their content, as in git.

Two versions share the nodes they have in common, so the cost of comparing them, patching one into the other and
computing the new root digest is proportional to what changed, not to the size of the tree.

Paths and names are bytes, as in the file system. Paths are relative, separated by ``/``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

MAX_PIECE = 256 * 1024
"""Maximum size of a piece in bytes, and so of the memory that a peer can make us allocate for one."""

_PIECE = struct.Struct(">32sI")
_ENTRY = struct.Struct(">cH")
_SIZE = struct.Struct(">Q")
DIGEST_SIZE = 32
NOTHING = bytes(DIGEST_SIZE)
"""The digest of no version: the base of a full delta."""


# The digests of the sync: SHA-256 of contents, BLAKE2b of lists of pieces and of directories.
#
# A host that has nothing but torchmonarch must verify what it receives, so both come from the standard library. Every
# byte that travels is hashed once in each process, which is half the work of a host in a first sync: with the SHA
# instructions of current processors SHA-256 takes half as long as BLAKE2b, without them twice as long. Lists and
# directories have a function of their own, distinguished by ``person``, so that no file can be made to look like
# another file's list of pieces.


def piece_digest(data: bytes | bytearray | memoryview) -> bytes:
    return sha256(data).digest()


def list_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-list").digest()


def tree_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-tree").digest()


def short(digest: bytes) -> str:
    """The first 12 hex digits, for messages and logs."""
    return digest.hex()[:12]


@dataclass(frozen=True, slots=True)
class Piece:
    """The unit of transfer: at most MAX_PIECE bytes, named by their digest."""

    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class File:
    """A regular file: none, one or several pieces.

    ``digest`` is that of the content: if there is one piece, the piece's own.
    """

    pieces: tuple[Piece, ...]
    executable: bool = False
    size: int = field(init=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        pieces = self.pieces
        if len(pieces) == 1:
            size, digest = pieces[0].size, pieces[0].digest
        else:
            size = sum([piece.size for piece in pieces])
            digest = list_digest(b"".join([_PIECE.pack(piece.digest, piece.size) for piece in pieces]))
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "digest", digest)

    @property
    def key(self) -> str:
        """The name of the object on disk: content and executable bit, because hard links share a mode."""
        return self.digest.hex() + ("x" if self.executable else "")

    def offsets(self) -> Iterator[tuple[int, Piece]]:
        offset = 0
        for piece in self.pieces:
            yield offset, piece
            offset += piece.size


@dataclass(frozen=True, slots=True)
class Symlink:
    target: bytes


class Directory:
    """A directory and everything below it. Equal digests mean equal trees; ``files`` and ``size`` count everything."""

    __slots__ = ("digest", "entries", "files", "size")

    entries: Mapping[bytes, Node]
    digest: bytes
    files: int
    size: int

    def __init__(self, entries: Mapping[bytes, Node]) -> None:
        parts: list[bytes] = []
        count = size = 0
        for name in sorted(entries):
            node = entries[name]
            if isinstance(node, File):
                kind = b"x" if node.executable else b"f"
                parts += (_ENTRY.pack(kind, len(name)), name, node.digest, _SIZE.pack(node.size))
                count += 1
                size += node.size
            elif isinstance(node, Directory):
                parts += (_ENTRY.pack(b"d", len(name)), name, node.digest)
                count += node.files
                size += node.size
            else:
                parts += (_ENTRY.pack(b"l", len(name)), name, _SIZE.pack(len(node.target)), node.target)
                count += 1
        self.entries = entries
        self.digest = tree_digest(b"".join(parts))
        self.files = count
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Directory) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Directory({self.digest.hex()[:12]}, files={self.files}, size={self.size})"


Node = File | Symlink | Directory
EMPTY = Directory({})


def walk(tree: Directory, prefix: bytes = b"") -> Iterator[tuple[bytes, Node]]:
    """Every node below ``tree`` with its path, in order of names, a directory before its entries."""
    for name in sorted(tree.entries):
        node = tree.entries[name]
        path = prefix + name
        yield path, node
        if isinstance(node, Directory):
            yield from walk(node, path + b"/")


def files(tree: Directory) -> Iterator[File]:
    """Every regular file below ``tree``, in no particular order."""
    for node in tree.entries.values():
        if isinstance(node, File):
            yield node
        elif isinstance(node, Directory):
            yield from files(node)


def lookup(tree: Directory, path: bytes) -> Node | None:
    node: Node = tree
    for name in path.split(b"/"):
        if not isinstance(node, Directory) or name not in node.entries:
            return None
        node = node.entries[name]
    return node

"""The pieces that one version lacks on this host, and where each belongs.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..tree.tree import Directory, File
from .objects import Assembly, Objects, distinct_objects


class Fetch:
    """Collects the objects of one version.

    ``files`` are those of ``tree`` that may be missing. Pieces found in other objects are copied at once; the rest
    is ``missing``: digest to size.
    """

    def __init__(self, objects: Objects, tree: Directory, files: Iterable[File]) -> None:
        self.tree = tree
        self.missing: dict[bytes, int] = {}
        self._objects = objects
        self._single: dict[bytes, list[File]] = {}
        self._parts: dict[bytes, list[Assembly]] = {}
        for file in distinct_objects(files):
            if not objects.use(file):
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

"""The versions a store knows, each as a delta against another it knows, so that recording one costs what changed.

Imports nothing but the standard library.
"""

from __future__ import annotations

import os

from .delta import Delta, decode, diff, encode, patch, whole
from .digest import DIGEST_SIZE, NOTHING
from .errors import DeltaMismatch, MalformedMessage
from .tree import EMPTY, Directory

__all__ = ["Records"]

_LONGEST_CHAIN = 64


class Records:
    """Version records below ``directory``, one file a version, written aside in ``work`` and renamed."""

    def __init__(self, directory: str, work: str) -> None:
        self.trees: dict[bytes, Directory] = {}
        self._directory = directory
        self._work = work
        self._bases: dict[bytes, bytes] = {}
        self.refresh()

    def tree(self, root: bytes) -> Directory | None:
        if root == NOTHING:
            return EMPTY
        return self.trees.get(root) or self._read_one(root)

    def add(self, tree: Directory, base: bytes = NOTHING) -> None:
        """Records ``tree``, against ``base`` where that is known and the chain behind it is short."""
        root = tree.digest
        if root in self.trees:
            return
        known = self.trees.get(base)
        if known is None or self._chain(base) >= _LONGEST_CHAIN or not os.path.lexists(self._path(base)):
            self._write(tree, whole(tree))
        else:
            self._write(tree, diff(known, tree))

    def remove(self, root: bytes) -> None:
        """Forgets a version; those recorded against it, by other processes too, are recorded anew."""
        self.refresh()
        for other, base in list(self._bases.items()):
            if base == root:
                self._write(self.trees[other], whole(self.trees[other]))
        self.trees.pop(root, None)
        self._bases.pop(root, None)
        path = self._path(root)
        if os.path.lexists(path):
            os.unlink(path)

    def _write(self, tree: Directory, delta: Delta) -> None:
        temporary = os.path.join(self._work, "record")
        with open(temporary, "wb") as out:
            out.write(encode(delta))
        os.rename(temporary, self._path(tree.digest))
        self.trees[tree.digest] = tree
        self._bases[tree.digest] = delta.base

    def refresh(self) -> None:
        """Takes in every record, those of other processes too; what cannot be understood is removed."""
        found = os.listdir(self._directory)
        for name in found:
            if len(name) != 2 * DIGEST_SIZE or self._read_one(bytes.fromhex(name)) is None:
                os.unlink(os.path.join(self._directory, name))

    def _read_one(self, root: bytes) -> Directory | None:
        """The version and, before it, those it is recorded against: another process may have written them."""
        chain: list[Delta] = []
        base = root
        while base != NOTHING and base not in self.trees:
            delta = self._delta(base)
            if delta is None or len(chain) > 2 * _LONGEST_CHAIN:
                return None
            chain.append(delta)
            base = delta.base
        tree = self.trees.get(base, EMPTY)
        for delta in reversed(chain):
            try:
                tree = patch(tree, delta)
            except DeltaMismatch:
                return None
            self.trees[delta.root] = tree
            self._bases[delta.root] = delta.base
        return tree

    def _delta(self, root: bytes) -> Delta | None:
        try:
            with open(self._path(root), "rb") as record:
                delta = decode(record.read())
        except (FileNotFoundError, MalformedMessage):
            return None
        return delta if delta.root == root else None

    def _chain(self, root: bytes) -> int:
        length = 0
        while root != NOTHING:
            root = self._bases[root]
            length += 1
        return length

    def _path(self, root: bytes) -> str:
        return os.path.join(self._directory, root.hex())

"""Trees for tests: as values, as strategies, and on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

from meshgate_sync.tree.tree import Directory, File, Node, Piece, Symlink, piece_digest, walk

PIECE = 16
"""Test files are cut into pieces of this many bytes, so that small ones are large."""


def file(content: bytes, *, executable: bool = False) -> File:
    parts = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    return File(tuple(Piece(piece_digest(part), len(part)) for part in parts), executable)


class Content:
    """Versions as values: a nested dict of bytes (content), (bytes, True) (executable), str (link) and dicts."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, bytes] = {}

    def tree(self, model: Mapping[bytes, object]) -> Directory:
        return Directory({name: self._node(node) for name, node in model.items()})

    def _node(self, node: object) -> Node:
        if isinstance(node, dict):
            return self.tree(node)
        if isinstance(node, str):
            return Symlink(os.fsencode(node))
        content, executable = node if isinstance(node, tuple) else (node, False)
        assert isinstance(content, bytes)
        for start in range(0, len(content), PIECE):
            part = content[start : start + PIECE]
            self.pieces[piece_digest(part)] = part
        return file(content, executable=executable)


names = st.sampled_from([b"a", b"b", b"c.py", b"\xff\xfe", "ü".encode(), b"x y", b"long" * 20])
contents = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 3).map(lambda number: bytes([number]) * 40),
    st.tuples(st.binary(max_size=40), st.just(True)),
)
links = st.sampled_from(["a", "b/c.py", "../a", "no where"])
models = st.recursive(
    st.dictionaries(names, contents, max_size=3),
    lambda below: st.dictionaries(names, st.one_of(contents, links, below), max_size=4),
    max_leaves=12,
)


def write(directory: Path, model: Mapping[bytes, object]) -> None:
    """Makes ``directory`` hold what ``model`` says and nothing else."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()
    _fill(os.fsencode(directory), model)


def _fill(directory: bytes, model: Mapping[bytes, object]) -> None:
    for name, node in model.items():
        path = os.path.join(directory, name)
        if isinstance(node, dict):
            os.mkdir(path)
            _fill(path, node)
        elif isinstance(node, str):
            os.symlink(os.fsencode(node), path)
        else:
            content, executable = node if isinstance(node, tuple) else (node, False)
            with open(path, "wb") as out:
                out.write(content)
            if executable:
                os.chmod(path, 0o755)


def on_disk(directory: str | Path) -> dict[bytes, object]:
    """What a directory holds, as a model. Executable by the owner, or not; other modes are not compared."""
    model: dict[bytes, object] = {}
    with os.scandir(os.fsencode(directory)) as entries:
        for entry in entries:
            if entry.is_symlink():
                model[entry.name] = os.fsdecode(os.readlink(entry.path))
            elif entry.is_dir():
                model[entry.name] = on_disk(os.fsdecode(entry.path))
            else:
                with open(entry.path, "rb") as content:
                    data = content.read()
                model[entry.name] = (data, True) if entry.stat().st_mode & 0o100 else data
    return model


def plain(model: Mapping[bytes, object]) -> dict[bytes, object]:
    """``model`` with each content written in one way, to compare with ``on_disk``."""
    return {name: plain(node) if isinstance(node, dict) else node for name, node in model.items()}


def paths(tree: Directory) -> list[bytes]:
    return [path for path, _ in walk(tree)]

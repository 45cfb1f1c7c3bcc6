"""Makes directories out of objects: whole ones, and ones changed from what they hold.

Directories are not shared by symbolic links: ``Path(__file__).resolve().parent.parent`` and ``open("../x")`` have to
find what they find on the laptop.

A process that runs as root can write through a hard link. So no object is linked without a look at whether it is as it
was written, and what a directory holds already can be looked through in the same way (``mend``).

Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator

from .delta import Remove, diff
from .errors import ObjectsDamaged
from .objects import Objects, modified_at
from .tree import Directory, File, lookup

__all__ = ["alter", "holds", "mend", "populate"]

_NO_LINK = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP)


def populate(objects: Objects, tree: Directory, path: bytes) -> None:
    """Makes the directory ``path``, which must not be there, hold ``tree``. Raises ObjectsDamaged."""
    os.mkdir(path, 0o755)
    for name, node in tree.entries.items():
        entry = path + b"/" + name
        if isinstance(node, Directory):
            populate(objects, node, entry)
        elif isinstance(node, File):
            _put(objects, node, entry)
        else:
            os.symlink(node.target, entry)


def alter(objects: Objects, path: bytes, old: Directory, new: Directory) -> None:
    """Changes the directory ``path``, which holds ``old``, to hold ``new``. Raises ObjectsDamaged."""
    for operation in diff(old, new).operations:
        entry = path + b"/" + operation.path
        if isinstance(operation, Remove):
            _remove(entry)
            continue
        node = lookup(new, operation.path)
        if isinstance(node, Directory):
            os.makedirs(entry, 0o755)
            continue
        os.makedirs(os.path.dirname(entry), 0o755, exist_ok=True)
        _remove(entry)
        if isinstance(node, File):
            _put(objects, node, entry)
        elif node is not None:
            os.symlink(node.target, entry)


def mend(objects: Objects, path: bytes, tree: Directory) -> None:
    """Puts anew what was written to in the directory ``path``, which was made to hold ``tree``. Raises
    ObjectsDamaged."""
    for file, entry in _written_to(objects, path, tree):
        _remove(entry)
        _put(objects, file, entry)


def holds(objects: Objects, path: bytes, tree: Directory) -> bool:
    """Whether the files of the directory ``path`` are as they were when it was made to hold ``tree``."""
    return next(_written_to(objects, path, tree), None) is None


def _written_to(objects: Objects, path: bytes, tree: Directory) -> Iterator[tuple[File, bytes]]:
    for name, node in tree.entries.items():
        entry = path + b"/" + name
        if isinstance(node, Directory):
            yield from _written_to(objects, entry, node)
        elif isinstance(node, File) and not objects.sound(node, entry):
            yield node, entry


def _remove(entry: bytes) -> None:
    try:
        os.unlink(entry)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # unlinking a directory is EPERM on macOS
        shutil.rmtree(entry)


def _put(objects: Objects, file: File, entry: bytes) -> None:
    if file.pieces:
        if not objects.sound(file):
            objects.discard(file)
            raise ObjectsDamaged(objects.path(file))
        try:
            _link(objects.path(file), entry)
            return
        except OSError as problem:
            if problem.errno not in _NO_LINK:
                raise
        shutil.copyfile(objects.path(file), entry)
    else:
        os.close(os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.chmod(entry, 0o555 if file.executable else 0o444)
    time = modified_at(file)
    os.utime(entry, (time, time))


def _link(path: str, entry: bytes) -> None:
    try:
        os.link(path, entry)
    except FileNotFoundError:
        # Another process made the same object and renamed it over the one that was being linked.
        os.link(path, entry)

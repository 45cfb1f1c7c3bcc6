"""Makes directories of hard links to objects, and updates them.

Directories are real, never symbolic links: ``Path(__file__).resolve().parent.parent`` and ``open("../x")`` find what
they find on the laptop.

A process that runs as root can write through a hard link, and the change shows in every directory that has the file.
``damaged_files`` finds such files by their size and time, ``repair`` replaces them.

Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator

from ..errors import ObjectsDamaged
from ..tree.delta import Remove, diff
from ..tree.tree import Directory, File, lookup
from .objects import Objects, modified_at

_NO_LINK = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.ENOTSUP)


def populate(objects: Objects, tree: Directory, path: bytes) -> Iterator[None]:
    """Creates the directory ``path`` with the content of ``tree``, and yields after each directory. Links objects as
    they are: follow with ``repair`` before a process sees the result. Raises ObjectsDamaged if an object is missing."""
    os.mkdir(path, 0o755)
    for name, node in tree.entries.items():
        entry = path + b"/" + name
        if isinstance(node, Directory):
            yield from populate(objects, node, entry)
        elif isinstance(node, File):
            _put(objects, node, entry)
        else:
            os.symlink(node.target, entry)
    yield


def update(objects: Objects, path: bytes, old: Directory, new: Directory) -> None:
    """Updates the directory ``path`` from ``old`` to ``new``. Raises ObjectsDamaged."""
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


def repair(objects: Objects, path: bytes, tree: Directory) -> None:
    """Replaces every file below ``path`` that is not as in ``tree``. Raises ObjectsDamaged if the object of such a file
    is damaged too; ``Store.prepare`` then finds all of them."""
    for file, entry in damaged_files(objects, path, tree):
        if file.pieces and not objects.is_unchanged(file):
            raise ObjectsDamaged(objects.path(file))
        _remove(entry)
        _put(objects, file, entry)


def damaged_files(objects: Objects, path: bytes, tree: Directory) -> Iterator[tuple[File, bytes]]:
    """The files of ``tree`` that are missing below ``path`` or were written to, each with its path."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name, node in tree.entries.items():
            if isinstance(node, File) and not objects.is_unchanged(node, name, directory=handle):
                yield node, path + b"/" + name
    finally:
        os.close(handle)
    for name, node in tree.entries.items():
        if isinstance(node, Directory):
            yield from damaged_files(objects, path + b"/" + name, node)


def remove_tree(path: str) -> Iterator[None]:
    """Removes the directory ``path`` with all below it, as far as possible, and yields after each directory."""
    for directory, below, names in os.walk(path, topdown=False, onerror=None):
        for name in (*names, *below):
            entry = os.path.join(directory, name)
            try:
                os.unlink(entry)
            except OSError:
                shutil.rmtree(entry, ignore_errors=True)
        yield
    shutil.rmtree(path, ignore_errors=True)


def _remove(entry: bytes) -> None:
    try:
        os.unlink(entry)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):  # unlinking a directory is EPERM on macOS
        shutil.rmtree(entry)


def _put(objects: Objects, file: File, entry: bytes) -> None:
    if file.pieces:
        path = objects.path(file)
        try:
            _link(path, entry)
            return
        except FileNotFoundError:
            raise ObjectsDamaged(path) from None
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        shutil.copyfile(path, entry)
    else:
        os.close(os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.chmod(entry, 0o555 if file.executable else 0o444)
    time = modified_at(file)
    os.utime(entry, (time, time))


def _link(path: str, entry: bytes) -> None:
    try:
        os.link(path, entry)
    except FileNotFoundError:
        # Another process has just replaced the object with its own.
        os.link(path, entry)

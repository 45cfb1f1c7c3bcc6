"""The actor that makes a synced directory appear under a path of its host; it needs nothing but torchmonarch.

::

    <home>/mounts/<name>/<root>/    the files of a version, as hard links to the store's; the newest two are kept

The path is a symbolic link to the newest, and is replaced in one step. It remains when the session ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
import time
from typing import Any

from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint
from meshgate_sync.store.place import default_home, disk_full, used_up  # sent along

ABANDONED = 24 * 3600.0  # seconds; the process that made a copy that is incomplete for longer was killed
KEPT = 2  # versions of a mount: processes may still run from the one before


class Mounter(Actor, metaclass=SentAsSource):
    """Endpoints return the host's name and what is wrong, or ``""``."""

    def __init__(self, home: str | None = None) -> None:
        self.home = home or default_home()

    @endpoint
    def mount(self, root: str, path: str, source: Any) -> tuple[str, str]:
        """Makes ``path`` show version ``root``, from which this process was started. ``source`` is the ``identity`` of
        the laptop's directory: if ``path`` is that directory, there is nothing to do."""
        if source is not None and identity(path) == source:
            return _host_name(), ""
        try:
            _require_free(path)
            versions = os.path.join(self.home, "mounts", _name(path))
            _link(_copy(os.path.join(self.home, "snapshots", root), versions), path)
            _remove_old(versions, root)
        except OSError as error:
            return _host_name(), _problem(error, path, self.home)
        return _host_name(), ""

    @endpoint
    def unmount(self, path: str) -> tuple[str, str]:
        """Removes what ``mount`` has made."""
        try:
            if _is_mounted(path):
                os.unlink(path)
            shutil.rmtree(os.path.join(self.home, "mounts", _name(path)), ignore_errors=True)
        except OSError as error:
            return _host_name(), _problem(error, path, self.home)
        return _host_name(), ""


def identity(path: str) -> tuple[str, int, int] | None:
    """Equal for one directory, however it is reached, within one boot of one kernel. None if there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        found = os.stat(path)
    except OSError:
        return None
    return boot, found.st_dev, found.st_ino


def _require_free(path: str) -> None:
    """Raises FileExistsError unless ``path`` can be a mount: it is missing, an empty directory, or a mount already."""
    if not os.path.lexists(path) or _is_mounted(path):
        return
    if os.path.islink(path) or not os.path.isdir(path) or os.listdir(path):
        raise FileExistsError(f"{path} exists")
    os.rmdir(path)


def _is_mounted(path: str) -> bool:
    """Whether ``path`` is a link of a mount, perhaps of another host on this machine."""
    if not os.path.islink(path):
        return False
    return os.path.dirname(os.readlink(path)).endswith(os.path.join("mounts", _name(path)))


def _name(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _copy(snapshot: str, versions: str) -> str:
    """The version's directory, made of hard links unless it exists."""
    directory = os.path.join(versions, os.path.basename(snapshot))
    if os.path.isdir(directory):
        os.utime(directory)
        return directory
    os.makedirs(versions, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=versions, prefix=".") as temporary:
        new = os.path.join(temporary, "new")
        _copy_tree(snapshot, new)
        os.utime(new)
        with contextlib.suppress(FileExistsError):  # another process of this host was faster
            os.rename(new, directory)
    return directory


def _copy_tree(source: str, destination: str) -> None:
    """Unlike shutil's, raises the first error as it is."""

    def fail(error: OSError) -> None:
        raise error

    directories = []
    for directory, subdirectories, files in os.walk(source, onerror=fail):
        new = os.path.normpath(os.path.join(destination, os.path.relpath(directory, source)))
        os.mkdir(new)
        directories.append((directory, new))
        links = [name for name in subdirectories if os.path.islink(os.path.join(directory, name))]
        for name in (*files, *links):
            _link_or_copy(os.path.join(directory, name), os.path.join(new, name))
    for directory, new in reversed(directories):  # as soon as nothing more is made in them
        shutil.copystat(directory, new)


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if used_up(error, destination):
            raise
        # Too many links to one file, or another disk.
        shutil.copy2(source, destination, follow_symlinks=False)


def _link(directory: str, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    os.symlink(directory, temporary)
    os.replace(temporary, path)


def _remove_old(versions: str, newest: str) -> None:
    others = [entry for entry in os.scandir(versions) if entry.name != newest]
    older = [entry.path for entry in others if not entry.name.startswith(".")]
    for directory in sorted(older, key=os.path.getmtime)[: 1 - KEPT]:
        shutil.rmtree(directory, ignore_errors=True)
    for entry in others:
        if entry.name.startswith("."):  # a copy that is incomplete
            with contextlib.suppress(OSError):  # another process completes it just now
                if time.time() - entry.stat().st_mtime > ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _problem(error: OSError, path: str, home: str) -> str:
    if full := disk_full(error, path, home):
        return full
    if isinstance(error, FileExistsError):
        return f"{path} exists there and is not a mount; remove it, or pass another mntpoint"
    if isinstance(error, PermissionError):
        return f"the worker may not create {path} ({error.strerror}); pass a mntpoint that it may write"
    return f"cannot create {path}: {error.strerror or error}"


def _host_name() -> str:
    return os.environ.get("MESHGATE_HOST_NAME") or socket.gethostname()

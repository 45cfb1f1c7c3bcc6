"""The directory for meshgate's files on a host, for the store, image steps and worker processes; what to say of a full
disk.

Hosts that have only torchmonarch receive this module's source, or its functions, with the code that uses them.

Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile


def default_home() -> str:
    """``$MESHGATE_HOME``, else below the user's cache directory, else below the temporary one.

    Every user can write to the last, so this creates the directory for this user alone. Raises PermissionError if it
    exists and belongs to another user, or others can write to it.
    """
    home = os.environ.get("MESHGATE_HOME")
    if home:
        return os.path.abspath(home)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(cache) and os.access(os.path.dirname(cache), os.W_OK):
        return os.path.join(cache, "meshgate")
    home = os.path.join(tempfile.gettempdir(), f"meshgate-{os.getuid()}")
    try:
        os.mkdir(home, 0o700)
    except FileExistsError:
        found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"{home} belongs to another user, or others can write to it: set MESHGATE_HOME to a private directory"
            ) from None
    return home


def disk_of(path: str) -> os.statvfs_result:
    """The file system that ``path`` is on, or will be."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return os.statvfs(path)


def used_up(error: OSError, path: str) -> str:
    """What ``error`` says is used up on the disk of ``path``: ``quota``, ``inodes`` or ``space``; empty if nothing."""
    if error.errno == errno.EDQUOT:
        return "quota"
    if error.errno != errno.ENOSPC:
        return ""
    disk = disk_of(path)
    return "inodes" if disk.f_files and not disk.f_favail else "space"


def disk_full(error: OSError, path: str, home: str) -> str:
    """What to say of ``error`` if it means that a disk, or a quota, is used up; empty if it does not. ``path`` is what
    was being written unless the error has a path, and ``home`` the directory for meshgate's files."""
    path = error.filename if isinstance(error.filename, str) else path
    what = used_up(error, path)
    if not what:
        return ""
    disk = disk_of(path)
    inside = os.path.commonpath((home, path)) == home if os.path.isabs(path) else False
    other = ", or set MESHGATE_HOME to a directory on another disk" if inside else ""
    free = disk.f_bavail * disk.f_frsize
    return f"no {what} left on the disk that holds {path}: {free / 1e6:,.1f} MB are free. Free some there{other}"

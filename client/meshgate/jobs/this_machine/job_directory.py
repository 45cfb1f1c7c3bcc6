"""The directory for the temporary files of a job on this machine: the ``TMPDIR`` of all its processes.

The gateway's supervisor removes it after every other process of the job has ended. The gateway holds a lock on it,
which the kernel releases however the gateway ends, so what killed gateways have left is recognized and removed later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from meshgate.caller import warn_caller

PREFIX = "meshgate-job-"
MAX_PARENT = 40  # characters; the path of a unix socket has at most 107 (103 on macOS)
MIN_AGE = 60.0  # seconds; a younger directory may not be locked yet


def create_job_directory(parent: str | None) -> tuple[str, int]:
    """A new directory in ``parent`` (default: the usual place of temporary files), and a descriptor that locks it."""
    path = tempfile.mkdtemp(prefix=PREFIX, dir=_parent(parent))  # mode 0700
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        remove_job_directory(path)
        raise
    with contextlib.suppress(OSError):  # a file system without locks: the directory is then not pruned
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path, lock


def remove_job_directory(path: str) -> None:
    """Does nothing if the directory does not exist. Warns if it cannot be removed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        warn_caller(f"cannot remove the temporary files of a job in {path}: {error}")


def prune_job_directories(parent: str | None) -> None:
    """Removes the directories of jobs whose gateways have ended without doing so.

    The next job removes what remains, such as files that the last processes of a killed gateway still write.
    """
    for path in Path(_parent(parent)).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too, or it belongs to another user
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_ctime > MIN_AGE and _unlocked(path):
                shutil.rmtree(path)


def _unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _parent(parent: str | None) -> str:
    found = parent or tempfile.gettempdir()
    return found if len(found) <= MAX_PARENT or not os.access("/tmp", os.W_OK) else "/tmp"

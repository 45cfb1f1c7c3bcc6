"""What a run may use: limits that the kernel holds for each process, and a look at all processes of the run together.

The kernel limits a process, and a run is many; what it limits of a user's processes does not hold for root. So the
runner, which adopts whatever the program leaves behind (``PR_SET_CHILD_SUBREAPER``), adds up its descendants several
times a second and ends a run that uses too much. If the machine runs out of memory first, the kernel ends the processes
of runs before all others (``oom_score_adj``).

Outside of Linux only the limits of a process are held, and only the program's own process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h
OOM_SCORE = 1000  # the kernel ends such processes first
DEFAULT_PROCESSES = 4096
THREADS = 4  # that the kernel allows for each process of the limit: it counts threads, and those of other containers
DEFAULT_DISK = 4_000_000_000
MAX_FILES = 1_000_000  # also directories and links; each takes an inode, of which many file systems have a fixed number
DISK_RESERVE = 256_000_000  # bytes that a run must leave free on the disk of its directory
DISK_SHARE = 0.05  # of a small disk, in place of that, and of the inodes
KILL_ROUNDS = 50
PROC = Path("/proc")
PAGE = resource.getpagesize()
LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all processes of a run together; bytes."""

    memory: int
    processes: int
    disk: int

    def exceeded(self, memory: int, processes: int) -> str:
        """Why the run has to end, or ""."""
        if memory > self.memory:
            return f"it used {_size(memory)} of memory, and its limit is {_size(self.memory)}"
        if processes > self.processes:
            return f"it had {processes} processes, and its limit is {self.processes}"
        return ""

    def disk_exceeded(self, used: int, files: int, disk: os.statvfs_result) -> str:
        """As above: ``used`` by the run, and its number of ``files``, on this file system."""
        if used > self.disk:
            return f"its directory holds {_size(used)}, and its limit is {_size(self.disk)}"
        free = disk.f_bavail * disk.f_frsize
        if nearly_full(disk) and used > free:
            return f"its directory holds {_size(used)}, and only {_size(free)} are left on that disk"
        if files > MAX_FILES:
            return f"its directory holds {files} files, and the limit is {MAX_FILES}"
        if _few_inodes(disk) and files > disk.f_favail:
            return f"its directory holds {files} files, and that disk has inodes for only {disk.f_favail} more"
        return ""


def nearly_full(disk: os.statvfs_result) -> bool:
    """Whether a file system has so little left that a run that uses much of it must end."""
    return disk.f_bavail < min(DISK_RESERVE / disk.f_frsize, disk.f_blocks * DISK_SHARE) or _few_inodes(disk)


def _few_inodes(disk: os.statvfs_result) -> bool:
    return disk.f_favail < disk.f_files * DISK_SHARE  # never where the number is not fixed: both are 0 then


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def adopt_orphans() -> None:
    """From now on, a descendant whose parent has ended is a child of this process."""
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit_this_process(limits: Limits) -> None:
    """Holds for this process, which is about to become the program, and for its children."""
    with contextlib.suppress(OSError):
        (PROC / "self/oom_score_adj").write_text(str(OOM_SCORE))
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.disk)
    if LINUX:  # elsewhere, also the processes that do not belong to the run count, or address space does
        _lower(resource.RLIMIT_DATA, limits.memory)
        _lower(resource.RLIMIT_NPROC, _threads_of_user() + limits.processes * THREADS)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _threads_of_user() -> int:
    """The threads of this user, all of which the kernel counts, whatever started them."""
    count = 0
    for entry in os.listdir(PROC):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(PROC / entry).st_uid == os.getuid():
                count += len(os.listdir(PROC / entry / "task"))
    return count


def descendants(pid: int) -> list[int]:
    """The living processes that ``pid`` and its descendants have started."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Each process that has not ended, with its parent."""
    for entry in os.listdir(PROC) if LINUX else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent = (PROC / entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    yield int(entry), int(parent)


def memory_of(pids: list[int], limit: int) -> int:
    """The memory of these processes: pages that several of them share count once if the result is near ``limit``."""
    if (rough := sum(map(_anonymous, pids))) <= limit:
        return rough
    return sum(map(_proportional, pids))


def _anonymous(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident, shared = (PROC / str(pid) / "statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return _anonymous(pid)


def disk_used(directory: Path) -> tuple[int, int]:
    """The bytes that files below ``directory`` take on the disk, and how many there are."""
    used = files = 0
    pending = [str(directory)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return used, files


def kill_descendants(group: int) -> None:
    """Kills all descendants of this process; outside of Linux, its child's process group ``group``.

    They are stopped first, so that none of them starts another while the rest is killed.
    """
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        stopped: set[int] = set()
        for _ in range(KILL_ROUNDS):
            found = set(descendants(os.getpid())) - stopped
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
            stopped |= found
            if not found:
                break
    if not LINUX:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)

"""The control groups of this process, which limit its memory: its own, as of a job of Slurm or of systemd, and those
that contain it.

Delivered by value to processes on workers, as what runs there (``engine/on_worker``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by the version of control groups


def memory_groups(proc: str | Path = "/proc", groups: str | Path = "/sys/fs/cgroup") -> Iterator[tuple[int, Path]]:
    """The folders of the groups whose limits apply to the memory of this process, from the inside out, each with its
    version of control groups. Yields nothing on a system without such groups, as macOS.

    In a container, the path may be the host's, while its own group is mounted as the root: other folders are missing.
    """
    try:
        lines = (Path(proc) / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # several may be mounted together
            top, version = (Path(groups) / "memory", 1) if controllers else (Path(groups), 2)
            own = top / path.strip("/")
            yield from ((version, each) for each in (own, *own.parents) if each == top or top in each.parents)


def memory_limit(proc: str | Path = "/proc", groups: str | Path = "/sys/fs/cgroup") -> int:
    """The bytes of memory that this process may take together with all others in its control groups, or else on this
    machine."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for version, group in memory_groups(proc, groups):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((group / LIMIT_FILES[version]).read_text()))
    return min(limits)

"""Processes on this host: those that have marked themselves with an anonymous file (memfd), and those that this process
is to end with itself. The standard library only.

A mark's first line is JSON that describes the process; only processes of the same user can read it, through ``/proc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any

# Kills the process group $1 when its standard input is closed, which happens when this process ends in any way.
_END_WITH_PARENT = 'read _; kill -9 -"$1" 2>/dev/null'


def siblings() -> list[int]:
    """The other processes below the host process that started this one; empty on a system without ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as stat:
            parent = int(stat.read().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [os.getppid()]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return sorted(set(found) - {os.getpid()})


def find_marks(pid: int, name: str) -> list[tuple[int, dict[str, Any]]]:
    """The marks ``name`` of a process: a descriptor, which the caller must close, and what the mark says.

    Empty if the process has ended. A mark that it has inherited from another process, by a fork, is left out.
    """
    folder, marks = f"/proc/{pid}/fd", []
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if not os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                    continue
                descriptor = os.open(f"{folder}/{number}", os.O_RDONLY | os.O_CLOEXEC)
                about = _first_line(descriptor)
                if about.get("pid") == pid:
                    marks.append((descriptor, about))
                else:
                    os.close(descriptor)
    return marks


def _first_line(descriptor: int) -> dict[str, Any]:
    """Empty while the process writes it."""
    try:
        found = json.loads(os.pread(descriptor, 65_536, 0).partition(b"\n")[0])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# The standard library only.


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """A process that kills the process group ``group`` when this process ends. Kill it before the group's id is free
    for other processes."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _END_WITH_PARENT, "guard", str(group)], stdin=subprocess.PIPE, start_new_session=True
    )

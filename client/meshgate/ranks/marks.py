"""Processes on this host that have marked themselves with an anonymous file (memfd). The standard library only.

A mark's first line is JSON that describes the process; only processes of the same user can read it, through ``/proc``.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any


def siblings() -> list[int]:
    """The other processes below the host process that started this one; empty on a system without ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
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

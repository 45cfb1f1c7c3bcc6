"""Processes on this host: those that have marked themselves with an anonymous file (memfd), and those that this process
is to end with itself. The standard library only.

A mark's first line is JSON that describes the process; only processes of the same user can read it, through ``/proc``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
from typing import Any

STACKS_MARK = "meshgate-stacks"  # of gateway/meshgate_gateway/engine/on_worker/stacks.py
SCRIPT_MARK = "meshgate-script"

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


def write_startup(directory: str, about: dict[str, Any]) -> None:
    """Writes a ``sitecustomize.py`` that marks each interpreter which starts with ``directory`` first in PYTHONPATH."""
    source = inspect.getsource(serve_script_stacks)
    arguments = SCRIPT_MARK, json.dumps(about), directory
    text = (
        f"from __future__ import annotations\n\n{source}\nserve_script_stacks{arguments!r}\n"
        # One that the interpreter has besides runs now, as it would without this file; ``site`` ignores a missing one.
        "import sys\ndel sys.modules['sitecustomize']\nimport sitecustomize\n"
    )
    with open(os.path.join(directory, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(text)


def serve_script_stacks(name: str, about: str, directory: str) -> None:
    """Runs in the interpreter of a training script before the script, alone, and leaves no other trace in it.

    ``faulthandler`` appends the stacks to the mark ``name`` at a signal. There is no thread that answers, as in actors:
    it would make ``os.fork`` warn. A script that installs its own handler for this signal is noted in the mark, so that
    no reader sends it. Children, which get the variable and the path without ``directory``, are not marked.
    """
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415 - ``signal`` imports much more
    import faulthandler  # noqa: PLC0415
    import os  # noqa: PLC0415
    import sys  # noqa: PLC0415

    places = [place for place in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if place != directory]
    if places:
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
    sys.path[:] = [place for place in sys.path if place != directory]
    sys.path_importer_cache.pop(directory, None)
    if not hasattr(os, "memfd_create"):
        return
    first = os.memfd_create(name)
    mark = os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.close(first)
    number, pid, same = int(_signal.SIGRTMAX) - 3, os.getpid(), os.fstat(mark)
    os.write(mark, f'{{"pid": {pid}, "signal": {number}, {about[1:]}\n'.encode())
    faulthandler.register(number, file=mark, all_threads=True, chain=False)
    install = _signal.signal

    def signal(signalnum, handler):  # type: ignore[no-untyped-def]
        if signalnum == number and os.getpid() == pid:
            try:
                if os.path.samestat(os.fstat(mark), same):  # the script may have closed it
                    os.ftruncate(mark, 0)
                    os.write(mark, f'{{"pid": {pid}, "taken": true, {about[1:]}\n'.encode())
            except OSError:
                pass
        return install(signalnum, handler)

    signal.__doc__ = install.__doc__
    _signal.signal = signal

"""Ends the processes of a measurement and reads their resource usage. Linux only, using ``/proc``.

The run adopts the orphans of its descendants (it is their *subreaper*), so that every process that it started, such as
Ray's daemons and workers, is its descendant and can be ended by process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes orphans among this process's descendants its children from now on."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """One process: ``rss`` in bytes, ``cpu`` in seconds."""

    pid: int
    command: str
    rss: int
    cpu: float


def usage_of(pid: int) -> Usage | None:
    """None if the process has ended."""
    try:
        fields = _fields(pid)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Usage(pid, command, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))


def _fields(pid: int) -> list[str]:
    """Those of ``/proc/PID/stat`` after the command: state, parent, …. Raises OSError if the process is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(pid: int, *, ended: bool = False) -> list[int]:
    """The running descendants, parents before their children. ``ended``: also those that no process has waited for."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = _fields(int(entry))
                if ended or fields[0] not in "ZX":
                    parents.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    level = parents.get(pid, [])
    while level:
        found += level
        level = [child for parent in level for child in parents.get(parent, [])]
    return found


class OtherProcesses:
    """The CPU cores used by processes outside this run, from creation until ``cores_used``.

    A process of the run that ends meanwhile, such as an rsync, belongs to the run: its time is with the parent that has
    waited for it, or with itself as long as none has.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before = _busy() - cpu_of(os.getpid())

    def cores_used(self) -> float:
        return max(0.0, (_busy() - cpu_of(os.getpid()) - self._before) / max(1e-3, time.monotonic() - self._start))


def _busy() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and iowait


def cpu_of(pid: int) -> float:
    """The processor time of a process and all its descendants so far, in seconds, with those that have ended."""
    ticks = 0
    for each in (pid, *descendants(pid, ended=True)):
        with contextlib.suppress(OSError):
            ticks += sum(int(field) for field in _fields(each)[11:15])  # own and those of children waited for
    return ticks / os.sysconf("SC_CLK_TCK")


def end_tree(process: subprocess.Popen[bytes], grace: float) -> None:
    """Terminates ``process``, and kills it and its descendants if they still run after ``grace`` seconds."""
    pids = {process.pid, *descendants(process.pid)}
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    for pid in pids & set(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def end_leftovers() -> list[str]:
    """Kills all remaining descendants and returns their command lines."""
    commands = []
    for _ in range(5):
        left = descendants(os.getpid())
        if not left:
            break
        for pid in left:
            usage = usage_of(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if usage is not None:
                commands.append(usage.command)
        time.sleep(0.1)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return commands


@contextlib.contextmanager
def network_proxy(target: str, *, round_trip: float, rate: float = 0.0) -> Iterator[int]:
    """A proxy to ``target`` (``host:port``) that adds ``round_trip`` seconds and passes ``rate`` bytes a second in each
    direction, or any number; yields the port it listens on."""
    options = ["--delay", str(round_trip / 2), "--rate", str(rate)]
    command: Sequence[str] = [sys.executable, "-m", "meshgate.testing", target, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()

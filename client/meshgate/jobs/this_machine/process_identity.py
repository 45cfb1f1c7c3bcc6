"""Processes of this machine, identified so that a reused pid is never mistaken for one of them.

A job's processes run in their own sessions and process groups, and some outlive their parent, but all inherit its
environment. A job sets a marker variable there, and the marker finds them all. This needs ``/proc``; without it
(macOS) no marked process is found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "kill_marked", "find_marked", "identify_process"]

KILL_ROUNDS = 5  # a process may fork before it is killed; one that cannot be killed must not block the caller


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: its pid and start time, which together are never reused."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        return identify_process(self.pid) == self

    def signal(self, signum: signal.Signals) -> None:
        """Sends ``signum``; does nothing if the process has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait_ended(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds; returns whether the process has ended. A zombie has ended."""
        return not _wait_ended([self], timeout)


def identify_process(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none or only a zombie."""
    return _identify_by_proc(pid) if sys.platform == "linux" else _identify_by_ps(pid)


def _identify_by_proc(pid: int) -> ProcessIdentity | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessIdentity(pid, f"{boot}/{fields[19]}")


def _identify_by_ps(pid: int) -> ProcessIdentity | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    state, _, started = output.partition(" ")
    return ProcessIdentity(pid, started.strip()) if started and not state.startswith("Z") else None


def find_marked(variable: str, value: str) -> list[ProcessIdentity]:
    """This user's processes, except this one, that were started with ``variable=value`` in their environment."""
    marker = f"{variable}={value}".encode()
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except FileNotFoundError:
        return []
    found = []
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # has ended, or belongs to another user
            continue
        if marker in environment.split(b"\0") and pid != os.getpid() and (process := identify_process(pid)):
            found.append(process)
    return found


def kill_marked(variable: str, value: str, timeout: float = 5.0) -> int:
    """Kills every process that ``find_marked`` finds, including ones forked meanwhile; returns their number.

    Returns when they have ended, or after ``timeout`` seconds if the kernel cannot end one.
    """
    deadline = time.monotonic() + timeout
    killed = 0
    for _ in range(KILL_ROUNDS):
        if not (found := find_marked(variable, value)):
            break
        killed += len(found)
        for process in found:
            process.signal(signal.SIGKILL)
        _wait_ended(found, max(0.0, deadline - time.monotonic()))
    return killed


if sys.platform == "linux":

    def _wait_ended(processes: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
        """The processes that are still alive after ``timeout`` seconds; returns early if all have ended."""
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            poller = select.poll()
            waiting: dict[int, ProcessIdentity] = {}
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(process.pid)
                    stack.callback(os.close, descriptor)
                    # Checked once the descriptor is open: from then on it refers to the same process.
                    if process.alive:
                        poller.register(descriptor, select.POLLIN)
                        waiting[descriptor] = process
            while waiting and (remaining := deadline - time.monotonic()) > 0:
                for descriptor, _ in poller.poll(remaining * 1000):
                    poller.unregister(descriptor)
                    del waiting[descriptor]
            return list(waiting.values())

else:

    def _wait_ended(processes: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
        """The processes that are still alive after ``timeout`` seconds; returns early if all have ended."""
        deadline = time.monotonic() + timeout
        alive = [process for process in processes if process.alive]
        while alive and time.monotonic() < deadline:
            time.sleep(0.02)  # no pidfd to wait on
            alive = [process for process in alive if process.alive]
        return alive

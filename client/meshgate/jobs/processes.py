"""Processes of this machine, named so that a reused number is never taken for one of them.

A job's processes sit in sessions and process groups of their own, and some lose their parent. What they keep is
the environment they were started with: a job puts a marker there, and the marker finds them all. That takes
``/proc``; where there is none (macOS) the process group is what can be reached.
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

__all__ = ["ProcessName", "end_marked", "marked", "process_name"]

KILL_ROUNDS = 5  # what is killed may have forked meanwhile; what cannot be killed must not hold us


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process for ever: its number, and when it was started."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        return process_name(self.pid) == self

    def signal(self, signum: signal.Signals) -> None:
        """Sends ``signum``; nothing happens when the process is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait_ended(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds; whether the process has ended. A zombie has."""
        return not _wait_ended([self], timeout)


def process_name(pid: int) -> ProcessName | None:
    """The name of the process that has this number now, or None when there is none (or only its zombie)."""
    return _named_by_proc(pid) if sys.platform == "linux" else _named_by_ps(pid)


def _named_by_proc(pid: int) -> ProcessName | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessName(pid, f"{boot}/{fields[19]}")


def _named_by_ps(pid: int) -> ProcessName | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    state, _, started = listed.partition(" ")
    return ProcessName(pid, started.strip()) if started and not state.startswith("Z") else None


def marked(variable: str, value: str) -> list[ProcessName]:
    """Every process of ours, this one apart, that was started with ``variable=value`` in its environment."""
    mark = f"{variable}={value}".encode()
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except FileNotFoundError:
        return []
    found = []
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if mark in environment.split(b"\0") and pid != os.getpid() and (name := process_name(pid)):
            found.append(name)
    return found


def end_marked(variable: str, value: str, timeout: float = 5.0) -> int:
    """Kills every process that ``marked`` finds, and those that appear meanwhile; returns how many there were.

    They are gone on return, unless the kernel cannot end one within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    killed = 0
    for _ in range(KILL_ROUNDS):
        if not (found := marked(variable, value)):
            break
        killed += len(found)
        for process in found:
            process.signal(signal.SIGKILL)
        _wait_ended(found, max(0.0, deadline - time.monotonic()))
    return killed


if sys.platform == "linux":

    def _wait_ended(processes: Iterable[ProcessName], timeout: float) -> list[ProcessName]:
        """Those still alive after ``timeout`` seconds; returns as soon as none is."""
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            ends = select.poll()
            waiting: dict[int, ProcessName] = {}
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(process.pid)
                    stack.callback(os.close, descriptor)
                    # Asked after the descriptor is open: what it refers to cannot change any more.
                    if process.alive:
                        ends.register(descriptor, select.POLLIN)
                        waiting[descriptor] = process
            while waiting and (remaining := deadline - time.monotonic()) > 0:
                for descriptor, _ in ends.poll(remaining * 1000):
                    ends.unregister(descriptor)
                    del waiting[descriptor]
            return list(waiting.values())

else:

    def _wait_ended(processes: Iterable[ProcessName], timeout: float) -> list[ProcessName]:
        """Those still alive after ``timeout`` seconds; returns as soon as none is."""
        deadline = time.monotonic() + timeout
        alive = [process for process in processes if process.alive]
        while alive and time.monotonic() < deadline:
            time.sleep(0.02)  # no descriptor to wait on here
            alive = [process for process in alive if process.alive]
        return alive

"""Processes of this machine, identified so that a reused pid is never mistaken for one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "identify_process", "wait_ended"]


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
        with contextlib.suppress(ProcessLookupError):
            _send(self, signum)

    def wait_ended(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds; returns whether the process has ended. A zombie has ended."""
        return not wait_ended([self], timeout)


def identify_process(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none or only a zombie."""
    return _identify_by_proc(pid) if sys.platform == "linux" else _identify_by_ps(pid)


def _identify_by_proc(pid: int) -> ProcessIdentity | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else ProcessIdentity(pid, f"{_boot()}/{fields[19]}")
    except OSError:
        return None


@functools.cache
def _boot() -> str:
    """The same for every process; a search asks once for each."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identify_by_ps(pid: int) -> ProcessIdentity | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    state, _, started = output.partition(" ")
    return ProcessIdentity(pid, started.strip()) if started and not state.startswith("Z") else None


if sys.platform == "linux":

    def _send(process: ProcessIdentity, signum: signal.Signals) -> None:
        descriptor = os.pidfd_open(process.pid)
        try:
            # Checked once the descriptor is open: from then on it refers to the same process.
            if process.alive:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)

    def wait_ended(processes: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
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

    def _send(process: ProcessIdentity, signum: signal.Signals) -> None:
        if process.alive:
            os.kill(process.pid, signum)

    def wait_ended(processes: Iterable[ProcessIdentity], timeout: float) -> list[ProcessIdentity]:
        """The processes that are still alive after ``timeout`` seconds; returns early if all have ended."""
        deadline = time.monotonic() + timeout
        alive = [process for process in processes if process.alive]
        while alive and time.monotonic() < deadline:
            time.sleep(0.02)  # no pidfd to wait on
            alive = [process for process in alive if process.alive]
        return alive

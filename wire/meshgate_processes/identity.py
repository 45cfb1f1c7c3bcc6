"""Processes, identified so that a reused pid is never mistaken for one of them.

Whoever reads an identity from a file may be on another machine that shares the directory, or in a container. A pid says
nothing there: such a process is *foreign*, and neither alive nor ended as far as one can tell.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: its pid, and where and when it was started, which together are never reused.

    ``started`` is ``machine/boot/pid namespace/time`` on Linux, and only a time on other systems.
    """

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Whether it is known to run. False for a foreign process. Its machine may have been renamed meanwhile."""
        found = identify_process(self.pid)
        return found is not None and _since_boot(found.started) == _since_boot(self.started)

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended. False for a foreign process."""
        return not self.foreign and not self.alive

    @property
    def foreign(self) -> bool:
        """Whether nothing is known of it here, because it is one of another machine or of another pid namespace."""
        place = self.started.rpartition("/")[0].split("/")
        if sys.platform != "linux" or len(place) != len(_place()):
            return False
        machine, boot, namespace = _place()
        # What ran on this machine before its last boot has ended, in whatever namespace it was.
        return place[2] != namespace if place[1] == boot else place[0] != machine

    @property
    def machine(self) -> str:
        """The host name of the machine or container on which it was started; "" if that is not known."""
        return self.started.partition(":")[0] if self.started.count("/") == len(_place()) else ""

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


def _since_boot(started: str) -> str:
    """``boot/pid namespace/time``, which no other process of this machine has."""
    return started.partition("/")[2] if started.count("/") == len(_place()) else started


def stat_fields(pid: int) -> list[str]:
    """What follows the name of a process in ``/proc/PID/stat``: its state first. Raises OSError if it has ended.

    The name may be no text: the kernel cuts it after 15 bytes, even within a character.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _identify_by_proc(pid: int) -> ProcessIdentity | None:
    try:
        fields = stat_fields(pid)
        return None if fields[0] in "ZX" else ProcessIdentity(pid, "/".join((*_place(), fields[19])))
    except OSError:
        return None


@functools.cache
def _place() -> tuple[str, str, str]:
    """This machine, its boot, and the pid namespace. A search for processes asks once for each of them.

    Machines that boot the same image may have equal machine IDs, and containers equal host names: together they tell
    them apart. Of the machine ID, which is confidential, only a hash is used.
    """
    try:
        machine_id = Path("/etc/machine-id").read_bytes()
    except OSError:
        machine_id = b""
    machine = f"{socket.gethostname()}:{hashlib.sha256(b'meshgate' + machine_id).hexdigest()[:12]}"
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:  # a sandbox that does not show it
        namespace = ""
    return machine.replace("/", "-"), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), namespace


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


def last_output(text: str, most: int) -> str:
    """The end of ``text``, what a process has printed, in at most ``most`` characters, for a message that quotes it.

    It begins at the start of a line, unless the last line alone is longer.
    """
    if len(text) <= most:
        return text
    tail = text[-most:]
    whole_lines = tail if text[-most - 1] == "\n" else tail.partition("\n")[2]
    return whole_lines if whole_lines.strip() else tail


def exit_text(code: int, *, exited: str = "ended with exit code") -> str:
    """How a process ended: ``was killed by SIGKILL``, or ``exited`` and the exit code. ``code``: as ``subprocess`` has
    it, negative for a signal."""
    if code >= 0:
        return f"{exited} {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"

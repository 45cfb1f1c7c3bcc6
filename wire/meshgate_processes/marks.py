"""Finds and ends the processes that belong to a job, a host or an engine, wherever they have moved.

They may leave the session and the process group that they were started in and outlive their parent, but they inherit
its environment. Whoever starts them sets a variable there, the mark, which finds them all.

Without ``/proc``, as on macOS, ``ps`` lists processes with their environment. There it hides that of programs which
the system protects, such as ``/bin/sleep``.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshgate_processes.identity import ProcessIdentity, identify_process, stat_fields, wait_ended

KILL_ROUNDS = 5  # a process may fork before it is killed; one that cannot be killed must not block the caller
EXEC_TIMEOUT = 2.0  # seconds after the first look for processes to finish an execve; on a busy machine it may take long
EXEC_POLL_INTERVAL = 0.001
KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h
PROC = Path("/proc")
# The name (/proc/PID/comm) that the process of a sync agent gives itself. Each session has one on every host, also
# while it runs nothing there.
SYNC_AGENT = "meshgate-sync"
WITH_ENVIRONMENT = "-AEww" if sys.platform == "darwin" else "axeww"  # options of ps: every process, unabridged


def find_processes(mark: str | None = None, *, session: int | None = None) -> list[ProcessIdentity]:
    """The living processes, except this one, with ``mark`` in their environment or in the POSIX session ``session``.

    ``mark``: ``NAME=value``. A process of another user has no readable environment.
    """
    if not PROC.is_dir():
        return _find_by_ps(mark, session)
    unclear = [pid for entry in os.listdir(PROC) if entry.isdigit() and (pid := int(entry)) != os.getpid()]
    found = []
    deadline = math.inf
    while True:
        pids, unclear = unclear, []
        for pid in pids:
            # Identified first: if the pid is reused after it, the process found has ended and is never signalled.
            if (process := identify_process(pid)) is None:
                continue
            if belongs := _belongs(pid, mark, session):
                found.append(process)
            elif belongs is None:
                unclear.append(pid)
        if not unclear or time.monotonic() > deadline:
            return found
        deadline = min(deadline, time.monotonic() + EXEC_TIMEOUT)
        time.sleep(EXEC_POLL_INTERVAL)


def is_sync_agent(process: ProcessIdentity) -> bool:
    """False for what an agent starts, and without ``/proc``."""
    try:
        return (PROC / str(process.pid) / "comm").read_text().strip() == SYNC_AGENT
    except OSError:  # it has ended
        return False


def _find_by_ps(mark: str | None, session: int | None) -> list[ProcessIdentity]:
    """Raises CalledProcessError or FileNotFoundError if there is no usable ``ps``."""
    command = ["ps", WITH_ENVIRONMENT, "-o", "pid=", "-o", "command="]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    found = []
    for line in listed:
        pid, *words = line.split()
        if int(pid) == os.getpid():
            continue
        if (mark is not None and mark.encode() in words) or (session is not None and _session_of(int(pid)) == session):
            found.append(identify_process(int(pid)))
    return [process for process in found if process is not None]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended, or belongs to another user
        return None


def end_processes(
    mark: str | None = None, *, session: int | None = None, grace: float = 0.0, timeout: float = 5.0
) -> int:
    """Ends every process that ``find_processes`` finds, including ones forked meanwhile.

    Sends SIGTERM first and waits up to ``grace`` seconds, unless it is 0; then SIGKILL, and waits up to ``timeout``
    seconds in all for the processes to end. Returns the number of processes that were killed.
    """
    if grace > 0:
        wait_ended(_signal_all(mark, session, signal.SIGTERM), grace)
    deadline = time.monotonic() + timeout
    killed: set[ProcessIdentity] = set()
    for _ in range(KILL_ROUNDS):
        if not (found := _signal_all(mark, session, signal.SIGKILL)):
            break
        killed.update(found)
        wait_ended(found, max(0.0, deadline - time.monotonic()))
    return len(killed)


def _signal_all(mark: str | None, session: int | None, signum: signal.Signals) -> list[ProcessIdentity]:
    found = find_processes(mark, session=session)
    for process in found:
        process.signal(signum)
    return found


def _belongs(pid: int, mark: str | None, session: int | None) -> bool | None:
    """None while the process executes a program.

    The kernel then shows no environment, or a part of the old one: the new memory is in place before the variables are
    (Linux: begin_new_exec, create_elf_tables and environ_read).
    """
    try:
        if session is not None and _session_of(pid) == session:
            return True
        if mark is None:
            return False
        environment = (PROC / str(pid) / "environ").read_bytes()
        if mark.encode() in environment.split(b"\0"):
            return True
        return False if _is_whole(environment, pid) else None
    except OSError:  # it has ended, or belongs to another user
        return False


def _is_whole(environment: bytes, pid: int) -> bool:
    """Whether this is all of it. execve sets the end of the code after that of the environment (Linux:
    load_elf_binary); kernel threads have neither."""
    fields = stat_fields(pid)
    end_code, start, end = (int(fields[number]) for number in (24, 47, 48))  # and env_start, env_end: proc_pid_stat(5)
    return bool(int(fields[6]) & KERNEL_THREAD) or (end_code > 0 and len(environment) == end - start)

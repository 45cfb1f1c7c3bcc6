"""Finds and ends all descendants of this host.

Monarch's processes lead process groups of their own, and the processes of actors may leave the session or lose their
parent. A descendant is recognized by its session ID or by a cookie in its environment, which it inherits. Signals go
through pidfds, so a reused pid is never signalled.

Linux only: on other platforms it finds nothing, and Monarch's own orphan timeout applies.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

__all__ = ["COOKIE_VARIABLE", "end_descendants"]

COOKIE_VARIABLE = "MESHGATE_HOST_COOKIE"
KILL_ROUNDS = 5  # processes may fork while being killed; an unkillable process must not block the host


def end_descendants(cookie: str, grace: float) -> int:
    """Sends SIGTERM to all descendants and, after up to ``grace`` seconds, SIGKILL to the rest.

    Returns the number of processes killed, once all are gone. Includes processes started meanwhile, but never the
    calling process.
    """
    if sys.platform != "linux":
        return 0
    _signal_all(cookie, signal.SIGTERM, wait=grace)
    killed = 0
    for _ in range(KILL_ROUNDS):
        if not (survivors := _signal_all(cookie, signal.SIGKILL, wait=1.0)):
            break
        killed += survivors
    return killed


if sys.platform == "linux":

    def _signal_all(cookie: str, signum: signal.Signals, wait: float) -> int:
        """Signals every descendant and waits up to ``wait`` seconds for their exit. Returns their number."""
        with ExitStack() as stack:
            gone = select.poll()
            count = 0
            for pid in _candidates():
                try:
                    pidfd = os.pidfd_open(pid)
                except OSError:
                    continue
                stack.callback(os.close, pidfd)
                # Check only now: with the pidfd open, the pid cannot be reused.
                if _is_descendant(pid, cookie):
                    signal.pidfd_send_signal(pidfd, signum)
                    gone.register(pidfd, select.POLLIN)
                    count += 1
            deadline = time.monotonic() + wait
            left = count
            while left and (remaining := deadline - time.monotonic()) > 0:
                for pidfd, _ in gone.poll(remaining * 1000):
                    gone.unregister(pidfd)
                    left -= 1
            return count


def _candidates() -> list[int]:
    own = os.getpid()
    return [pid for entry in os.listdir("/proc") if entry.isdigit() and (pid := int(entry)) != own]


def _is_descendant(pid: int, cookie: str) -> bool:
    """Whether ``pid`` is alive (not a zombie) and has this host's session or cookie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "ZX":
            return False
        leads_session = os.getsid(0) == os.getpid()  # otherwise the session may be that of a shell
        if leads_session and os.getsid(pid) == os.getpid():
            return True
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has exited, or belongs to another user
        return False
    return f"{COOKIE_VARIABLE}={cookie}".encode() in environ.split(b"\0")

"""Finds and ends every process that this host has started, wherever it has wandered.

Monarch's processes sit in process groups of their own, and what actors start may leave the session and lose
its parent. Two marks survive that: the session id, and a cookie in the environment that every descendant
inherits. Either one suffices. Signals go through pidfds, so a number that was reused is never hit.

Linux only: elsewhere nothing is found, and Monarch's own orphan timeout is what is left.
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
KILL_ROUNDS = 5  # a process may fork while it is being killed; one that cannot be killed must not hold us


def end_descendants(cookie: str, grace: float) -> int:
    """Ends all of them: SIGTERM, up to ``grace`` seconds to comply, SIGKILL.

    Returns, when they are gone, how many had to be killed; those started meanwhile are ended as well. Never
    signals the calling process.
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
        """Signals every descendant and waits until those are gone or time is up. Returns their number."""
        with ExitStack() as stack:
            gone = select.poll()
            count = 0
            for pid in _candidates():
                try:
                    pidfd = os.pidfd_open(pid)
                except OSError:
                    continue
                stack.callback(os.close, pidfd)
                # Asked only after the pidfd is open: what it refers to cannot change any more.
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
    """Whether ``pid`` is alive (not a zombie) and carries one of the marks of this host."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "ZX":
            return False
        leads_session = os.getsid(0) == os.getpid()  # otherwise the session is someone's shell
        if leads_session and os.getsid(pid) == os.getpid():
            return True
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return False
    return f"{COOKIE_VARIABLE}={cookie}".encode() in environ.split(b"\0")

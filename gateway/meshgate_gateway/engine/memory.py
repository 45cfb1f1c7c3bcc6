"""The memory that large values may take in this process, and what of it is promised to replies that are on their way.

A worker asks before it sends a large message here (``on_worker/large_messages.py``). The content of a large message of
the client is dropped as it arrives (``Session.refuse``), and the request fails.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import NamedTuple

from meshgate_gateway.engine.on_worker.large_messages import LARGE
from meshgate_processes.control_groups import LIMIT_FILES, memory_groups

LIMIT = int(os.environ.get("MESHGATE_VALUE_MEMORY") or 0)
"""Bytes that values may take on their way through the engine; 0: three quarters of the memory that is left."""
UNCHECKED = 64 << 20
"""Bytes that may wait for the driver before results below ``LARGE``, which do not ask, are compared with what is left,
which takes about 0.1 ms. A quarter of a lower ``LIMIT``."""
SMALL = 64 << 10  # bytes; a smaller reply is never refused
ARGUMENTS = 2  # measured with 200 MB: what has arrived, and Monarch's message to however many ranks
# Of each version of control groups: the use, and the parts of it that the kernel can take back: as in its MemAvailable,
# all cached files. A file that was read twice is in the active part, however long ago that was.
USE_FILES = {
    1: ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.current", ("inactive_file", "active_file")),
}

KEEP = (
    "Leave the value in the cluster, with endpoint.keep() in place of call(), and pass it to other calls; save it to a "
    "file and fetch that with job.pull(), or send it in parts"
)
FETCH_LESS = (
    "It stays in the cluster: pass it to other calls, such as one that returns a part of it, or one that saves it to a "
    "file for job.pull(). If one rank's value fits, fetch a slice of the kept mesh"
)


class _Promise(NamedTuple):
    mesh: int
    rank: int
    nbytes: int


class ValueMemory:
    """Decides which large values there is memory for.

    A result takes its size once, measured with 200 MB on one rank and on two: Monarch's buffer, from which it is sent
    to the client. So it is promised its size until it has arrived, and then is part of what the process uses. Arguments
    take theirs ``ARGUMENTS`` times.

    ``awaited(mesh, rank)``: whether a call may still get a reply of this process. ``unsent()``: the bytes that wait to
    be sent to the driver, whose connection may be slow or lost.
    """

    def __init__(
        self, awaited: Callable[[int, int], bool], unsent: Callable[[], int] = lambda: 0, limit: int = LIMIT
    ) -> None:
        self._awaited, self._unsent, self._limit = awaited, unsent, limit
        self.promised: list[_Promise] = []

    def room(self) -> int | None:
        """The bytes that another value may take; None: any number, because what is left is unknown."""
        if self._limit:
            allowed = self._limit - self._unsent()
        elif (left := memory_left()) is None:
            return None
        else:
            allowed = left * 3 // 4
        return max(0, allowed - sum(promise.nbytes for promise in self.promised))

    def ask(self, mesh: int, rank: int, nbytes: int, *, reply: bool, kept: bool = False) -> str:
        """Why a process may not send a message of ``nbytes``, or empty if it may. A ``reply`` is promised its room,
        unless its call has ended, perhaps with an error of another rank: nothing would take the promise back. ``kept``:
        the client fetches a value that stays."""
        room = self.room()
        if room is not None and nbytes > room:
            what = "the kept value" if kept else "the result" if reply else "the message"
            return f"{self._explain(what, nbytes, room)} {FETCH_LESS if kept else KEEP}"
        if reply and self._awaited(mesh, rank):
            self.promised.append(_Promise(mesh, rank, nbytes))
        return ""

    def refuse_reply(self, buffers: Sequence[Sized], *, kept: bool = False) -> str:
        """Why a reply that has arrived is not kept until the driver takes it, or empty if it is. Only what did not
        ``ask`` counts."""
        unsent = self._unsent()
        if unsent < min(UNCHECKED, self._limit // 4 or UNCHECKED):
            return ""
        nbytes = sum(len(each) for each in buffers if len(each) < LARGE)
        if (room := self.room()) is None or nbytes <= room:
            return ""
        waiting = f"{unsent / 1e6:,.1f} MB of messages wait for the driver, which takes them more slowly than they come"
        return f"{self._explain('the result', nbytes, room)} {waiting}. {FETCH_LESS if kept else KEEP}"

    def refuse_arguments(self, nbytes: int, incomplete: int) -> str:
        """Why the arguments in a message of the client are not kept, or empty if there is room. Those of ``incomplete``
        bytes are arriving."""
        if nbytes < LARGE or (room := self.room()) is None:
            return ""
        room = max(0, room // ARGUMENTS - incomplete)
        if nbytes <= room:
            return ""
        return (
            f"{self._explain('this message', nbytes, room)} Send the arguments in parts, or let the actors read them "
            "themselves, from storage or from a directory that job.remote_mount() brings"
        )

    def _explain(self, what: str, nbytes: int, room: int) -> str:
        fact = (
            f"{what} has {nbytes / 1e6:,.1f} MB, but the session's engine, in the gateway, has room for "
            f"{room / 1e6:,.1f} MB."
        )
        if self._limit:
            return f"{fact} MESHGATE_VALUE_MEMORY={self._limit} of the gateway sets this limit."
        return (
            f"{fact} The memory that the gateway has left limits that: give it more, as with "
            "KubernetesJob(gateway=Compute(memory=...)), or set MESHGATE_VALUE_MEMORY of the gateway, in bytes."
        )

    def arrived(self, nbytes: int) -> None:
        """A reply of this size has arrived, from whichever process."""
        for promise in self.promised:
            if promise.nbytes == nbytes:
                self.promised.remove(promise)
                return

    def process_ended(self, mesh: int, rank: int) -> None:
        self.promised = [each for each in self.promised if (each.mesh, each.rank) != (mesh, rank)]

    def call_ended(self) -> None:
        """Takes back what was promised to processes of which no other call awaits a reply."""
        self.promised = [each for each in self.promised if self._awaited(each.mesh, each.rank)]


def memory_left(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that this process may still take: the least that the machine, one of its control groups or ``ulimit
    -v`` leaves it. None if this system does not show it, as macOS."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        used = int((proc / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    left = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    left += _left_in_groups(proc, groups)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        left.append(limit - used)
    return max(0, min(left)) if left else None


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What each of this process's control groups that have a limit has left."""
    for version, group in memory_groups(proc, groups):
        use_file, caches = USE_FILES[version]
        try:
            limit, used = (group / LIMIT_FILES[version]).read_text().strip(), int((group / use_file).read_text())
            statistics = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
        except OSError:  # the root of all groups has no limit, and some may not be read
            limit = "max"
        if limit != "max":
            yield int(limit) - used + sum(int(statistics.get(cache, 0)) for cache in caches)

"""The cost of one sync: time, bytes sent by laptop and gateway, and CPU time of all processes involved."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Moved:
    """``cpu``: seconds of user and system time of all processes involved."""

    seconds: float
    laptop: int
    gateway: int
    cpu: float


class CpuClock:
    """CPU time of running processes and their finished children, and of this process; with ``children``, of the
    finished children of this process instead."""

    def __init__(self, pids: Callable[[], Iterable[int]], *, children: bool = False) -> None:
        self._pids = pids
        self._who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
        self._before = 0.0

    def start(self) -> None:
        self._before = self._now()

    def taken(self) -> float:
        return self._now() - self._before

    def _now(self) -> float:
        own = resource.getrusage(self._who)
        return own.ru_utime + own.ru_stime + sum(map(_cpu_of, self._pids()))


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")

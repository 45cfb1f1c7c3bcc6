"""Benchmarks of the code sync: beside rsync, between runs of processes, from save to call, by fan-out, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.results import Case
from benchmarks.run import Run
from benchmarks.sync.beside_rsync import changes_beside_rsync
from benchmarks.sync.fanout import by_fanout
from benchmarks.sync.live import from_save_to_call
from benchmarks.sync.mechanisms import mechanisms
from benchmarks.sync.simulated import simulated
from benchmarks.sync.used import with_processes

__all__ = ["GROUPS"]

GROUPS: dict[str, Callable[[Run], Iterator[Case]]] = {
    "rsync": changes_beside_rsync,
    "processes": with_processes,
    "mechanisms": mechanisms,
    "live": from_save_to_call,
    "simulation": simulated,
    "fan-out": by_fanout,
}

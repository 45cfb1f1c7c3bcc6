"""4,096 hosts on a virtual clock: the real planner and relay, compared with the bound set by latency and bandwidth.

A tenth of the hosts have 2.5 Gbit/s, a fifth 25, the others 10, in three zones; in some rows one in a hundred fails
during the transfer. The bound: the slowest host cannot receive the version faster than its link allows, and the gateway
cannot know before a message has gone there and back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.results import Case, Value, at_most
from benchmarks.run import Run
from benchmarks.sync.simulated_cluster import Machine, Simulation
from meshgate_sync.relay.plan import CONTROL_FANOUT, STRIPES

HOSTS = 4096
_GIGABIT = 125e6
_LATENCY = 0.0002
_ORIGIN = Machine("", 25 * _GIGABIT, 25 * _GIGABIT, _LATENCY)


@dataclass(frozen=True, slots=True)
class Outline:
    """A version of ``size`` bytes in ``pieces``; a single piece is sent with its announcement."""

    name: str
    size: int
    pieces: int
    failing: float = 0.0
    even: bool = False
    hosts: int = HOSTS
    fanout: int = CONTROL_FANOUT
    stripes: int = STRIPES
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Simulated:
    """``gateway``: bytes sent by the gateway, in multiples of the version's size. ``twice``: the share of bytes
    received twice. ``took``: CPU seconds of the simulation."""

    failed: int
    seconds: float
    bound: float
    gateway: float
    twice: float
    took: float


_OUTLINES = (
    Outline("1 GB, uneven links, 1 % of the hosts fail", 1_000_000_000, 100, failing=0.01),
    Outline("200 MB, uneven links", 200_000_000, 100),
    Outline("200 MB, uneven links, 1 % of the hosts fail", 200_000_000, 100, failing=0.01),
    Outline("one line (20 kB, with the announcement)", 20_000, 1),
)


def machines(outline: Outline, within: float) -> list[Machine]:
    rng = random.Random(outline.seed)
    made = []
    for number in range(outline.hosts):
        speed = (10 if outline.even else rng.choices([2.5, 10, 25], [0.1, 0.7, 0.2])[0]) * _GIGABIT
        fails_at = 0.1 + rng.random() * within if rng.random() < outline.failing else None
        zone = f"zone{number * 3 // outline.hosts}"
        made.append(Machine(f"h{number}", speed, speed, _LATENCY, zone=zone, fails_at=fails_at))
    return made


def simulate(outline: Outline) -> Simulated:
    slowest = (10 if outline.even else 2.5) * _GIGABIT
    bound = outline.size / slowest + 4 * _LATENCY
    hosts = machines(outline, bound)
    started = time.process_time()
    outcome = Simulation(
        _ORIGIN, hosts, pieces=outline.pieces, piece_size=outline.size // outline.pieces, inline=outline.pieces == 1,
        fanout=outline.fanout, stripes=outline.stripes,
    ).run()  # fmt: skip
    failed = sum(host.fails_at is not None for host in hosts)
    wasted = outcome.wasted / (outline.size * outline.hosts)
    took = time.process_time() - started
    return Simulated(failed, outcome.seconds, bound, outcome.sent[""] / outline.size, wasted, took)


def processes() -> ProcessPoolExecutor:
    """One per core: virtual time does not depend on how many run."""
    return ProcessPoolExecutor(mp_context=get_context("spawn"))


def simulated(run: Run) -> Iterator[Case]:
    with processes() as pool:
        for outline, found in zip(_OUTLINES, pool.map(simulate, _OUTLINES), strict=True):
            ratio = found.seconds / found.bound
            columns = {
                "seconds": Value("s", (found.seconds,)),
                "bound": Value("s", (found.bound,)),
                "ratio": Value("times", (ratio,)),
                "gateway": Value("times", (found.gateway,)),
                "twice": Value("%", (found.twice * 100,)),
            }
            failed = f"{found.failed} hosts fail" if found.failed else ""
            checks = at_most("of the bound", ratio, 2) if outline.pieces > 1 else []
            note = failed if outline.pieces > 1 else "four levels there and back, and what the stores take"
            yield Case(outline.name, columns, table="simulation", checks=checks, note=note)

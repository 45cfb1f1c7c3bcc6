"""4,096 hosts on a virtual clock: the very planner and relay, against the bound that latency and bandwidth set.

    python -m benchmarks.sync_simulation [--hosts 4096]

A tenth of the hosts have 2.5 Gbit/s, a fifth 25, the others 10, in three zones; one in a hundred loses its power during
the transfer, where the row says so. The bound: the slowest host cannot receive the version faster than its link
allows, and the gateway cannot know it before a message has gone there and one has come back. The result goes to
``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from meshgate_sync.simulation import Machine, Simulation

_GIGABIT = 125e6
_LATENCY = 0.0002
_ORIGIN = Machine("", 25 * _GIGABIT, 25 * _GIGABIT, _LATENCY)


@dataclass(frozen=True, slots=True)
class Row:
    """``ratio``: of ``seconds`` to ``bound``. ``gateway``: times its size that the version left the gateway.
    ``wasted``: share of the bytes that came twice."""

    case: str
    hosts: int
    failed: int
    seconds: float
    bound: float
    ratio: float
    gateway: float
    wasted: float


def machines(count: int, *, failing: float, within: float, even: bool, seed: int) -> list[Machine]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        speed = (10 if even else rng.choices([2.5, 10, 25], [0.1, 0.7, 0.2])[0]) * _GIGABIT
        fails_at = 0.1 + rng.random() * within if rng.random() < failing else None
        zone = f"zone{number * 3 // count}"
        made.append(Machine(f"h{number}", speed, speed, _LATENCY, zone=zone, fails_at=fails_at))
    return made


def simulate(case: str, count: int, size: int, pieces: int, *, failing: float = 0.0, even: bool = False) -> Row:
    slowest = (10 if even else 2.5) * _GIGABIT
    bound = size / slowest + 4 * _LATENCY
    hosts = machines(count, failing=failing, within=bound, even=even, seed=1)
    started = time.perf_counter()
    outcome = Simulation(_ORIGIN, hosts, pieces=pieces, piece_size=size // pieces, inline=pieces == 1).run()
    failed = sum(host.fails_at is not None for host in hosts)
    row = Row(
        case, count, failed, outcome.seconds, bound, outcome.seconds / bound, outcome.sent[""] / size,
        outcome.wasted / (size * count),
    )  # fmt: skip
    print(
        f"{case:<44}{failed:>8}{row.seconds:>10.3f} s{bound:>10.3f} s{row.ratio:>8.2f}{row.gateway:>10.2f}"
        f"{row.wasted:>9.2%}   ({time.perf_counter() - started:.0f} s to simulate)",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4096)
    count = parser.parse_args().hosts
    head = f"case, {count} hosts"
    print(f"{head:<44}{'failed':>8}{'time':>12}{'bound':>12}{'ratio':>8}{'gateway':>10}{'twice':>9}")
    rows = [
        simulate("1 GB, uneven links", count, 1_000_000_000, 200),
        simulate("1 GB, uneven links, 1 % of the hosts fail", count, 1_000_000_000, 200, failing=0.01),
        simulate("200 MB, uneven links", count, 200_000_000, 100),
        simulate("200 MB, uneven links, 1 % of the hosts fail", count, 200_000_000, 100, failing=0.01),
        simulate("200 MB, even links", count, 200_000_000, 100, even=True),
        simulate("one line (20 kB, with the announcement)", count, 20_000, 1),
    ]
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    path = results / f"sync-simulation-{datetime.now(timezone.utc):%Y-%m-%dT%H%M%S}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()

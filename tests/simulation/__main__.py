"""``python -m tests.simulation [--seconds N] [--seed N]``: runs seeds until the time is over, or one that is named."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.run import run_seed


def simulate(seconds: float, first: int) -> bool:
    """Runs seeds from ``first`` on for ``seconds`` of real time, and prints what they did. False if any fails."""
    end = time.perf_counter() + seconds
    seed, failed, calls, edits, stale, callbacks = first, 0, 0, 0, 0, 0
    faults: Counter[str] = Counter()
    while time.perf_counter() < end:
        try:
            outcome = run_seed(seed)
        except AssertionError as failure:
            print(failure, f"replay it with python -m tests.simulation --seed {seed}", sep="\n", file=sys.stderr)
            seed, failed = seed + 1, failed + 1
            continue
        seed, calls, callbacks = seed + 1, calls + outcome.calls, callbacks + outcome.callbacks
        edits, stale = edits + outcome.edits, stale + outcome.stale
        faults += outcome.faults
    print(f"{seed - first:,} seeds, of which {failed:,} failed")
    print(f"{faults.total():,} faults, {calls:,} calls, {callbacks:,} callbacks")
    print(f"{edits:,} versions of code, {stale:,} of them refused as stale")
    for name, count in faults.most_common():
        print(f"{count:>8,} {name}")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="run this seed only, and print what happened")
    options = parser.parse_args()
    if options.seed is None:
        return 0 if simulate(options.seconds, options.first) else 1
    print(*run_seed(options.seed).trace, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

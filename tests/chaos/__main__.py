"""``python -m tests.chaos [--minutes N] [--seed N] [--docs]``: random faults for N minutes, and what they cost.

Writes build/chaos.json; with ``--docs`` also the table of docs/reliability.md. Exits with 1 if a call, a line or a
message was lost, doubled or out of order, if a call was never answered, or if a process was left behind.

With ``--simulate`` it runs the simulation of ``tests/simulation`` for that time instead.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import meshgate
from benchmarks.sections import write_section
from tests.chaos.faults import FATAL, SURVIVABLE
from tests.chaos.world import World, world
from tests.simulation.__main__ import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RECOVERY_LIMIT = 120.0
LATE = 5.0  # seconds after the end of a fault within which every way of calling must be answered again
SESSION_FAULTS = 40  # faults before the session's calls are counted and a new job starts


@dataclass
class Cost:
    """What a kind of fault cost. ``longest``: seconds until calls were answered again, or had failed."""

    tried: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    unanswered: int = 0
    late: int = 0
    left_behind: int = 0
    longest: float = 0.0

    def took(self, seconds: float | None) -> None:
        if seconds is None:
            self.unanswered += 1
        else:
            self.longest = max(self.longest, seconds)
            self.late += seconds > LATE

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.doubled or self.disordered or self.unanswered or self.left_behind)


@dataclass
class Totals:
    """``sessions``: what the sessions under survivable faults counted when they ended."""

    costs: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in (*SURVIVABLE, *FATAL)})
    calls: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> int:
    options = _options()
    if options.simulate:
        return 0 if simulate(60 * options.minutes, options.seed) else 1
    meshgate.unhandled_fault_hook = lambda failure: None  # faults are what this program makes
    chance = random.Random(options.seed)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(f"seed {options.seed}, {options.minutes:g} minutes", highlight=False)
    totals = Totals()
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        _survivable_session(totals, chance, end, console)
        for name, fatal in FATAL.items():
            outcome = fatal.inject()
            cost = totals.costs[name]
            cost.tried += 1
            cost.took(outcome.longest)
            cost.unanswered += outcome.unanswered + outcome.wrong
            cost.left_behind += outcome.left_behind
    _show(console, totals)
    record = {"seed": options.seed, "minutes": options.minutes, "calls": totals.calls, "problems": totals.problems}
    record["faults"] = {name: asdict(cost) for name, cost in totals.costs.items()}
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "chaos.json").write_text(json.dumps(record, indent=1))
    if options.docs:
        _write_page(totals, options.minutes)
    return 1 if totals.problems or any(cost.failed for cost in totals.costs.values()) else 0


def _survivable_session(totals: Totals, chance: random.Random, end: float, console: Console) -> None:
    """One session under random survivable faults; what it lost is counted for its last fault."""
    name = ""
    with world() as here:
        if here.driver.wait_progress(RECOVERY_LIMIT) is None:
            totals.problems.append("a session answered no call before the first fault")
            return
        for name in _choices(chance, end):
            SURVIVABLE[name](here, chance)
            seconds = here.driver.wait_progress(RECOVERY_LIMIT)
            totals.costs[name].tried += 1
            totals.costs[name].took(seconds)
            if seconds is None or seconds > LATE:
                console.print(f"{name}: {seconds} s", highlight=False)
            if seconds is None:
                break
        _count(totals, totals.costs[name] if name else Cost(), here)
    console.print(f"{totals.calls} calls, {sum(cost.tried for cost in totals.costs.values())} faults", highlight=False)


def _choices(chance: random.Random, end: float) -> Iterator[str]:
    for _ in range(SESSION_FAULTS):
        if time.monotonic() > end:
            return
        yield chance.choice(list(SURVIVABLE))


def _count(totals: Totals, last: Cost, here: World) -> None:
    try:
        result: dict[str, Any] = here.driver.end()
    except subprocess.TimeoutExpired:
        result = {"problems": ["the driver did not end"]}
    totals.calls += result.get("calls", 0)
    totals.problems += result["problems"]
    last.lost += result.get("lost", 0)
    last.doubled += result.get("doubled", 0)
    last.disordered += result.get("disordered", 0)


COLUMNS = ("tried", "lost", "doubled", "disordered", "unanswered", "late", "left_behind", "longest")


def _rows(totals: Totals) -> Iterator[tuple[str, ...]]:
    for name, cost in totals.costs.items():
        values = asdict(cost)
        yield name, *(f"{values[each]:.1f} s" if each == "longest" else str(values[each]) for each in COLUMNS)


def _show(console: Console, totals: Totals) -> None:
    table = Table("fault", *(column.replace("_", " ") for column in COLUMNS))
    for row in _rows(totals):
        table.add_row(*row)
    console.print(table)
    for problem in totals.problems:
        console.print(f"problem: {problem}", highlight=False)
    console.print(f"{totals.calls} calls", highlight=False)


def _write_page(totals: Totals, minutes: float) -> None:
    rows = ["| " + " | ".join(row) + " |" for row in _rows(totals)]
    head = "| fault | " + " | ".join(column.replace("_", " ") for column in COLUMNS) + " |"
    rule = "|---|" + "---:|" * len(COLUMNS)
    text = [f"`make chaos` for {minutes:g} minutes: {totals.calls:,} calls.", "", head, rule]
    write_section(PAGE, "chaos", "\n".join([*text, *rows]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    seed = random.SystemRandom().randrange(1 << 32)
    parser.add_argument("--seed", type=int, default=seed, help="the seed of the choices, to repeat them")
    parser.add_argument("--simulate", action="store_true", help="run the simulation on a virtual clock, from this seed")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/reliability.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks``: runs all benchmarks, or selected groups, and prints the tables.

Writes benchmarks/results/<date>.json; with ``--docs``, also the tables of docs/benchmarks.md and their plots.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time

from rich.console import Console

from benchmarks.cases import GROUPS as CALL_GROUPS
from benchmarks.edits import GROUPS as EDIT_GROUPS
from benchmarks.plots import draw
from benchmarks.processes import ROOT, adopt_orphans, end_leftovers
from benchmarks.report import disturbance, machine, show, write_into
from benchmarks.results import Case
from benchmarks.run import Run, settle
from benchmarks.sync import GROUPS as SYNC_GROUPS

GROUPS = {**CALL_GROUPS, **EDIT_GROUPS, **SYNC_GROUPS}
SETS = {"monarch": (*CALL_GROUPS, *EDIT_GROUPS), "sync": tuple(SYNC_GROUPS)}


def main() -> int:
    options = _options()
    adopt_orphans()
    console = Console(width=None if sys.stdout.isatty() else 180)
    results = ROOT / "benchmarks" / "results"
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
    logs = results / f"{stamp}-logs"
    logs.mkdir(parents=True)
    groups = [group for name in options.only or SETS for group in SETS.get(name, (name,))]
    ray_version = _ray_version(options.ray_python)
    run = Run(logs, options.rounds, options.ray_python if ray_version else None, options.quiet)
    if not ray_version and set(groups) & CALL_GROUPS.keys():
        run.report_problem(f"{options.ray_python} cannot import Ray, so its column is empty: pip install 'ray[client]'")
    cases: list[Case] = []
    loads: list[str] = []
    start = time.monotonic()
    try:
        for name in groups:
            loads.append(f"{name} {os.getloadavg()[0]:.2f}")
            for case in GROUPS[name](run):
                cases.append(case)
                console.print(f"[dim]{time.monotonic() - start:6.1f} s[/]  {case.name}: {_line(case)}", highlight=False)
            settle()
    finally:
        leftovers = end_leftovers()
    for command in leftovers:
        run.report_problem(f"ended a process that was still running: {command[:120]}")
    about = [*machine(ray_version, loads), ("CPU cores used by other processes", disturbance(run.others))]
    show(console, cases)
    for name, value in about:
        console.print(f"{name}: {value}", highlight=False)
    missed = [f"{case.name.strip()}: {check}" for case in cases for check in case.checks if not check.met]
    console.print(f"{sum(len(case.checks) for case in cases) - len(missed)} targets met, {len(missed)} missed; {logs}")
    record = {"about": dict(about), "cases": [case.as_json() for case in cases], "problems": run.problems}
    (results / f"{stamp}.json").write_text(json.dumps(record, indent=1))
    if options.docs:
        try:
            write_into(ROOT / "docs" / "benchmarks.md", cases, about, run.others)
        except ValueError as error:
            run.report_problem(str(error))
            return 1
        for path in draw(cases, ROOT / "docs" / "plots"):
            console.print(f"wrote {path.relative_to(ROOT)}", highlight=False)
    return 1 if run.problems else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*SETS, *GROUPS], help="the groups to run (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement, after a warm-up round")
    parser.add_argument("--ray-python", default=sys.executable, help="a Python with Ray installed (default: this one)")
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="CORES",
        help="repeat a round in which other processes used more than CORES CPU cores",
    )
    parser.add_argument(
        "--docs", action="store_true", help="update tables and plots in docs/, unless other programs use the CPU"
    )
    return parser.parse_args()


def _ray_version(python: str) -> str | None:
    done = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('ray'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _line(case: Case) -> str:
    return ", ".join(f"{peer} {value}" for peer, value in case.columns.items())


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks``: measures everything, or the parts that are named, and shows the tables.

Writes benchmarks/results/<date>.json; with ``--docs`` also the tables of docs/benchmarks.md and the plots beside them.
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

from benchmarks.cases import GROUPS as OF_CALLS
from benchmarks.plots import draw
from benchmarks.processes import ROOT, adopt_orphans, end_leftovers
from benchmarks.report import disturbance, machine, show, write_into
from benchmarks.results import Case
from benchmarks.run import Run, settle
from benchmarks.sync import GROUPS as OF_SYNC

GROUPS = {**OF_CALLS, **OF_SYNC}
SETS = {"monarch": tuple(OF_CALLS), "sync": tuple(OF_SYNC)}


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
    if not ray_version and set(groups) & OF_CALLS.keys():
        run.trouble(f"{options.ray_python} has no Ray: its column stays empty (pip install 'ray[client]')")
    cases: list[Case] = []
    loads: list[str] = []
    begin = time.monotonic()
    try:
        for name in groups:
            loads.append(f"{name} {os.getloadavg()[0]:.2f}")
            for case in GROUPS[name](run):
                cases.append(case)
                console.print(f"[dim]{time.monotonic() - begin:6.1f} s[/]  {case.name}: {_line(case)}", highlight=False)
            settle()
    finally:
        leftovers = end_leftovers()
    for command in leftovers:
        run.trouble(f"left running, now ended: {command[:120]}")
    about = [*machine(ray_version, loads), ("cores that other processes took meanwhile", disturbance(run.others))]
    show(console, cases)
    for what, value in about:
        console.print(f"{what}: {value}", highlight=False)
    missed = [f"{case.name.strip()}: {check}" for case in cases for check in case.checks if not check.met]
    console.print(f"{sum(len(case.checks) for case in cases) - len(missed)} targets met, {len(missed)} missed; {logs}")
    record = {"about": dict(about), "cases": [case.as_json() for case in cases], "troubles": run.troubles}
    (results / f"{stamp}.json").write_text(json.dumps(record, indent=1))
    if options.docs:
        write_into(ROOT / "docs" / "benchmarks.md", cases, about)
        for path in draw(cases, ROOT / "docs" / "plots"):
            console.print(f"drawn: {path.relative_to(ROOT)}", highlight=False)
    return 1 if run.troubles else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*SETS, *GROUPS], help="what to measure (default: everything)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement, besides one to warm up")
    parser.add_argument("--ray-python", default=sys.executable, help="a Python that has Ray (default: this one)")
    parser.add_argument("--quiet", type=float, help="repeat a round in which other processes took more cores than this")
    parser.add_argument("--docs", action="store_true", help="write tables and plots into docs/")
    return parser.parse_args()


def _ray_version(python: str) -> str | None:
    said = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('ray'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or None


def _line(case: Case) -> str:
    return ", ".join(f"{peer} {value}" for peer, value in case.columns.items())


if __name__ == "__main__":
    sys.exit(main())

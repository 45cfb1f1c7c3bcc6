"""``python -m benchmarks.path``: the files and functions of meshgate that one sequential call passes through.

A driver makes calls to one actor of a ProcessJob, as a warm session does, while driver and engine record each function
that they enter (``path_recorder/sitecustomize.py``). What three in four of the fastest calls enter is the path of a
call; the rest is what happens to run beside it, such as a timer, of which a call on a busy machine meets many. Prints
the path in the order of the first entry, and writes benchmarks/results/path-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import meshgate as kt
from benchmarks.path_recorder import sitecustomize as recorder
from benchmarks.workload import Target

RESULTS = Path(__file__).parent / "results"
WARM_UP = 50
FASTEST = 4  # one call of so many counts


@dataclass(frozen=True)
class Step:
    """A function on the path. ``part``: "call", up to the settled future, or "get", what the caller then enters."""

    process: str
    thread: str
    part: str
    file: str
    function: str
    line: int
    times: int  # entered, in one call


def measure(calls: int = 80) -> list[Step]:
    """The path of a call, in the order of the first entry."""
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder, "switch")
        switch.write_bytes(b"\0")
        path = [str(Path(recorder.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {recorder.RECORD: folder, "PYTHONPATH": os.pathsep.join(path)}
        recorder.start("driver")
        marks = _record(calls, switch)
        sys.setprofile(None)
        return _path(Path(folder), marks)


def _record(calls: int, switch: Path) -> list[tuple[int, int, int]]:
    """When each call was begun, when the caller began to wait for it, and when that had its result."""
    marks = []
    with kt.ProcessJob({"workers": 1}) as job:
        actors = job.state().workers.spawn_procs().spawn("target", Target)
        for _ in range(WARM_UP):
            actors.echo.call(b"x").get()
        time.sleep(0.5)  # what the start of a session brings with it ends, such as reports
        call = actors.echo.call
        _turn(switch, b"\1")
        for _ in range(calls):
            begun = time.monotonic_ns()
            future = call(b"x")
            made = time.monotonic_ns()
            future.get()
            marks.append((begun, made, time.monotonic_ns()))
        _turn(switch, b"\0")
    return marks


def _turn(switch: Path, state: bytes) -> None:
    with switch.open("r+b") as file:  # without truncating it: the processes have it mapped
        file.write(state)


def _path(folder: Path, marks: list[tuple[int, int, int]]) -> list[Step]:
    begun = [begin for begin, *_ in marks]
    by_duration = sorted(range(len(marks)), key=lambda number: marks[number][2] - marks[number][0])
    fastest = set(by_duration[: max(1, len(marks) // FASTEST)])
    times: dict[tuple[Any, ...], Counter[int]] = {}
    first: dict[tuple[Any, ...], dict[int, int]] = {}  # nanoseconds after the begin of each call
    for process in ("driver", "engine"):
        for line in (folder / process).read_text().splitlines():
            at, thread, file, function = line.split("\t")
            number = bisect_right(begun, int(at)) - 1
            if number not in fastest:
                continue
            waits = process == "driver" and thread == "MainThread" and int(at) > marks[number][1]
            step = (process, thread, "get" if waits else "call", file, *function.rsplit(":", 1))
            times.setdefault(step, Counter())[number] += 1
            first.setdefault(step, {}).setdefault(number, int(at) - begun[number])
    usual = [step for step, counts in times.items() if 4 * len(counts) >= 3 * len(fastest)]
    return [
        Step(*step[:5], int(step[5]), round(statistics.median(times[step].values())))
        for step in sorted(usual, key=lambda step: statistics.median(first[step].values()))
    ]


def totals(steps: list[Step], part: str | None = None) -> tuple[int, int]:
    """How many files and functions there are, each counted once."""
    chosen = [step for step in steps if part in (None, step.part)]
    return len({step.file for step in chosen}), len({(step.file, step.line, step.function) for step in chosen})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.path", description=__doc__)
    parser.add_argument("--calls", type=int, default=80)
    parser.add_argument("--quiet", action="store_true", help="print the totals only")
    options = parser.parse_args()
    steps = measure(options.calls)
    if not options.quiet:
        for step in steps:
            place = f"{step.file}:{step.line} {step.function}"
            print(f"{step.process:7} {step.thread:20} {step.part:4} {step.times:3}  {place}")
    lines = {}
    for name, part in (("call() to the settled future", "call"), ("get()", "get"), ("both", None)):
        files, functions = totals(steps, part)
        lines[name] = {"files": files, "functions": functions}
        print(f"{name}: {files} files, {functions} functions")
    RESULTS.mkdir(exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
    record = {"totals": lines, "steps": [asdict(step) for step in steps]}
    (RESULTS / f"path-{stamp}.json").write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

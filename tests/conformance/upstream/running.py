"""Runs the tests of a file and keeps every result as it comes, so that an interrupted run goes on where it was.

All run in one process first. One that fails there, or that ends the process, interrupts it or hangs, runs again in
processes of its own: that result counts, and the run of the others goes on without it.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshgate_processes.marks import end_processes
from tests.conformance.upstream.tree import Test

SIDES = ("direct", "gateway")
TEST_SECONDS = 120
SILENT_SECONDS = TEST_SECONDS + 60  # without a test that begins or ends; the rest is for pytest to start and to end
MARK = "MESHGATE_CONFORMANCE_PROCESS"
TOGETHER = "MESHGATE_CONFORMANCE_TOGETHER"
REPORT = "MESHGATE_CONFORMANCE_REPORT"
PYTEST_INI = f"""\
[pytest]
addopts = -p no:cacheprovider -p no:xdist
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
timeout = {TEST_SECONDS}
"""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """``outcome``: "passed", "failed" or "skipped"; ``error``: of a failure, or why it was skipped, in a line."""

    outcome: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result(Outcome):
    test: str = ""
    side: str = ""
    commit: str = ""  # of meshgate
    day: str = ""
    runs: int = 1


class Results:
    """The results of a release in a file, a JSON object a line. The last line of a test on a side counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                result = Result(**json.loads(line))
                self._found[result.test, result.side] = result

    def get(self, test: str, side: str) -> Result | None:
        return self._found.get((test, side))

    def add(self, result: Result) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self._found[result.test, result.side] = result


def prepare(copy: Path) -> None:
    """Makes the copy of a side a directory that pytest runs in, and a project of its own for code sync."""
    (copy.parent / "pytest.ini").write_text(PYTEST_INI)
    subprocess.run(["git", "init", "--quiet", str(copy.parent)], check=True)


def run_file(tests: Sequence[Test], copy: Path) -> Iterator[tuple[Test, Outcome]]:
    """Runs tests of a file in the directory ``copy``, together and then, if one failed or ended the program, alone."""
    left, alone = list(tests), []
    while len(left) > 1:
        over, interrupted = _run(left, copy, together=True)
        for test in left:
            if test.name in over and over[test.name].outcome != "failed":
                yield test, over[test.name]
            elif test.name in over or test.name in interrupted:
                alone.append(test)
        rest = [test for test in left if test.name not in over and test.name not in interrupted]
        if len(rest) == len(left):  # not one was begun
            break
        left = rest
    for test in [*alone, *left]:
        over, interrupted = _run([test], copy, together=False)
        yield test, {**over, **interrupted}[test.name]


def _run(tests: Sequence[Test], copy: Path, together: bool) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Runs tests of one file in one process. Returns the outcomes of those that were over, by name, and that of the one
    with which the process ended. A single test always has an outcome.
    """
    mark = f"{os.getpid()}-{next(_numbers)}"
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as scratch:
        report, output = Path(scratch, "report"), Path(scratch, "output")
        path = os.pathsep.join([str(copy), str(copy.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, MARK: mark, REPORT: str(report), "PYTHONPATH": path, "TMPDIR": scratch}
        environment[TOGETHER] = "1" if together else ""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-c", str(copy.parent / "pytest.ini")]
        command += [f"{copy / test.file}::{test.name}" for test in tests]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            try:
                ended = _wait(process, report)
            finally:
                end_processes(f"{MARK}={mark}")
                process.wait()
        over, interrupted = read_report(report.read_text().splitlines() if report.exists() else [], ended)
        if not together:
            name = tests[0].name
            over.setdefault(name, interrupted.get(name) or over.get("") or Outcome("failed", f"not begun: {ended}"))
            _keep_output(copy.parent / "output", tests[0], output if over[name].outcome == "failed" else None)
        return over, interrupted


def _wait(process: subprocess.Popen[bytes], report: Path) -> str:
    """Waits until the process has ended or its report does not grow any more. Returns which."""
    size = -1
    while size < (size := report.stat().st_size if report.exists() else 0):
        try:
            return f"the process ended with status {process.wait(SILENT_SECONDS)}"
        except subprocess.TimeoutExpired:
            """A test with many parameters takes long."""
    return f"no test began or ended for {SILENT_SECONDS} s"


def read_report(lines: Iterable[str], ended: str) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """The outcomes in a report of the tests' conftest.py, by the names of the tests: those that were over, and the one
    that was not. A test with parameters has one outcome for all of them. An error of collection has the name "".

    ``ended`` says how the process ended.
    """
    over: dict[str, Outcome] = {}
    begun: set[str] = set()
    for entry in map(json.loads, lines):
        name = re.sub(r"\[.*$", "", entry["id"], flags=re.DOTALL).partition("::")[2]
        if entry["when"] == "start":
            begun.add(name)
            continue
        if entry["when"] == "finish":
            begun.discard(name)
        now = Outcome(entry["outcome"] or "passed", _first_line(entry["error"]), entry["seconds"])
        over[name] = _worse(over.get(name), now)
    for name in begun:
        over.pop(name, None)
    return over, {name: Outcome("failed", f"it ended the program: {ended}") for name in begun}


def _worse(before: Outcome | None, now: Outcome) -> Outcome:
    """A failure outweighs a skip, and a skip the mere end of a test."""
    order = ("passed", "skipped", "failed")
    if before is None or order.index(now.outcome) > order.index(before.outcome):
        return now
    return Outcome(before.outcome, before.error, max(before.seconds, now.seconds))


def _first_line(error: str) -> str:
    """The line of pytest's report of a failure that says what failed."""
    lines = [each.strip() for each in error.splitlines() if each.strip()]
    raised = [each.removeprefix("E ").strip() for each in lines if each.startswith("E ")]
    return (raised or lines or [""])[0][:300]


def _keep_output(folder: Path, test: Test, output: Path | None) -> None:
    """Keeps what a failing test printed, to find the reason."""
    file = folder / (test.id.replace("/", "-").replace("::", "-") + ".txt")
    file.unlink(missing_ok=True)
    if output is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(output.read_bytes())


def stamp(test: Test, side: str, outcome: Outcome, commit: str, runs: int) -> Result:
    day = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}"
    seconds = round(outcome.seconds, 2)
    return Result(outcome.outcome, outcome.error, seconds, test.id, side, commit, day, runs)

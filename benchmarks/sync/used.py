"""One changed line synced to 8 hosts between runs of processes: processes are started from each version and called, and
have been stopped, or still run, when the next version is saved. Compared with rsync to 8 directories."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Case, Value, at_least, at_most
from benchmarks.run import Run
from benchmarks.sync import trees
from benchmarks.sync.beside_rsync import directory
from benchmarks.sync.deployment import Deployment, HostProcesses
from benchmarks.sync.moved import Moved
from benchmarks.sync.rsync import Rsync

_HOSTS = 8
_LEAST_ROUNDS = 7
_WARM = 2
_REST = 1.0


@dataclass(frozen=True, slots=True)
class _Scenario:
    """``running``: processes of the last version run during the save. ``rest``: seconds from their calls to the save.
    ``watched``: the file watcher reports what changed; otherwise the whole tree is scanned, as by ``job.sync()``."""

    name: str
    running: bool
    watched: bool = False
    rest: float = _REST


_SCENARIOS = (
    _Scenario("processes called and stopped", running=False),
    _Scenario("processes still running", running=True),
    _Scenario("processes called and stopped, watched", running=False, watched=True),
    _Scenario("processes still running, watched", running=True, watched=True),
    _Scenario("processes called and stopped, saved at once", running=False, rest=0.0),
    _Scenario("processes called and running, saved at once", running=True, rest=0.0),
)


@dataclass(frozen=True, slots=True)
class _Save:
    """``usable``: seconds from the save until processes can be started on every host."""

    mine: Moved
    usable: float
    other: Moved


def with_processes(run: Run) -> Iterator[Case]:
    for scenario in _SCENARIOS:
        rng = random.Random(scenario.name)
        with tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory()) as made, ExitStack() as stack:
            top, tree = Path(made), Path(made, "tree")
            tree.mkdir()
            trees.make_sources(tree, rng)
            ours = stack.enter_context(Deployment.started(tree, top / "ours", _HOSTS))
            theirs = stack.enter_context(Rsync.serving(tree, top / "theirs", _HOSTS))
            ours.push(), theirs.push()
            yield _row(scenario, list(_saves(run, scenario, ours, theirs, tree, rng)))
            ours.check(tree)


def _saves(
    run: Run, scenario: _Scenario, ours: Deployment, theirs: Rsync, tree: Path, rng: random.Random
) -> Iterator[_Save]:
    with ExitStack() as stack:
        running: HostProcesses | None = None
        for turn in range(-_WARM, max(run.rounds, _LEAST_ROUNDS)):
            processes = stack.enter_context(ours.processes())
            if running is not None:
                running.stop()
            running = processes
            if not scenario.running:
                processes.stop()
            time.sleep(scenario.rest)
            changed = trees.change_line(tree, rng)
            started = time.perf_counter()
            mine = run.measure_once(lambda: ours.push(changed if scenario.watched else None))  # noqa: B023
            ours.open_everywhere()
            usable = time.perf_counter() - started
            time.sleep(_REST)
            other = run.measure_once(theirs.push)
            if turn >= 0:
                yield _Save(mine, usable, other)


def _row(scenario: _Scenario, saves: list[_Save]) -> Case:
    mine = tuple(save.mine.seconds for save in saves)
    columns = {
        "meshgate": Value("time", mine),
        "least": Value("time", (min(mine),)),
        "most": Value("time", (max(mine),)),
        "usable": Value("time", tuple(save.usable for save in saves)),
        "rsync": Value("time", tuple(save.other.seconds for save in saves)),
        "times": Value("times", tuple(save.other.seconds / save.mine.seconds for save in saves)),
        "cpu": Value("time", tuple(save.mine.cpu for save in saves)),
        "rsync_cpu": Value("time", tuple(save.other.cpu for save in saves)),
    }
    case = Case(scenario.name, columns, table="processes", note=f"{len(saves)} saves")
    case.checks += at_least("of rsync's speed", columns["times"].number, 5)
    case.checks += at_most("took", columns["meshgate"].number * 1e3, 150, unit=" ms")
    return case

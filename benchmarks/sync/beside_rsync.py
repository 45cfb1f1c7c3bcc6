"""Changes synced to 1, 8 and 32 hosts, by meshgate and rsync in turns."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Case, Check, Value, at_least, at_most
from benchmarks.run import Run
from benchmarks.sync import trees
from benchmarks.sync.deployment import Deployment
from benchmarks.sync.moved import Moved
from benchmarks.sync.rsync import Rsync
from meshgate_sync.relay.plan import CONTROL_FANOUT
from meshgate_sync.tree.tree import MAX_PIECE

HOSTS = (1, 8, 32)
_NEEDED = 14_000_000_000
_ANNOUNCEMENT = 4_000
_ROUND_TRIP = 0.05
_COLD = "200 MB, cold"
_Both = tuple[Moved, Moved]


@dataclass(frozen=True, slots=True)
class _Subject:
    """A tree and the changes to it. ``cold``: the tree is synced to hosts that have nothing of it."""

    make: trees.Change
    changes: tuple[tuple[str, trees.Change], ...]
    cold: bool = False
    heavy: bool = False  # every round takes hundreds of MB on each host


_SUBJECTS = (
    _Subject(
        trees.make_sources,
        (
            ("10,000 files unchanged", trees.change_nothing),
            ("one line changed", lambda tree, rng: trees.change_line(tree, rng) and None),
            ("one line, reported by the watcher", trees.change_line),
            ("500 of 10,000 files changed", trees.change_500),
        ),
    ),
    _Subject(trees.make_large, (("one byte in 100 MB", trees.change_byte),), heavy=True),
    _Subject(trees.make_cold, (), cold=True),
)


def directory() -> str | None:
    """The directory for trees and stores: in memory if there is enough, so that the disk is not measured."""
    memory = Path("/dev/shm")
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if memory.is_dir() and min(available, shutil.disk_usage(memory).free) > _NEEDED:
        return str(memory)
    return None


def changes_beside_rsync(run: Run) -> Iterator[Case]:
    if shutil.which("rsync") is None:
        run.report_problem(
            "rsync is not installed: there is nothing to measure the sync beside (apt-get install rsync)"
        )
        return
    for subject in _SUBJECTS:
        rows: dict[tuple[bool, str], list[Case]] = {}
        for hosts in HOSTS:
            for far, name, found in _measure_cold(run, hosts) if subject.cold else _measure(run, subject, hosts):
                rows.setdefault((far, name), []).append(_row(name, hosts, found, far=far))
        for _, cases in sorted(rows.items(), key=lambda row: row[0][0]):
            yield from cases


def _measure(run: Run, subject: _Subject, hosts: int) -> Iterator[tuple[bool, str, list[_Both]]]:
    """Each change, first without and then with network delay."""
    rng = random.Random(hosts)
    with _both_sides(subject.make, hosts, rng) as (tree, ours, theirs):
        ours.push(), theirs.push()
        for far in (False, True):
            if far:
                ours.move_away(_ROUND_TRIP)
                theirs.move_away(_ROUND_TRIP)
            for name, change in subject.changes:
                found = []
                for turn in range(*_turns(run, subject, hosts, far=far)):
                    both = _turn(run, ours, theirs, change(tree, rng), turn)
                    if turn >= 0:
                        found.append(both)
                yield far, name, found
        ours.check(tree)


def _measure_cold(run: Run, hosts: int) -> Iterator[tuple[bool, str, list[_Both]]]:
    """The first sync to empty hosts, and, except for 32 hosts, one of a different tree."""
    for far in (False, True):
        rng = random.Random(hosts)
        with _both_sides(trees.make_cold, hosts, rng) as (tree, ours, theirs):
            if far:
                ours.move_away(_ROUND_TRIP)
                theirs.move_away(_ROUND_TRIP)
            found = [_turn(run, ours, theirs, None, 0)]
            if hosts < 32:
                found.append(_turn(run, ours, theirs, trees.replace_all(tree, rng), 1))
            yield far, _COLD, found
            ours.check(tree)


@contextmanager
def _both_sides(make: trees.Change, hosts: int, rng: random.Random) -> Iterator[tuple[Path, Deployment, Rsync]]:
    with tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory()) as made, ExitStack() as stack:
        top, tree = Path(made), Path(made, "tree")
        tree.mkdir()
        make(tree, rng)
        ours = stack.enter_context(Deployment.started(tree, top / "ours", hosts))
        yield tree, ours, stack.enter_context(Rsync.serving(tree, top / "theirs", hosts))


def _turns(run: Run, subject: _Subject, hosts: int, *, far: bool) -> tuple[int, int]:
    """The range of turns; those below 0 are for warming up and do not count."""
    if hosts == 32:
        return (0 if far or subject.heavy else -1), 1
    rounds = run.rounds if hosts == 1 else max(2, run.rounds // 2)
    return (0, 2) if far else (-1, rounds)


def _turn(run: Run, ours: Deployment, theirs: Rsync, changed: Sequence[Path] | None, turn: int) -> _Both:
    """The first of the two loads the change into the page cache, so they alternate."""

    def mine() -> Moved:
        return ours.push(changed)

    if turn % 2:
        return run.measure_once(mine), run.measure_once(theirs.push)
    other = run.measure_once(theirs.push)
    return run.measure_once(mine), other


def _row(name: str, hosts: int, found: Sequence[_Both], *, far: bool) -> Case:
    columns = {
        "meshgate": Value("time", tuple(mine.seconds for mine, _ in found)),
        "rsync": Value("time", tuple(other.seconds for _, other in found)),
        "times": Value("times", tuple(other.seconds / mine.seconds for mine, other in found)),
        "laptop": Value("bytes", tuple(mine.laptop for mine, _ in found)),
        "rsync_laptop": Value("bytes", tuple(other.laptop for _, other in found)),
        "gateway": Value("bytes", tuple(mine.gateway for mine, _ in found)),
        "cpu": Value("time", tuple(mine.cpu for mine, _ in found)),
        "rsync_cpu": Value("time", tuple(other.cpu for _, other in found)),
    }
    case = Case(f"{name}, {hosts} host{'s' * (hosts > 1)}", columns, table="far sync" if far else "sync")
    if name.startswith("one line changed") and hosts == 8 and not far:
        case.checks += at_least("of rsync's speed", columns["times"].number, 5)
        case.checks += at_most("took", columns["meshgate"].number * 1e3, 150, unit=" ms")
    if name == "one byte in 100 MB":
        case.checks += _few_pieces("sent by the laptop", columns["laptop"].number, 1)
        case.checks += _few_pieces("sent by the gateway", columns["gateway"].number, min(hosts, CONTROL_FANOUT))
    if name == _COLD:
        times = columns["gateway"].number / 200_000_000
        case.checks += at_most("sent by the gateway", times, CONTROL_FANOUT, unit=" of its size")
    return case


def _few_pieces(what: str, size: float, most: int) -> list[Check]:
    met = size <= most * (MAX_PIECE + _ANNOUNCEMENT)
    return [Check(f"{size / 1000:,.0f} kB {what}", size, f"{most} piece{'s' * (most > 1)} of at most 262 kB", met)]

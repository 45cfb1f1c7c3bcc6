"""One change after the other brought to 1, 8 and 32 hosts, by meshgate and by rsync in turns."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Case, Check, Value, at_least, at_most
from benchmarks.run import Run
from benchmarks.sync import trees
from benchmarks.sync.deployment import Deployment
from benchmarks.sync.moved import Moved
from benchmarks.sync.rsync import Rsync
from meshgate_sync.plan import CONTROL_FANOUT
from meshgate_sync.tree import MAX_PIECE

__all__ = ["HOSTS", "changes_beside_rsync", "directory"]

HOSTS = (1, 8, 32)
_NEEDED = 12_000_000_000
_ANNOUNCEMENT = 4_000


@dataclass(frozen=True, slots=True)
class _Subject:
    """A tree and what is done to it. ``cold``: name of the row that brings it to hosts which have nothing of it."""

    make: trees.Change
    changes: tuple[tuple[str, trees.Change], ...]
    cold: str = ""
    heavy: bool = False  # every round takes hundreds of MB on each host


_SUBJECTS = (
    _Subject(
        trees.make_sources,
        (
            ("10,000 files unchanged", trees.change_nothing),
            ("one line changed", lambda tree, rng: trees.change_line(tree, rng) and None),
            ("one line, as the watcher tells it", trees.change_line),
            ("500 of 10,000 files changed", trees.change_500),
        ),
    ),
    _Subject(trees.make_large, (("one byte in 100 MB", trees.change_byte),), heavy=True),
    _Subject(trees.make_cold, (("200 MB, cold", trees.replace_all),), cold="200 MB, cold", heavy=True),
)


def directory() -> str | None:
    """Where trees and stores are made: in memory where there is enough, so that no disk is measured."""
    memory = Path("/dev/shm")
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if memory.is_dir() and min(available, shutil.disk_usage(memory).free) > _NEEDED:
        return str(memory)
    return None


def changes_beside_rsync(run: Run, round_trip: float) -> Iterator[Case]:
    if shutil.which("rsync") is None:
        run.trouble("rsync is not installed: there is nothing to measure the sync beside (apt-get install rsync)")
        return
    for subject in _SUBJECTS:
        rows: dict[str, list[Case]] = {}
        for hosts in HOSTS:
            for name, case in _measure(run, subject, hosts, round_trip):
                rows.setdefault(name, []).append(case)
        for cases in rows.values():
            yield from cases


def _measure(run: Run, subject: _Subject, hosts: int, round_trip: float) -> Iterator[tuple[str, Case]]:
    rng = random.Random(hosts)
    with tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory()) as made, ExitStack() as stack:
        top, tree = Path(made), Path(made, "tree")
        tree.mkdir()
        subject.make(tree, rng)
        ours = stack.enter_context(Deployment.started(tree, top / "ours", hosts, round_trip=round_trip))
        theirs = stack.enter_context(Rsync.serving(tree, top / "theirs", hosts, round_trip))
        first = ours.push(), theirs.push()
        for name, change in subject.changes:
            found = [first] if name == subject.cold else []
            for turn in range(*_turns(run, subject, hosts, far=bool(round_trip))):
                both = _turn(run, ours, theirs, change(tree, rng), turn)
                if turn >= 0:
                    found.append(both)
            yield name, _row(name, hosts, round_trip, found)
        ours.check(tree)


def _turns(run: Run, subject: _Subject, hosts: int, *, far: bool) -> tuple[int, int]:
    """From which turn to which; those below 0 warm up and do not count."""
    rounds = {1: run.rounds, 8: max(2, run.rounds // 2), 32: 2}[hosts]
    if far:
        rounds = min(rounds, 2)
    if subject.cold:
        return 0, 1 if hosts < 32 and not far else 0
    if subject.heavy and hosts == 32:
        return 0, 1
    return -1, rounds


def _turn(run: Run, ours: Deployment, theirs: Rsync, changed: Sequence[Path] | None, turn: int) -> tuple[Moved, Moved]:
    """Whichever goes first finds the change in the page cache for the other: they take turns."""

    def mine() -> Moved:
        return ours.push(changed)

    if turn % 2:
        return run.noted(mine), run.noted(theirs.push)
    other = run.noted(theirs.push)
    return run.noted(mine), other


def _row(name: str, hosts: int, round_trip: float, found: Sequence[tuple[Moved, Moved]]) -> Case:
    columns = {
        "meshgate": Value("s", tuple(mine.seconds for mine, _ in found)),
        "rsync": Value("s", tuple(other.seconds for _, other in found)),
        "times": Value("times", tuple(other.seconds / mine.seconds for mine, other in found)),
        "laptop": Value("bytes", tuple(mine.laptop for mine, _ in found)),
        "rsync_laptop": Value("bytes", tuple(other.laptop for _, other in found)),
        "gateway": Value("bytes", tuple(mine.gateway for mine, _ in found)),
        "cpu": Value("s", tuple(mine.cpu for mine, _ in found)),
        "rsync_cpu": Value("s", tuple(other.cpu for _, other in found)),
    }
    case = Case(f"{name}, {hosts} host{'s' * (hosts > 1)}", columns, table="far sync" if round_trip else "sync")
    if name.startswith("one line changed") and hosts == 8 and not round_trip:
        case.checks += at_least("of rsync's speed", columns["times"].number, 5)
        case.checks += at_most("took", columns["meshgate"].number * 1e3, 150, unit=" ms")
    if name == "one byte in 100 MB":
        case.checks += _few_pieces("left the laptop", columns["laptop"].number, 1)
        case.checks += _few_pieces("left the gateway", columns["gateway"].number, min(hosts, CONTROL_FANOUT))
    if name == "200 MB, cold":
        most = min(hosts, CONTROL_FANOUT)
        case.checks += at_most("left the gateway", columns["gateway"].number / 200_000_000, most, unit=" of its size")
    return case


def _few_pieces(what: str, size: float, most: int) -> list[Check]:
    met = size <= most * (MAX_PIECE + _ANNOUNCEMENT)
    return [Check(f"{size / 1000:,.0f} kB {what}", size, f"{most} piece{'s' * (most > 1)} of at most 262 kB", met)]

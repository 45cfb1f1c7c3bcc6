"""What mechanisms of the store and of reload save, each beside doing without it, in this process."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock

from benchmarks.results import Case, Value
from benchmarks.run import Run
from benchmarks.sync import trees
from benchmarks.sync.beside_rsync import directory
from meshgate_sync import reload as reloading
from meshgate_sync.store.store import Store
from meshgate_sync.tree.delta import diff, full_delta
from meshgate_sync.tree.scan import Scanner
from meshgate_sync.tree.tree import NOTHING, Directory, piece_digest

_MODULES = (10, 100, 1000)
_FUNCTION = (
    "def f{0}(x, y={0}):\n    if x > y:\n        return [x * {0} for _ in range(y)]\n    return {{'a': x, 'b': y}}\n"
)


class _NoActor:
    """Stands for the base of actor classes: nothing is derived from it."""


def mechanisms(run: Run) -> Iterator[Case]:
    for modules in _MODULES:
        with _Project(modules) as project:
            graph = [project.reload() for _ in range(run.rounds)]
            with mock.patch.object(reloading, "affected", _all_of):
                everything = [project.reload() for _ in range(run.rounds)]
        name = f"reload after a change to one of {modules:,} modules: import graph, or all modules"
        yield _case(name, graph, everything)
    yield from _store(run)


def _store(run: Run) -> Iterator[Case]:
    """The steps of the store between the last piece of a version and its acknowledgement, one line in 10,000 files."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory()) as made:
        tree, store = Path(made, "tree"), Store(str(Path(made, "home")))
        tree.mkdir()
        trees.make_sources(tree, rng)
        scanner = Scanner(tree)
        version = scanner.scan().tree
        _bring(store, version, None, tree.glob("*/*/*.py"))
        recorded: dict[bool, list[float]] = {True: [], False: []}
        snapshots: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * run.rounds):
            with_it = turn % 2 == 0
            while with_it and (steps := store.prepare_spare(version.digest)) is not None:
                list(steps)
            if not with_it:
                store.snapshots.remove_spares()
            changed = trees.change_line(tree, rng) or ()
            before, version = version, scanner.scan(changed).tree
            base = before.digest if with_it else NOTHING
            recorded[with_it].append(_seconds(lambda: store.records.add(version, base)))  # noqa: B023
            snapshots[with_it].append(_bring(store, version, before, changed))
        store.close()
    yield _case("record a version: as a delta, or in full", recorded[True], recorded[False])
    yield _case("make a snapshot: from a spare, or by linking objects", snapshots[True], snapshots[False])


def _bring(store: Store, version: Directory, before: Directory | None, changed: Iterable[Path]) -> float:
    fetch = store.prepare(diff(before, version) if before is not None else full_delta(version))
    pieces = {piece_digest(data): data for data in (path.read_bytes() for path in changed)}
    for digest in list(fetch.missing):
        store.add(digest, pieces[digest])
    seconds = _seconds(lambda: store.finish(version.digest, base=NOTHING))
    store.check(version.digest)
    return seconds


class _Project:
    """So many modules, each of which imports up to three of the twenty before it, and this process running them."""

    def __init__(self, modules: int) -> None:
        rng = random.Random(modules)
        self._names = [f"bench{modules}_{number}" for number in range(modules)]
        self._texts = []
        for number in range(modules):
            imported = sorted({rng.randrange(max(0, number - 20), number) for _ in range(3)} if number else ())
            lines = [f"from {self._names[other]} import f{other % 12} as g{other}\n" for other in imported]
            self._texts.append("".join([*lines, *map(_FUNCTION.format, range(12))]))

    def __enter__(self) -> _Project:
        self._made = tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory())
        self._versions = [self._write()]
        sys.path.insert(0, self._versions[0])
        for name in self._names:
            importlib.import_module(name)
        return self

    def reload(self) -> float:
        self._texts[-1] += f"CHANGED = {len(self._versions)}\n"
        path = self._write()
        gc.collect()
        seconds = _seconds(lambda: self._reload(path))
        self._versions.append(path)
        return seconds

    def _reload(self, path: str) -> None:
        plan = reloading.plan_reload(self._versions, path)
        sys.path[0] = path
        plan.execute(_NoActor)

    def _write(self) -> str:
        version = Path(tempfile.mkdtemp(dir=self._made.name))
        for name, text in zip(self._names, self._texts, strict=True):
            (version / f"{name}.py").write_text(text)
        return str(version)

    def __exit__(self, *_: object) -> None:
        del sys.path[0]
        for name in self._names:
            sys.modules.pop(name, None)
        self._made.cleanup()


def _all_of(modules: Mapping[str, ModuleType], changed: Iterable[str]) -> list[str]:
    return list(modules) if list(changed) else []


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _case(name: str, with_it: list[float], without: list[float]) -> Case:
    columns = {"with": Value("time", tuple(with_it)), "without": Value("time", tuple(without))}
    return Case(name, columns, table="mechanisms")

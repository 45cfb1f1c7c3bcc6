"""How many children a host should have: by fan-out of the control tree and by number of stripes.

Measured with 8, 16 and 32 real hosts on this machine, which its processors limit, and simulated with 1,024 hosts, which
their links limit. The defaults in ``meshgate_sync.relay.plan`` are based on this.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.results import Case, Value
from benchmarks.run import Run
from benchmarks.sync import trees
from benchmarks.sync.beside_rsync import directory
from benchmarks.sync.deployment import Deployment
from benchmarks.sync.moved import Moved
from benchmarks.sync.simulated import Outline, processes, simulate
from meshgate_sync.relay.plan import CONTROL_FANOUT, STRIPES

HOSTS = (8, 16, 32)
_SHAPES = ((2, 1), (4, 2), (8, 4), (16, 6), (32, 8))
_SIMULATED = 1024
_LINE = Outline("", 20_000, 1, hosts=_SIMULATED)
_LARGE = Outline("", 200_000_000, 100, hosts=_SIMULATED)
_VERSION = 40_000_000


def by_fanout(run: Run) -> Iterator[Case]:
    lines = {fanout: Case(_named("fan-out", fanout, CONTROL_FANOUT), table="fan-out") for fanout, _ in _SHAPES}
    large = {stripes: Case(_named("stripes", stripes, STRIPES), table="stripes") for _, stripes in _SHAPES}
    outlines = [replace(_LINE, fanout=fanout) for fanout, _ in _SHAPES]
    outlines += [replace(_LARGE, stripes=stripes) for _, stripes in _SHAPES]
    outlines += [replace(_LARGE, stripes=stripes, failing=0.01) for _, stripes in _SHAPES]
    with processes() as pool:
        found = list(pool.map(simulate, outlines))
    for outline, simulated in zip(outlines, found, strict=True):
        case = lines[outline.fanout] if outline.pieces == 1 else large[outline.stripes]
        case.columns["failing" if outline.failing else "simulated"] = Value("ms", (simulated.seconds * 1e3,))
        case.columns["simulated_gateway"] = Value("times", (simulated.gateway,))
    for hosts in HOSTS:
        for fanout, stripes in _SHAPES:
            if fanout <= hosts and (hosts < 32 or fanout > 2):
                line, version = _measure(run, hosts, {"fanout": fanout, "stripes": stripes})
                lines[fanout].columns[f"h{hosts}"] = Value("ms", tuple(moved.seconds * 1e3 for moved in line))
                large[stripes].columns[f"h{hosts}"] = Value("ms", tuple(moved.seconds * 1e3 for moved in version))
    yield from lines.values()
    yield from large.values()


def _named(what: str, number: int, default: int) -> str:
    return f"{what} {number}" + (" (the default)" if number == default else "")


def _measure(run: Run, hosts: int, shape: Mapping[str, int]) -> tuple[list[Moved], list[Moved]]:
    """One changed line, reported by the watcher, and a version of 40 MB that no host has any part of."""
    rng = random.Random(hosts)
    with tempfile.TemporaryDirectory(prefix="meshgate-bench-", dir=directory()) as made:
        top, tree = Path(made), Path(made, "tree")
        tree.mkdir()
        trees.make_sources(tree, rng, files=4500)
        with Deployment.started(tree, top / "ours", hosts, shape=shape) as ours:
            ours.push()
            lines = []
            for turn in range(-2, 10):
                changed = trees.change_line(tree, rng)
                moved = run.measure_once(lambda changed=changed: ours.push(changed))  # type: ignore[misc]
                if turn >= 0:
                    lines.append(moved)
            versions = []
            for number in range(1 + (hosts == 8)):
                (tree / f"large{number}.bin").write_bytes(rng.randbytes(_VERSION))
                versions.append(run.measure_once(ours.push))
        return lines, versions

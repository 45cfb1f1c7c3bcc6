"""The benchmark of the sync works; its gateway is built from the engine's parts."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.sync import trees
from benchmarks.sync.deployment import Deployment


def test_a_change_is_measured_with_and_without_latency(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    rng = random.Random(0)
    trees.make_sources(tree, rng, files=20)
    line = tree / "package0" / "part0" / "module7.py"
    with Deployment.started(tree, tmp_path / "ours", 2) as deployment:
        size = sum(path.stat().st_size for path in tree.rglob("*.py"))
        first = deployment.push()
        assert first.seconds > 0
        assert first.cpu >= 0
        assert 0 < first.laptop <= size + 10_000
        assert size <= first.gateway <= 2 * (size + 10_000)
        unchanged = deployment.push()
        assert (unchanged.laptop, unchanged.gateway) == (0, 0)
        deployment.move_away(0.02)
        line.write_text("changed = 1\n")
        far = deployment.push([line])
        assert far.seconds > 0.02
        assert 0 < far.laptop < 1000
        deployment.check(tree)

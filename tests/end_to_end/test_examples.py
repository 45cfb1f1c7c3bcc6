"""The live-code example runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_code_follows_live_on_one_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "live_code.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert printed["four processes run it"].strip() == "[0.1, 0.1, 0.1, 0.1]"
    assert printed["new processes run the new line"].strip() == "[0.02, 0.02]"
    assert printed["old processes still run their version"].strip() == "[0.1, 0.1, 0.1, 0.1]"
    assert printed["after reload(), they have reloaded"].strip() == "rates, model"
    assert printed["live objects with old code"].strip() == "model.Model"
    assert printed["a new actor in the same processes"].strip() == "[0.003, 0.003, 0.003, 0.003]"
    assert "2/2 hosts in" in done.stderr

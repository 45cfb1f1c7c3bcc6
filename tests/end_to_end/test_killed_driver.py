"""A driver is killed again and again: no call is lost or run twice, and no line is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.any_release

KILLS = 20


@pytest.mark.timeout(600)
def test_a_driver_that_is_killed_at_random_points_loses_nothing() -> None:
    command = [sys.executable, "-m", "tests.end_to_end.killed_driver", "--kills", str(KILLS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["kills"] == KILLS
    assert outcome["calls"] > 0

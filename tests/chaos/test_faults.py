"""Faults act on the processes that they name, and their cost is measured. Real processes."""

from __future__ import annotations

import random

import pytest

import meshgate
from tests.chaos.faults import FATAL, SURVIVABLE
from tests.chaos.world import world

pytestmark = pytest.mark.timeout(300)


def test_a_session_survives_faults_and_its_calls_are_counted() -> None:
    with world() as here:
        assert [len(here.part(part)) for part in ("supervisor", "server", "host", "driver")] == [1, 1, 2, 1]
        assert here.part("engine")
        assert here.driver.wait_progress(120) is not None
        for name in ("5 to 30 cuts in a row", "connection cut inside a message", "server killed"):
            SURVIVABLE[name](here, random.Random(1))
            assert here.driver.wait_progress(120) is not None, name
        result = here.driver.end()
    assert result["calls"] > 10
    assert (result["lost"], result["doubled"], result["disordered"], result["problems"]) == (0, 0, 0, [])


def test_a_killed_engine_is_reported_by_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", lambda failure: None)
    outcome = FATAL["engine killed"].inject()
    assert (outcome.unanswered, outcome.wrong, outcome.left_behind) == (0, 0, 0)

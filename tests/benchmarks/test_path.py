"""How many files and functions one call passes through. It takes seconds: it needs a session with an engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.path import Step, totals
from tests.programs import ROOT

MOST_FILES, MOST_FUNCTIONS = 24, 88  # from call() to the settled future; lower them with each hop that goes

PROGRAM = """
import dataclasses, json
from benchmarks.path import measure
for step in measure():
    print("step", json.dumps(dataclasses.asdict(step)))
"""


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.removeprefix("step ") for line in done.stdout.splitlines() if line.startswith("step ")]
    return [Step(**json.loads(line)) for line in lines]


def test_the_path_leads_from_the_proxy_through_the_engine_to_the_future(steps: list[Step]) -> None:
    assert steps[0].function == "EndpointProxy.call"
    order = [(step.process, step.file, step.function) for step in steps]
    frame = order.index(("driver", "meshgate_wire/session.py", "Session.send"))
    engine = order.index(("engine", "meshgate_wire/session.py", "Session.receive_data"))
    settled = order.index(("driver", "meshgate/session/futures.py", "FutureProxy.settle"))
    assert 0 < frame < engine < settled


def test_what_is_entered_once_by_a_call_is_counted_once(steps: list[Step]) -> None:
    once = {step.function: step.times for step in steps}
    assert once["EndpointProxy.call"] == once["FutureProxy.settle"] == 1
    assert len(set(steps)) == len(steps)


def test_a_call_passes_through_no_more_files_and_functions_than_before(steps: list[Step]) -> None:
    files, functions = totals(steps, "call")
    remedy = "`python -m benchmarks.path` lists them. A function that only forwards belongs into its only caller"
    assert files <= MOST_FILES, f"{files} files: {remedy}"
    assert functions <= MOST_FUNCTIONS, f"{functions} functions: {remedy}"

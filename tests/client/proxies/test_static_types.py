"""Type checkers know what the endpoints of a spawned actor take and return."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from typing_extensions import assert_type

import meshgate as kt


class Trainer(kt.Actor):
    @kt.endpoint
    def step(self, batch: int, *, scale: float = 1.0) -> str:
        return ""

    @kt.endpoint
    async def asynchronous(self, batch: int) -> float:
        return 1.0

    @kt.endpoint(instrument=False)
    def with_options(self) -> int:
        return 1

    @kt.endpoint(explicit_response_port=True)
    def with_port(self, port: kt.Port[bytes], batch: int) -> None: ...


def program(procs: kt.ProcMeshProxy) -> None:
    trainers = procs.spawn("trainers", Trainer)
    assert_type(trainers, Trainer)
    assert_type(trainers.slice(hosts=0), Trainer)
    assert_type(trainers.initialized, kt.FutureProxy[None])
    assert_type(trainers.stop(), kt.FutureProxy[None])
    assert_type(trainers.step.call(1, scale=2.0), kt.FutureProxy[kt.ValueMesh[str]])
    assert_type(trainers.asynchronous.call_one(1), kt.FutureProxy[float])
    assert_type(trainers.with_options.choose(), kt.FutureProxy[int])
    assert_type(trainers.with_port.call_one(3), kt.FutureProxy[bytes])
    trainers.step.call("text")  # type: ignore[arg-type]
    trainers.step.call(1, size=2)  # type: ignore[call-arg]
"""


@pytest.mark.timeout(300)  # mypy reads the whole package, without a cache
def test_the_types_of_calls_follow_from_the_actor_class(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(path)]
    done = subprocess.run(mypy, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

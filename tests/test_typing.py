"""A type checker finds mistakes in programs that use meshgate, and knows what calls return."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT

PROGRAM = """
from meshgate import Actor, Channel, Port, ProcessJob, endpoint


class Trainer(Actor):
    def __init__(self, rate: float, steps: int = 1) -> None:
        self.rate = rate

    @endpoint
    def step(self, batch: int) -> float:
        return self.rate * batch

    @endpoint
    async def name(self) -> str:
        return "trainer"

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[bytes], size: int) -> None:
        port.send(b"x" * size)


job = ProcessJob({"workers": 2})
hosts = job.state().workers
procs = hosts.spawn_procs(per_host={"gpus": 2})
trainers = procs.spawn("trainers", Trainer, 0.1, steps=2)
"""


def check(line: str, directory: Path) -> str:
    """What mypy says of the program with ``line`` after it."""
    (directory / "program.py").write_text(f"{PROGRAM}{line}\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    sources = ("client", "gateway", "kubernetes_jobs", "processes", "slurm_jobs", "sync", "wire")
    checked = subprocess.run(
        [*command, f"--cache-dir={ROOT / '.mypy_cache' / 'typing'}", "program.py"],
        env={**os.environ, "MYPYPATH": os.pathsep.join(str(ROOT / name) for name in sources)},
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return checked.stdout


@pytest.mark.timeout(300)
def test_results_have_types(tmp_path: Path) -> None:
    shown = {
        "trainers": "program.Trainer",
        "trainers.step.call(3).get()": "meshgate.shapes.value_mesh.ValueMesh[float]",
        "trainers.step.call_one(3).get()": "float",
        "trainers.step.choose(3).get()": "float",
        "trainers.name.call_one().get()": "str",
        "trainers.later.call_one(3).get()": "bytes",
        "next(trainers.step.stream(3)).get()": "float",
        "Channel[int].open()": "tuple[meshgate.proxies.ports.Port[int], meshgate.proxies.ports.PortReceiver[int]]",
        "Channel[int].open()[1].recv().get()": "int",
        "Channel.open()[1].recv().get()": "Any",
        "hosts.spawn('others', Trainer, rate=0.2)": "program.Trainer",
    }
    printed = check("\n".join(f"reveal_type({expression})" for expression in shown), tmp_path)
    assert re.findall(r'Revealed type is "(.*)"', printed) == list(shown.values())
    assert "error" not in printed


@pytest.mark.timeout(300)
def test_mistakes_are_found(tmp_path: Path) -> None:
    mistakes = {
        'trainers.step.call("x")': 'Argument 1 to "call" of "Endpoint" has incompatible type "str"',
        "trainers.step.call()": 'Missing positional argument "batch"',
        "trainers.stepp.call(3)": '"Trainer" has no attribute "stepp"',
        'trainers.later.call("x")': 'Argument 1 to "call" of "Endpoint" has incompatible type "str"',
        'Channel[int].open()[0].send("x")': 'Argument 1 to "send" of "Port" has incompatible type "str"',
        'procs.spawn("t", Trainer, "x")': 'Argument 3 to "spawn" of "ProcMeshProxy" has incompatible type "str"',
        'procs.spawn("t", Trainer)': 'Missing positional argument "rate"',
        'hosts.spawn("t", Trainer, 0.1, step=3)': 'Unexpected keyword argument "step"',
    }
    printed = check("\n".join(mistakes), tmp_path)
    assert [mistake for mistake in mistakes.values() if mistake not in printed] == []
    assert f"Found {len(mistakes)} errors" in printed

"""A type checker finds mistakes in programs that use meshgate, and knows what calls return."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, Block, python_blocks
from tests.language_server import language_server
from tests.programs import ROOT
from tests.test_structure import SOURCE_ROOTS

PROGRAM = """
from meshgate import Actor, Channel, Port, ProcessJob, concurrent_endpoint, endpoint


class Trainer(Actor):
    def __init__(self, rate: float, steps: int = 1) -> None:
        self.rate = rate

    @endpoint
    def step(self, batch: int) -> float:
        return self.rate * batch

    @endpoint
    async def name(self) -> str:
        return "trainer"

    @concurrent_endpoint
    async def wait(self, seconds: float) -> bytes:
        return b""

    @concurrent_endpoint(instrument=False)
    async def wait_quietly(self) -> int:
        return 1

    @concurrent_endpoint(explicit_response_port=True)
    async def wait_for(self, port: Port[str], seconds: float) -> None:
        port.send("done")

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[bytes], size: int) -> None:
        port.send(b"x" * size)


job = ProcessJob({"workers": 2})
hosts = job.state().workers
procs = hosts.spawn_procs(per_host={"gpus": 2})
trainers = procs.spawn("trainers", Trainer, 0.1, steps=2)
"""


SHOWN = {
    "trainers": "program.Trainer",
    "trainers.step.call(3).get()": "meshgate.shapes.value_mesh.ValueMesh[float]",
    "trainers.step.call_one(3).get()": "float",
    "trainers.step.choose(3).get()": "float",
    "trainers.step.keep(3).get()": "meshgate.shapes.value_mesh.ValueMesh[float]",
    "trainers.step.call(trainers.step.keep(3)).get()": "meshgate.shapes.value_mesh.ValueMesh[float]",
    "trainers.name.call_one().get()": "str",
    "trainers.wait.call(1.0).get()": "meshgate.shapes.value_mesh.ValueMesh[bytes]",
    "trainers.wait_quietly.call_one().get()": "int",
    "trainers.wait_for.call_one(1.0).get()": "str",
    "trainers.later.call_one(3).get()": "bytes",
    "next(trainers.step.stream(3)).get()": "float",
    "Channel[int].open()": "tuple[meshgate.proxies.ports.Port[int], meshgate.proxies.ports.PortReceiver[int]]",
    "Channel[int].open()[1].recv().get()": "int",
    "Channel.open()[1].recv().get()": "Any",
    "hosts.spawn('others', Trainer, rate=0.2)": "program.Trainer",
}
SOURCES = [str(ROOT / name) for name in SOURCE_ROOTS]
MISTAKES = {
    'trainers.step.call("x")': 'Argument 1 to "call" of "Endpoint" has incompatible type "str"',
    "trainers.step.call()": 'Missing positional argument "batch"',
    'trainers.wait.call("x")': 'Argument 1 to "call" of "Endpoint" has incompatible type "str"',
    "trainers.stepp.call(3)": '"Trainer" has no attribute "stepp"',
    "trainers.step.call_one(3) + 1": 'Unsupported operand types for + ("FutureProxy[float]" and "int")',
    "trainers.step.call(3).get().mean()": '"ValueMesh[float]" has no attribute "mean"',
    'trainers.later.call("x")': 'Argument 1 to "call" of "Endpoint" has incompatible type "str"',
    'Channel[int].open()[0].send("x")': 'Argument 1 to "send" of "Port" has incompatible type "str"',
    'procs.spawn("t", Trainer, "x")': 'Argument 3 to "spawn" of "ProcMeshProxy" has incompatible type "str"',
    'procs.spawn("t", Trainer)': 'Missing positional argument "rate"',
    'hosts.spawn("t", Trainer, 0.1, step=3)': 'Unexpected keyword argument "step"',
    "ProcessJob({}, hosts=2)": 'Unexpected keyword argument "hosts" for "ProcessJob"',
}
# What --strict asks of a module. As an option it would ask it of the documents too.
STRICT = """\
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-decorators
# mypy: warn-return-any, strict-equality, extra-checks, no-implicit-reexport
"""

# With mistakes that must be found: a needless ``type: ignore`` is an error.
ASSERTED = """\
# mypy: warn-unused-ignores, disallow-untyped-defs
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

IMPORTED = "import meshgate as kt\nfrom meshgate import Actor, Compute, KubernetesJob, SlurmJob, endpoint\n"
TRAINER = "class Trainer(Actor):\n    @endpoint\n    def step(self, number: int) -> float:\n        return 0.0\n"
DEFINED = {
    "code": TRAINER,
    "images": "job: KubernetesJob\n",
    "kept_values": (
        "from typing import Any\n"
        "class Trainer(Actor):\n    @endpoint\n    def evaluate(self, data: list[int], rate: float) -> float:\n"
        "        return rate\n    @endpoint\n    async def open_queue(self) -> kt.Port[object]:\n"
        "        return kt.Channel[object].open()[0]\n"
        "samples: kt.KeptMesh[list[float]]\n"
        "procs: kt.ProcMeshProxy\ndataset: list[int]\ntrainers = procs.spawn('trainers', Trainer)\n"
    ),
    "jobs": "job: KubernetesJob\n",
    "lost_hosts": (
        "from typing import NamedTuple\nimport meshgate\nfrom meshgate.errors import SupervisionError\n"
        "class Checkpoint(NamedTuple):\n    step: int\n"
        "class Trainer(Actor):\n    def __init__(self, last: Checkpoint) -> None: ...\n"
        "def train_to_next_checkpoint(trainers: Trainer, last: Checkpoint) -> Checkpoint:\n    return last\n"
        "job: KubernetesJob\nhosts: kt.HostMeshProxy\ntrainers: Trainer\nsteps: int\nlast = Checkpoint(0)\n"
    ),
    "sessions": (
        f"{TRAINER}def save(step: int, losses: object) -> None: ...\nfirst: int\nsession: kt.AttachedSession | None\n"
        "procs: kt.ProcMeshProxy\ntrainers = procs.spawn('trainers', Trainer)\n"
    ),
    "spmd": f"{TRAINER}hosts: kt.HostMeshProxy\n",
    "train_from_a_laptop": f"{TRAINER}compute = Compute(gpus=8)\n",
}
"""What the text around the fragments of a page says that they use, beside the imports."""


def completed(block: Block) -> str:
    """``block``, with the imports and names that a fragment uses."""
    if block.is_complete:
        return block.code
    code = block.code.rstrip()
    return IMPORTED + DEFINED.get(block.document.stem, "") + code + (" ..." if code.endswith(":") else "") + "\n"


@pytest.mark.timeout(600)  # mypy reads all sources: 15 s of processor time, so it runs once
def test_mypy_knows_the_types_of_results_finds_mistakes_and_accepts_the_documents(tmp_path: Path) -> None:
    for block in [block for document in DOCUMENTS for block in python_blocks(document)]:
        if not block.code.startswith("import ray\n"):  # its decorators have no static types
            (tmp_path / f"{block.name}.py").write_text(completed(block))
    revealed = "\n".join(f"reveal_type({expression})" for expression in SHOWN)
    (tmp_path / "program.py").write_text(f"{STRICT}{PROGRAM}{revealed}\n")
    mistakes = "\n".join(MISTAKES)
    (tmp_path / "mistaken.py").write_text(f"{STRICT}{PROGRAM}{mistakes}\n")
    (tmp_path / "asserted.py").write_text(f"{STRICT}{ASSERTED}")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--check-untyped-defs"]
    checked = subprocess.run(
        [*command, "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'typing'}", str(tmp_path)],
        env={**os.environ, "MYPYPATH": os.pathsep.join(SOURCES)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    printed = checked.stdout.splitlines()
    assert re.findall(r'Revealed type is "(.*)"', checked.stdout) == list(SHOWN.values())
    errors = [line for line in printed if ": error: " in line]
    assert [line for line in errors if not line.startswith("mistaken.py:")] == []
    assert [mistake for mistake in MISTAKES.values() if not any(mistake in line for line in errors)] == []
    assert len(errors) == len(MISTAKES), checked.stdout


@pytest.mark.timeout(600)
def test_pyright_knows_the_same_types_and_finds_the_same_mistakes(tmp_path: Path) -> None:
    mistakes = {
        'trainers.step.call("x")': 'parameter "batch" of type "int"',
        "trainers.step.call()": 'Argument missing for parameter "batch"',
        "trainers.stepp.call(3)": 'Cannot access attribute "stepp" for class "Trainer"',
        'trainers.wait.call("x")': 'parameter "seconds" of type "float"',
        'trainers.later.call("x")': 'parameter "size" of type "int"',
        'Channel[int].open()[0].send("x")': 'parameter "obj" of type "int"',
        'procs.spawn("t", Trainer, "x")': 'parameter "rate" of type "float"',
        'procs.spawn("t", Trainer)': 'Argument missing for parameter "rate"',
        'hosts.spawn("t", Trainer, 0.1, step=3)': 'No parameter named "step"',
        "trainers.step.call_one(3) + 1": 'Operator "+" not supported',
        "ProcessJob({}, hosts=2)": 'No parameter named "hosts"',
    }
    lines = [*(f"reveal_type({expression})" for expression in SHOWN), *mistakes]
    (tmp_path / "program.py").write_text(PROGRAM + "\n".join(lines))
    settings = {"include": ["program.py"], "extraPaths": SOURCES, "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = [""] * len(lines)  # of each line after the program
    first = PROGRAM.count("\n")
    for found in json.loads(checked.stdout)["generalDiagnostics"]:
        said[found["range"]["start"]["line"] - first] += found["message"]
    types = [re.sub(r"(\w+\.)+", "", shown) for shown in SHOWN.values()]
    assert [each.partition('" is "')[2].removesuffix('"') for each in said[: len(types)]] == types
    of_mistakes = zip(mistakes.items(), said[len(types) :], strict=True)
    assert [(line, each) for (line, mistake), each in of_mistakes if mistake not in each] == []


@pytest.mark.timeout(600)
def test_editors_show_an_endpoints_signature_and_docstring(tmp_path: Path) -> None:
    documented = PROGRAM.replace(
        "def step(self, batch: int) -> float:\n",
        'def step(self, batch: int) -> float:\n        """Learns a batch."""\n',
    )
    program = tmp_path / "program.py"
    program.write_text(f"{documented}trainers.step.call(1).get()\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": SOURCES}))
    with language_server(tmp_path) as server:
        server.open(program)
        shown = server.hover(program, "trainers.step")
        assert "step: Endpoint[(batch: int), float]" in shown
        assert "Learns a batch." in shown
        assert "def call(batch: int) -> FutureProxy[ValueMesh[float]]" in server.hover(program, "trainers.step.call")
        assert "class Trainer(\n    rate: float,\n    steps: int = 1\n)" in server.hover(program, "Trainer")

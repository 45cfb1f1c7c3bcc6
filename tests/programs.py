"""Runs programs as a user does, each in its own process and directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 250.0  # seconds
# The end of a program that may have a Monarch of its own: before Python 3.14, a thread of Monarch's that asks for the
# GIL while the interpreter shuts down aborts the process.
LEAVE_MONARCH = """
import os, sys
sys.stdout.flush()
if sys.modules.get("monarch._rust_bindings"):
    sys.stderr.flush()
    os._exit(0)
"""

# A script for torchrun: DistributedDataParallel with gloo. Ranks start from different weights and see different data.
DDP = """
import os, sys
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
if "--fail" in sys.argv and rank == 2:
    raise ValueError("bad batch")
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, weights)
assert all(torch.equal(weights, other) for other in gathered)
ranks, host = dist.get_world_size(), os.uname().nodename
print(f"rank {rank} of {ranks} on {host} has the weights {weights.tolist()}", flush=True)
dist.destroy_process_group()
"""


@contextmanager
def child_process(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the block. One that outlived a failed test would make later tests fail, too."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run_program(program: str | Path, directory: Path, *, strict: bool = True, timeout: float = TIMEOUT) -> str:
    """Runs a program, given as source or as a file, and returns its stdout. Fails on an exit code.

    ``strict``: also on a warning and on whatever is written to stderr.
    """
    if isinstance(program, str):
        (directory / "program.py").write_text(program)
        program = directory / "program.py"
    command = [sys.executable, *(("-W", "error") if strict else ()), str(program)]
    environment = {**os.environ, "MESHGATE_PROGRESS": "off"}  # which a busy machine would decide
    ran = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stderr == "" or not strict, ran.stderr
    return ran.stdout


def check_equal_weights(printed: str, ranks: int) -> list[str]:
    """Asserts that every rank of ``DDP`` has printed the same weights. Returns their hosts, sorted."""
    found = re.findall(rf"rank (\d+) of {ranks} on (\S+) has the weights (\[.*\])", printed)
    assert sorted(int(rank) for rank, _, _ in found) == list(range(ranks)), printed
    assert len({weights for _, _, weights in found}) == 1
    return sorted(host for _, host, _ in found)


@contextmanager
def forked_child() -> Iterator[None]:
    """A forked child of this process that lives until the end of the block, with all that it has inherited."""
    ready, ended = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(ready[1], b".")
        os.close(ended[1])
        os.read(ended[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield
    finally:
        for descriptor in (*ready, *ended):
            os.close(descriptor)
        assert os.waitpid(pid, 0) == (pid, 0)

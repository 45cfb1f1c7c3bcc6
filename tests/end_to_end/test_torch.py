"""Real torch on the ranks of a job: process groups of scripts and of actors. Left out if torch is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import ProcessJob, SPMDFailed
from meshgate.spmd import serve

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

# DistributedDataParallel with gloo: ranks start from different weights and see different data.
DDP = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    if "--fail" in sys.argv and rank == 1 and step == 1:
        raise ValueError("bad batch")
weights = [parameter.tolist() for parameter in model.parameters()]
with open(f"weights-{rank}.json", "w") as file:
    json.dump([dist.get_world_size(), weights], file)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ddp.py").write_text(DDP.replace('f"weights', f'{str(tmp_path)!r} + f"/weights'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(600)
def test_ddp_ends_with_equal_weights_on_all_ranks(job: ProcessJob, project: Path) -> None:
    serve(["torchrun", "--nproc-per-node=2", "ddp.py"], job=job).run_spmd()
    results = [json.loads((project / f"weights-{rank}.json").read_text()) for rank in range(4)]
    assert all(result == results[0] for result in results)
    assert results[0][0] == 4


@pytest.mark.timeout(600)
def test_a_rank_that_fails_while_the_others_wait_for_it_is_the_one_reported(job: ProcessJob) -> None:
    with pytest.raises(SPMDFailed) as caught:
        serve(["torchrun", "--nproc-per-node=1", "ddp.py", "--fail"], job=job).run_spmd()
    assert (caught.value.rank, caught.value.exception) == (1, "ValueError: bad batch")


class Reducer(kt.Actor):
    @kt.endpoint
    def reduce(self) -> list[Any]:
        import torch
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        total = torch.tensor([torch.distributed.get_rank() + 1.0])
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return [torch.distributed.is_initialized(), float(total)]


@pytest.mark.timeout(600)
def test_process_groups_of_actors_need_no_further_step(procs: Any) -> None:
    procs.setup_torch()
    reducers = procs.spawn("reducers", Reducer)
    assert list(reducers.reduce.call().get().values()) == [[False, 10.0]] * 4
    one_each = procs.slice(gpus=1)
    one_each.setup_torch()
    assert list(one_each.spawn("slice", Reducer).reduce.call().get().values()) == [[False, 3.0]] * 2


class Maker(kt.Actor):
    rank: int

    def __init__(self) -> None:
        self.made: Any = None

    @kt.endpoint
    def make(self, rows: int) -> Any:
        import torch

        self.made = torch.full((rows, 3), float(self.rank))
        return self.made

    @kt.endpoint
    def total(self, tensor: Any) -> tuple[float, bool]:
        """The sum, and whether it is the tensor that was made here."""
        return float(tensor.sum()), tensor is self.made


@pytest.mark.timeout(600)
def test_tensors_stay_in_their_processes_and_pass_to_others(procs: Any) -> None:
    import torch

    makers, takers = (procs.slice(gpus=gpu).spawn(name, Maker) for gpu, name in enumerate(("makers", "takers")))
    made = makers.make.keep(2)
    info = made.info().get(1)
    assert (info.type, info.bytes, info.dtype, info.shape) == ("torch.Tensor", 24, "torch.float32", (2, 3))
    assert list(takers.total.call(made).get().values()) == [(0.0, False), (6.0, False)]
    assert list(makers.total.call(made).get().values()) == [(0.0, True), (6.0, True)]
    assert torch.equal(made.get().get(1), torch.ones(2, 3))
    put = takers.put(torch.arange(4.0))
    assert set(takers.total.call(put).get().values()) == {(6.0, False)}


def test_functions_of_distributed_tensors_are_refused_with_what_to_do_instead() -> None:
    program = """
        import torch
        from monarch import fetch_shard, inspect, remote
        from meshgate.actors.local_monarch import refuse_local_monarch
        from meshgate.errors import InvalidRequestError

        @remote
        def identity(x):
            return x

        refuse_local_monarch(lambda: True)
        for call in (identity, identity.call, fetch_shard, inspect):
            try:
                call(torch.ones(1))
            except InvalidRequestError as error:
                print(error)
    """
    code = textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("run torch in an actor") == 3
    assert done.stdout.count("run torch in actors") == 1

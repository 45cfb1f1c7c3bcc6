"""DistributedDataParallel with real torch on the nodes of a Slurm cluster. Left out if torch is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from meshgate import SlurmJob, SPMDFailed
from meshgate.spmd import serve
from tests.slurm.cluster import DISTURBED

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

DDP = """
import os, sys
import torch, torch.distributed as dist

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
weights = [parameter.detach() for parameter in model.parameters()]
for weight in weights:
    others = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weight)
    assert all(torch.equal(weight, other) for other in others)
with open(sys.argv[1], "a") as file:
    file.write(f"{rank} {dist.get_world_size()} {os.uname().nodename}\\n")
dist.destroy_process_group()
"""


@pytest.mark.timeout(900)
def test_ddp_ends_with_equal_weights_on_all_nodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    monkeypatch.chdir(tmp_path)
    done = tmp_path / "done"
    nodes = SlurmJob(
        {"workers": 3},
        job_name=name,
        exclusive=False,
        time_limit="10",
        log_dir=str(tmp_path / "logs"),
        sync_dirs=[str(tmp_path)],
        slurm_args=[f"--exclude={DISTURBED}"],
    )
    with serve(["torchrun", "--nproc-per-node=1", "ddp.py", str(done)], job=nodes) as job:
        job.run_spmd()
        found = sorted(line.split() for line in done.read_text().splitlines())
        assert [(rank, world) for rank, world, _ in found] == [("0", "3"), ("1", "3"), ("2", "3")]
        assert len({node for _, _, node in found}) == 3
        with pytest.raises(SPMDFailed, match=r"rank 2 on .* .*ValueError: bad batch"):
            serve(["torchrun", "ddp.py", str(done), "--fail"], job=nodes).run_spmd()

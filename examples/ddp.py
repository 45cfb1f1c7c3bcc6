"""DistributedDataParallel on any job: a script for torchrun, unchanged, on processes, pods or nodes.

    python examples/ddp.py                                    # two hosts of two ranks, on this machine
    python examples/ddp.py --kubernetes IMAGE --hosts 8       # pods with this image, which has torch
    python examples/ddp.py --slurm user@login --hosts 4       # nodes; --python is a Python there that has torch

It trains a small model with gloo, on CPUs, and checks that all ranks end with equal weights. On GPUs, the script has
"nccl" in place of "gloo", and its model and inputs on the GPU with the number LOCAL_RANK, and the job requests GPUs:
Compute(gpus=...) or SlurmJob(gpus_per_node=...).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate.spmd import serve

TRAIN = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # other data on each rank
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    inputs = torch.randn(64, 32)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, weights)
assert all(torch.equal(weights, other) for other in gathered)
print(f"{dist.get_world_size()} ranks have equal weights, with the sum {weights.sum():.6f}", flush=True)
dist.destroy_process_group()
"""


def make_job(arguments: argparse.Namespace, project: str) -> Any:
    if arguments.kubernetes:
        image = kt.Image("ddp").from_docker(arguments.kubernetes)
        compute = kt.Compute(cpu="100m", memory="1Gi", replicas=arguments.hosts, image=image)
        return kt.KubernetesJob(compute=compute, namespace=arguments.namespace, sync_dirs=[project])
    if arguments.slurm:
        login = None if arguments.slurm == "here" else arguments.slurm
        nodes = {"workers": arguments.hosts}
        return kt.SlurmJob(nodes, arguments.python, login=login, exclusive=False, mem="3G", sync_dirs=[project])
    return kt.ProcessJob({"workers": arguments.hosts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    parser.add_argument("--slurm", metavar="LOGIN", help="run on nodes; 'here' if this machine has Slurm's commands")
    parser.add_argument("--python", default="python", help="a Python on the nodes that has meshgate and torch")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-") as project:
        Path(project, "train.py").write_text(TRAIN)
        os.chdir(project)
        started = time.perf_counter()
        with make_job(arguments, project) as job:
            job.state().workers.initialized.get()
            print(f"{arguments.hosts} hosts after {time.perf_counter() - started:.1f} s")
            training = serve(["torchrun", f"--nproc-per-node={arguments.ranks}", "train.py"], job=job)
            started = time.perf_counter()
            training.run_spmd()
            print(f"trained in {time.perf_counter() - started:.1f} s")
        os.chdir("/")


if __name__ == "__main__":
    main()

"""Monarch's distributed tensors, in a submitted program: each process trains with a rate of its own.

    python examples/distributed_tensors.py                  # submits itself to a host on this machine
    meshgate submit JOB -- python distributed_tensors.py    # to a job that runs, such as one in a cluster

Each torch operation in the ``activate()`` block is a message to all processes, so a laptop cannot run it: the program
runs beside them instead, with Monarch's own hosts. Needs torch there and in the workers. On GPUs, ``tensor.reduce()``
and ``to_mesh()`` pass tensors between the processes with NCCL; on CPUs, each works on its own.
"""

from __future__ import annotations

import os
import sys

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt

STEPS = 20


def train() -> None:
    import monarch  # noqa: PLC0415 - only where the tensors are
    import torch  # noqa: PLC0415

    procs = kt.native_hosts("workers").spawn_procs(per_host={"gpus": 2})
    with procs.activate():
        rate = (procs.rank_tensor("gpus") + 1) * 0.2
        samples = torch.rand(64, 3)
        wanted = samples @ torch.tensor([1.0, 2.0, 3.0])
        weights = torch.zeros(3)
        for _ in range(STEPS):
            error = samples @ weights - wanted
            weights = weights - rate * (error @ samples) / 64
        loss = (samples @ weights - wanted).square().mean()
        for gpu in range(2):
            here = {"hosts": 0, "gpus": gpu}
            used, left = (monarch.fetch_shard(tensor, **here).result().item() for tensor in (rate, loss))
            print(f"rate {used:.1f}: loss {left:.4f} after {STEPS} steps", flush=True)
    procs.stop().get()
    sys.stdout.flush()
    os._exit(0)  # before Python 3.14, Monarch's threads may abort a program that ends in the usual way


def submit() -> None:
    with kt.ProcessJob({"workers": 1}) as job:
        run = job.submit(["python", __file__], name="tensors")
        for line in run.logs(follow=True):
            print(line, end="")
        sys.exit(run.wait())


if __name__ == "__main__":
    train() if "MESHGATE_RUN" in os.environ else submit()

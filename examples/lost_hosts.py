"""Training that goes on when a process, a pod or a node is lost, from the last checkpoint, or is about to be lost.

    python examples/lost_hosts.py                       # two hosts on this machine; a rank is killed at step 7
    python examples/lost_hosts.py --kubernetes IMAGE    # two pods with this image, on the cluster of KUBECONFIG

12 steps in pods take less than a second: ``--steps 100000`` leaves the time to delete one of them.

The loop waits until every host is up, spawns processes with the last checkpoint, and trains until one of them is lost,
or the cluster gives notice of it: then there is time for a checkpoint.
The model is a number and needs no torch, and the checkpoint is a value that the driver keeps. Real ranks write theirs
to shared storage, and the driver keeps its path. On GPUs, ``Compute(gpus=...)`` is new, and ``procs.stop()`` matters
more: it frees the GPUs of the ranks that are left, for the processes that are spawned next.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any, NamedTuple

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate import Actor, current_rank, endpoint
from meshgate.errors import SupervisionError

BACK_WITHIN = 600.0  # seconds in which a lost host is replaced


class Checkpoint(NamedTuple):
    step: int
    weight: float


class Trainer(Actor):
    """Each rank has a copy of the model, a weight that approaches 1."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.step, self.weight = checkpoint

    @endpoint
    async def train(self) -> float:
        self.weight += (1 - self.weight) / 4
        self.step += 1
        return 1 - self.weight

    @endpoint
    async def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.step, self.weight)

    @endpoint
    async def crash(self) -> None:
        if current_rank().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(hosts: Any, last: Checkpoint, steps: int, every: int, lose_at: int) -> Checkpoint:
    """Trains until ``steps``, or until a process is lost or about to be. Returns the last checkpoint."""
    procs = hosts.spawn_procs(name="trainers")
    try:
        trainers = procs.spawn("trainers", Trainer, last)
        for step in range(last.step + 1, steps + 1):
            if step == lose_at:
                trainers.crash.broadcast()
            loss = max(trainers.train.call().get().values())
            print(f"step {step}: loss {loss:.4f}", flush=True)
            if step % every == 0 or step == steps or hosts.ending:
                last = trainers.slice(hosts=0).checkpoint.call_one().get()
            if hosts.ending:
                print(f"going on from step {last.step}: {hosts.ending[0].name}: {hosts.ending[0].reason}", flush=True)
                break
    except SupervisionError as lost:  # its text names the ranks, their hosts and the reason
        print(f"going on from step {last.step}: {lost}", flush=True)
    procs.stop().get()  # if one was lost, the others would keep their GPUs
    return last


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("trainer").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, name="lost-hosts", namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    arguments = parser.parse_args()
    # As with Monarch, a lost process otherwise ends the program. The call that it interrupted raises SupervisionError.
    kt.unhandled_fault_hook = lambda failure: None
    with make_job(arguments) as job:
        last, lose_at = Checkpoint(0, 0.0), 0 if arguments.kubernetes else 7
        while last.step < arguments.steps:
            hosts = job.state().workers
            hosts.initialized.get(timeout=BACK_WITHIN)  # a pod that replaces a lost one takes its place in the mesh
            if len(hosts.ending) == len(hosts):  # a Slurm job ends, and nothing replaces its hosts
                break
            last = train(hosts, last, arguments.steps, arguments.every, lose_at)
            lose_at = 0  # once
        print(f"trained to step {last.step}: weight {last.weight:.4f}")


if __name__ == "__main__":
    main()

"""A parameter sweep: each process takes the next trial when it has finished one; a trial that fails ends only itself.

python examples/sweep.py                             # two hosts of two processes on this machine
python examples/sweep.py --kubernetes IMAGE          # pods with this image, on the cluster of KUBECONFIG

On GPUs, ``Compute(gpus=2)`` requests two for each pod, and each process trains on the one with the number
``current_rank()["gpus"]``, so as many trials run at a time as there are GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate import Actor, ActorError, endpoint

RATES, MOMENTA = (0.01, 0.05, 0.2, 1.2), (0.0, 0.5, 0.9)


class Trial(Actor):
    @endpoint
    def run(self, rate: float, momentum: float) -> float:
        """Minimizes (x - 3)² from 0; returns what is left. A real trial would train a model."""
        x = velocity = 0.0
        for _ in range(50):
            velocity = momentum * velocity - rate * 2 * (x - 3)
            x += velocity
            if abs(x) > 1e3:
                raise ArithmeticError(f"diverged with rate {rate}")
        return (x - 3) ** 2


async def sweep(workers: Any) -> dict[tuple[float, float], float]:
    trials: Iterator[tuple[float, float]] = itertools.product(RATES, MOMENTA)
    found = {}

    async def work(worker: Any) -> None:
        for rate, momentum in trials:  # all workers take from the same iterator
            try:
                found[rate, momentum] = await worker.run.call_one(rate, momentum)
            except ActorError as error:
                print(f"rate {rate}, momentum {momentum}: {error.__cause__}")

    line = workers.flatten("worker")
    await asyncio.gather(*[work(line.slice(worker=index)) for index in range(len(line))])
    return found


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("sweep").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    arguments = parser.parse_args()
    with make_job(arguments) as job:
        procs = job.state().workers.spawn_procs(per_host={"gpus": 2})
        found = asyncio.run(sweep(procs.spawn("trials", Trial)))
    for (rate, momentum), loss in sorted(found.items(), key=lambda item: item[1]):
        print(f"rate {rate:<5} momentum {momentum:<4} loss {loss:.2e}")


if __name__ == "__main__":
    main()

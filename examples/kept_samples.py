"""A loop of generators and trainers whose samples never visit the laptop.

    python examples/kept_samples.py                       # two hosts on this machine
    python examples/kept_samples.py --kubernetes IMAGE    # two pods with this image, on the cluster of KUBECONFIG

As in GRPO, each iteration generates a group of samples for each prompt, scores them against the mean of their group,
and moves the weight towards those that did better. The samples stay in the generators' processes; each trainer takes
those of its own rank from there, and the laptop gets one number for each. The next samples are generated while the
trainers work. The model is a number and needs no torch. On GPUs, the actors have models, ``Compute(gpus=...)`` and
``spawn_procs({"gpus": ...})`` say how many, and samples that are tensors are moved to the CPU before they are returned.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate import Actor, current_rank, endpoint

BEST = 3.0  # the answer that is rewarded most
SPREAD = 0.5


class Generator(Actor):
    def __init__(self, group: int) -> None:
        self.group, self.random = group, random.Random(current_rank().rank)

    @endpoint
    def generate(self, weight: float, prompts: int) -> list[list[float]]:
        """A group of samples for each prompt."""
        return [[self.random.gauss(weight, SPREAD) for _ in range(self.group)] for _ in range(prompts)]


class Trainer(Actor):
    @endpoint
    def step(self, samples: list[list[float]]) -> float:
        """How the weight should change, by this rank's samples."""
        change = 0.0
        for group in samples:
            rewards = [-abs(BEST - sample) for sample in group]
            mean, center = sum(rewards) / len(rewards), sum(group) / len(group)
            change += sum(
                (reward - mean) * (sample - center) for reward, sample in zip(rewards, group, strict=True)
            ) / len(group)
        return change / len(samples)


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("samples").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, name="kept-samples", namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=200, help="of each rank, in a step")
    arguments = parser.parse_args()
    with make_job(arguments) as job:
        hosts = job.state().workers
        generators = hosts.spawn_procs({"gpus": 2}, name="generators").spawn("generators", Generator, 8)
        trainers = hosts.spawn_procs({"gpus": 2}, name="trainers").spawn("trainers", Trainer)
        weight = 0.0
        samples = generators.generate.keep(weight, arguments.prompts)
        for step in range(1, arguments.steps + 1):
            changes = trainers.step.call(samples)  # by rank, from process to process
            following = generators.generate.keep(weight, arguments.prompts)  # meanwhile
            weight += sum(changes.get().values()) / len(trainers)
            if step % 5 == 0:
                kept = sum(info.bytes for info in samples.info().values())
                print(f"step {step}: weight {weight:.2f}, {kept / 1e3:.0f} kB of samples stayed", flush=True)
            samples = following  # the earlier ones are dropped
        first = samples.slice(hosts=0, gpus=0).get().item()
        print(f"one group, fetched to look at: {[round(sample, 1) for sample in first[0]]}")


if __name__ == "__main__":
    main()

"""A GRPO loop: generators sample answers, a judge rewards them, a trainer improves the policy and sends it back.

    python examples/grpo.py                             # three hosts on this machine
    python examples/grpo.py --kubernetes IMAGE          # pods with this image, on the cluster of KUBECONFIG
    python examples/grpo.py --submit                    # beside the job's gateway, while the laptop is closed

The driver may end at any time: the session is detached, so the policy stays in the actors. Run the program again in the
same directory, and it continues with the next step. The model is a table and needs no torch; the structure is that of a
real loop: generators work on the next step while the trainer learns from the last one. Samples stay in the generators
until the trainer takes them, and weights pass from actor to actor: the laptop sees neither. On GPUs, the actors hold
models and optimizers in place of tables, and ``Compute(gpus=...)`` and ``per_host={"gpus": ...}`` say how many.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate import Actor, current_rank, current_size, endpoint

PROMPTS = [(a, b) for a in range(5) for b in range(5)]  # "a + b =", answered by a digit
GROUP, CLIP, RATE = 16, 0.2, 2.0  # answers to each prompt; limit of a step; learning rate


@dataclass
class Sample:
    prompt: tuple[int, int]
    answer: int
    probability: float  # under the policy that generated it
    reward: float = 0.0


def probabilities(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


class Judge(Actor):
    @endpoint
    async def score(self, samples: list[Sample]) -> list[float]:
        return [float(sample.answer == sum(sample.prompt)) for sample in samples]


class Generator(Actor):
    """Each rank answers its share of the prompts with the newest policy that it has."""

    def __init__(self, judges: Judge) -> None:
        self.judges = judges
        self.random = random.Random(current_rank().rank)
        self.logits = {prompt: [0.0] * 10 for prompt in PROMPTS}

    @endpoint
    async def load(self, logits: dict[tuple[int, int], list[float]]) -> None:
        self.logits = logits

    @endpoint
    async def generate(self) -> list[Sample]:
        samples = []
        for prompt in PROMPTS[current_rank().rank :: math.prod(current_size().values())]:
            policy = probabilities(self.logits[prompt])
            for answer in self.random.choices(range(10), policy, k=GROUP):
                samples.append(Sample(prompt, answer, policy[answer]))
        for sample, reward in zip(samples, await self.judges.score.choose(samples), strict=True):
            sample.reward = reward
        return samples


class Trainer(Actor):
    def __init__(self, generators: Generator) -> None:
        self.generators = generators
        self.logits = {prompt: [0.0] * 10 for prompt in PROMPTS}
        self.step = 0

    @endpoint
    async def train(self, rollouts: Any) -> tuple[int, float]:
        """``rollouts`` has the samples of each generator. Advantages are relative to the group of a prompt: that is
        what GRPO has instead of a value model."""
        samples = [sample for share in rollouts.values() for sample in share]
        for prompt in PROMPTS:
            group = [sample for sample in samples if sample.prompt == prompt]
            mean = sum(sample.reward for sample in group) / GROUP
            deviation = math.sqrt(sum((sample.reward - mean) ** 2 for sample in group) / GROUP)
            policy = probabilities(self.logits[prompt])
            for sample in group if deviation else []:
                advantage = (sample.reward - mean) / deviation
                ratio = policy[sample.answer] / sample.probability
                if (ratio > 1 + CLIP and advantage > 0) or (ratio < 1 - CLIP and advantage < 0):
                    continue  # the policy has moved far enough from the one that gave this answer
                for answer in range(10):
                    gradient = ratio * advantage * ((answer == sample.answer) - policy[answer])
                    self.logits[prompt][answer] += RATE / GROUP * gradient
        self.step += 1
        await self.generators.load.call(self.logits)
        return self.step, sum(sample.reward for sample in samples) / len(samples)

    @endpoint
    async def steps_done(self) -> int:
        return self.step


def make_job(arguments: argparse.Namespace) -> Any:
    detached = False if arguments.submit else "grpo"  # the run has a session of its own
    if arguments.kubernetes:
        compute = kt.Compute(replicas=3, image=kt.Image("grpo").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, name="grpo", namespace=arguments.namespace, detached=detached)
    return kt.ProcessJob({"workers": 3}, detached=detached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--submit", action="store_true", help="run in the cluster, without this machine")
    arguments = parser.parse_args()
    job = make_job(arguments)
    if arguments.submit:
        run = job.submit(["python", *(each for each in sys.argv if each != "--submit")], name="night")
        print(f"submitted as {run.name}: meshgate runs, meshgate logs --run {run.name} -f")
        return
    if job.sessions():
        actors = job.attach().actors
        generators, trainer = actors["generators"], actors["trainer"]
    else:
        hosts = job.state().workers
        judges = hosts.slice(hosts=0).spawn_procs(name="judges").spawn("judges", Judge)
        generators = (
            hosts.slice(hosts=slice(1, 3)).spawn_procs(name="generators").spawn("generators", Generator, judges)
        )
        trainer = hosts.slice(hosts=0).spawn_procs(name="trainer").spawn("trainer", Trainer, generators)
    first = trainer.steps_done.call_one().get() + 1
    print(f"starting with step {first}", flush=True)
    following = generators.generate.keep()
    for _ in range(first, arguments.steps + 1):
        rollouts, following = following, generators.generate.keep()  # while the trainer works
        step, reward = trainer.train.call_one(rollouts.all()).get()
        print(f"step {step}: {reward:.0%} of {GROUP * len(PROMPTS)} answers are right", flush=True)
    job.kill()


if __name__ == "__main__":
    main()

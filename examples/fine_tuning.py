"""Fine-tuning with live edits: the recipe changes while the model stays in the actors, with what it has learnt.

    python examples/fine_tuning.py                       # two hosts on this machine
    python examples/fine_tuning.py --kubernetes IMAGE    # two pods with this image, on the cluster of KUBECONFIG

A model that predicts the next letter of English is tuned to names. After ten steps the rate turns out to be too low,
and after thirty that the model forgets its English. Both times the program edits ``recipe.py``, as you would in an
editor, and ``reload()`` takes the edit into the running actors, which keep their weights.
The model is a table and needs no torch. On GPUs, ``Compute(gpus=...)`` requests them, the actors hold a model and an
optimizer there, and average gradients with ``torch.distributed``; the loop and the edits stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt

RECIPE = """
RATE = 0.5


def pull(weight: float, pretrained: float) -> float:  # towards the model as it was before
    return 0.0
"""
MODEL = '''
import math

import recipe
from meshgate import Actor, current_rank, endpoint

LETTERS = " abcdefghijklmnopqrstuvwxyz"
ENGLISH = "the model that has seen english text knows which letter follows another one and is now tuned to names "
NAMES = ("anna maria liam noah emma mia olga ivan ", "nina leo ada alan grace linus edsger barbara ")
Table = list[list[float]]  # a number for each letter after each other one


def shares(text: str) -> Table:
    """How much of the text each pair of letters is."""
    table = [[0.0] * len(LETTERS) for _ in LETTERS]
    for first, second in zip(text, text[1:]):
        table[LETTERS.index(first)][LETTERS.index(second)] += 1 / (len(text) - 1)
    return table


def probabilities(weights: list[float]) -> list[float]:
    exponentials = [math.exp(weight) for weight in weights]
    return [each / sum(exponentials) for each in exponentials]


def loss(model: Table, text: Table) -> float:
    return -sum(
        share * math.log(probability)
        for weights, row in zip(model, text)
        for share, probability in zip(row, probabilities(weights))
    )


def pretrained() -> Table:
    return [[math.log(share + 1e-3) for share in row] for row in shares(ENGLISH)]


class Trainer(Actor):
    """Each rank has the whole model and its own names."""

    def __init__(self) -> None:
        self.model, self.before = pretrained(), pretrained()
        self.names = shares(NAMES[current_rank().rank])

    @endpoint
    def gradient(self) -> Table:
        return [
            [sum(row) * probability - share for share, probability in zip(row, probabilities(weights))]
            for weights, row in zip(self.model, self.names)
        ]

    @endpoint
    def update(self, gradients: list[Table]) -> tuple[float, float]:
        """Takes a step. Returns the losses of the names of this rank and of English."""
        for first, weights in enumerate(self.model):
            for second, weight in enumerate(weights):
                gradient = sum(each[first][second] for each in gradients) / len(gradients)
                pull = recipe.pull(weight, self.before[first][second])
                weights[second] -= recipe.RATE * (gradient + pull)
        return loss(self.model, self.names), loss(self.model, shares(ENGLISH))
'''

EDITS = {  # before these steps
    11: ("the rate is too low", "RATE = 0.5", "RATE = 30.0"),
    31: ("the model forgets its English", "return 0.0", "return 0.002 * (weight - pretrained)"),
}


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("tuning").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def tune(job: Any, recipe: Path) -> None:
    hosts = job.state().workers
    job.sync(quiet=True)
    procs = hosts.spawn_procs()
    trainers = procs.spawn("trainers", importlib.import_module("model").Trainer)
    for step in range(1, 51):
        if step in EDITS:
            reason, old, new = EDITS[step]
            print(f"{reason}: {new!r} in {recipe.name}")
            recipe.write_text(recipe.read_text().replace(old, new))
            job.sync(quiet=True)
            procs.reload().get()
        gradients = trainers.gradient.call().get().values()
        losses = trainers.update.call(gradients).get().values()
        if step % 10 == 0:
            names = sum(of_names for of_names, _ in losses) / len(losses)
            print(f"step {step}: loss of names {names:.2f}, of English {losses[0][1]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fine-tuning-") as directory:
        project = Path(directory)
        (project / "recipe.py").write_text(RECIPE)
        (project / "model.py").write_text(MODEL)
        os.chdir(project)
        sys.path.insert(0, str(project))
        with make_job(arguments) as job:
            tune(job, project / "recipe.py")
        os.chdir("/")


if __name__ == "__main__":
    main()

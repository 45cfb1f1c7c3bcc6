"""Batch inference: every document of a folder through a model, by a pool of processes, with retries and a restart.

    python examples/batch_inference.py                      # two hosts of two processes on this machine
    python examples/batch_inference.py --kubernetes IMAGE   # pods with this image, on the cluster of KUBECONFIG

Results are appended to a file, one line of JSON for each document. Interrupt the program and start it again: it
continues with the documents that the file lacks. A document that fails is tried three times, and one that takes its
process along is tried again by another process. The model counts words and needs no torch. On GPUs, a real one is
loaded in ``__init__``, onto the GPU of its rank, and takes many documents in a call; ``Compute(gpus=2)`` requests GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt
from meshgate import Actor, ActorError, endpoint
from meshgate.errors import SupervisionError

ATTEMPTS = 3


class Task(NamedTuple):
    document: Path
    attempt: int = 1


class Model(Actor):
    @endpoint
    def label(self, text: str, attempt: int) -> str:
        if "\0" in text:
            raise ValueError("not a text")
        if "too large" in text and attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is used up
        return "long" if len(text.split()) > 5 else "short"


async def infer(models: Any, documents: list[Path], results: Path) -> dict[str, str]:
    """Appends the label of each document to ``results``. Returns why documents have none, by name."""
    tasks = deque(Task(document) for document in documents)
    failed: dict[str, str] = {}

    def put_back(task: Task, reason: str) -> None:
        print(f"{task.document.name}, attempt {task.attempt}: {reason}", flush=True)
        if task.attempt < ATTEMPTS:
            tasks.append(Task(task.document, task.attempt + 1))
        else:
            failed[task.document.name] = reason

    async def work(model: Any) -> bool:
        """Takes documents until none is left. Returns False if the process was lost."""
        while tasks:
            task = tasks.popleft()
            try:
                label = await model.label.call_one(task.document.read_text(), task.attempt)
            except ActorError as error:  # of this document; the process takes the next one
                put_back(task, str(error.__cause__))
            except SupervisionError:
                put_back(task, "its process was lost")
                return False
            else:
                with results.open("a") as file:
                    file.write(json.dumps({"document": task.document.name, "label": label}) + "\n")
        return True

    line = models.flatten("process")
    pool = [line.slice(process=index) for index in range(len(line))]
    while tasks and pool:  # again, if the last document was put back when the others had ended
        alive = await asyncio.gather(*[work(model) for model in pool])
        pool = [model for model, lives in zip(pool, alive, strict=True) if lives]
    return failed | {task.document.name: "no process is left" for task in tasks}


def done_before(results: Path) -> set[str]:
    return {json.loads(line)["document"] for line in results.read_text().splitlines()} if results.exists() else set()


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("inference").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("documents"), help="has the documents, *.txt")
    parser.add_argument("--results", type=Path, default=Path("labels.jsonl"), help="the file that gets the labels")
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the pods")
    arguments = parser.parse_args()
    done = done_before(arguments.results)
    documents = [each for each in sorted(arguments.folder.glob("*.txt")) if each.name not in done]
    print(f"{len(documents)} documents, {len(done)} done before", flush=True)
    if not documents:
        return
    kt.unhandled_fault_hook = lambda _: None  # continue; the call that the process ran raises the error as well
    with make_job(arguments) as job:
        procs = job.state().workers.spawn_procs(per_host={"gpus": 2})
        failed = asyncio.run(infer(procs.spawn("models", Model), documents, arguments.results))
    print(f"{len(documents) - len(failed)} labelled, {len(failed)} failed")
    for name, reason in failed.items():
        print(f"{name}: {reason}")


if __name__ == "__main__":
    main()
